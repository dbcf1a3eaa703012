"""The state of optimizers: torch's form, names, exact types, and no sharing with what was loaded."""

import copy
import io
import json

import pytest
import torch
from torch import nn

from drivetrain.context import Context
from drivetrain.core.errors import StateError
from drivetrain.optim import DecoupledAdamW, Lookahead


def make(order=lambda parameters: parameters, groups=None, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(dtype)
    named = dict(model.named_parameters())
    parameters = groups(named) if groups else order(list(model.parameters()))
    return Context(model=model, optimizer=torch.optim.AdamW(parameters, **{"lr": 0.1, **settings}))


def step(ctx, times=1):
    for _ in range(times):
        ctx.optimizer.zero_grad()
        first = next(ctx.model.parameters())
        ctx.model(torch.ones(4, 2, dtype=first.dtype)).pow(2).sum().backward()
        ctx.optimizer.step()
    return ctx


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def weights(ctx):
    return [parameter.detach().clone() for parameter in ctx.model.parameters()]


def assert_continues(source, live):
    assert all(map(torch.equal, weights(step(source, 2)), weights(step(live, 2))))


def test_the_state_is_torchs_form_with_the_names_of_the_parameters():
    ctx = step(make())
    state = ctx.state_dict()["optimizer"]
    assert state["param_groups"][0]["param_names"] == [f"model.{name}" for name, _ in ctx.model.named_parameters()]
    fresh = make()
    fresh.optimizer.load_state_dict(state)  # torch reads it too
    fresh.model.load_state_dict(ctx.model.state_dict())
    assert_continues(copy.deepcopy(ctx), fresh)


def test_settings_keep_their_types_even_through_json():
    source, live = step(make(betas=(0.8, 0.9))), make()
    state = source.state_dict()
    state["optimizer"]["param_groups"] = json.loads(json.dumps(state["optimizer"]["param_groups"]))
    live.load_state_dict(state)
    assert live.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert "param_names" not in live.optimizer.param_groups[0]
    live.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_state_that_was_not_built_yet_round_trips_both_ways():
    fresh, used = make(), step(make())
    empty = through_file(fresh.state_dict())
    live = make()
    live.load_state_dict(empty)
    assert not live.optimizer.state
    used.load_state_dict(empty)
    assert not any(used.optimizer.state.values())
    assert_continues(fresh, used)


def test_parameters_are_found_by_name_when_their_order_has_changed():
    source = step(make(), 3)
    live = make(order=lambda parameters: parameters[::-1])
    live.load_state_dict(through_file(source.state_dict()))
    assert_continues(source, live)


def test_parameters_are_found_by_name_when_they_moved_between_groups():
    def split(named):
        return [{"params": [named["0.weight"], named["1.weight"]]}, {"params": [named["0.bias"], named["1.bias"]]}]

    def other_split(named):
        return [{"params": [named["0.weight"]]}, {"params": [named["1.bias"], named["1.weight"], named["0.bias"]]}]

    source, live = step(make(groups=split), 3), make(groups=other_split)
    live.load_state_dict(through_file(source.state_dict()))
    assert_continues(source, live)


def test_groups_in_another_order_keep_the_settings_of_their_parameters():
    def groups(named):
        first, second = (list(named.values())[:2], list(named.values())[2:])
        return [{"params": first, "lr": 0.5}, {"params": second, "lr": 0.25}]

    source, live = step(make(groups=groups)), make(groups=lambda named: groups(named)[::-1])
    live.load_state_dict(through_file(source.state_dict()))
    assert [group["lr"] for group in live.optimizer.param_groups] == [0.25, 0.5]
    assert_continues(source, live)


def test_a_partial_load_leaves_out_the_state_of_parameters_that_changed():
    source, live = step(make()), make()
    live.model[1] = nn.Linear(3, 4)
    live.optimizer = torch.optim.AdamW(live.model.parameters(), lr=0.2)
    report = live.load_state_dict(through_file(source.state_dict()), strict=False)
    assert any(line.startswith("optimizer: the state of model.1.weight") for line in report.unfitting)
    assert "optimizer" not in report.restored and live.optimizer.param_groups[0]["lr"] == 0.1
    assert [bool(live.optimizer.state.get(p)) for p in live.model.parameters()] == [True, True, False, False]
    step(live)


def test_a_partial_load_restores_the_parameters_that_are_on_both_sides():
    source, live = step(make()), make()
    live.model.append(nn.Linear(1, 1))
    live.optimizer = torch.optim.AdamW(live.model.parameters())
    report = live.load_state_dict(through_file(source.state_dict()), strict=False)
    assert any("no state was saved for the parameter model.2.weight" in line for line in report.unfitting)
    kept = [live.optimizer.state.get(parameter, {}) for parameter in live.model.parameters()]
    assert [bool(state) for state in kept] == [True] * 4 + [False] * 2
    expected = [source.optimizer.state[parameter]["exp_avg"] for parameter in source.model.parameters()]
    assert all(torch.equal(state["exp_avg"], value) for state, value in zip(kept, expected))
    step(live)


def test_a_state_keyed_by_names_alone_is_read():
    source, live = step(make(), 3), make(order=lambda parameters: parameters[::-1])
    names = [name for name, _ in source.model.named_parameters()]
    torch_form = source.optimizer.state_dict()
    by_name = {
        "state": {names[number]: entries for number, entries in torch_form["state"].items()},
        "param_groups": [{**torch_form["param_groups"][0], "params": names}],
    }
    live.load_state_dict({"model": source.model.state_dict(), "optimizer": through_file(by_name)})
    assert_continues(source, live)


def test_an_optimizer_with_names_of_its_own_keeps_them():
    source, live = make(), make()
    for ctx in (source, live):
        ctx.optimizer = torch.optim.SGD(ctx.model.named_parameters(), lr=0.1, momentum=0.9)
    step(source, 2)
    live.load_state_dict(through_file(source.state_dict()))
    assert live.optimizer.param_groups[0]["param_names"] == [name for name, _ in live.model.named_parameters()]
    assert_continues(source, live)


def test_names_that_do_not_match_are_listed():
    source, live = step(make()), make()
    live.model = nn.Sequential()
    live.model.add_module("first", nn.Linear(2, 3))
    live.model.add_module("second", nn.Linear(3, 1))
    live.optimizer = torch.optim.AdamW(live.model.parameters())
    with pytest.raises(StateError) as caught:
        live.load_state_dict(source.state_dict())
    assert "no state was saved for the parameter model.first.weight" in str(caught.value)
    assert "the saved parameter model.0.bias is not in this optimizer" in str(caught.value)


def test_another_number_of_groups_is_refused():
    live = make(groups=lambda named: [{"params": [parameter]} for parameter in named.values()])
    with pytest.raises(StateError, match="saved 1 parameter groups, this optimizer has 4"):
        live.load_state_dict(make().state_dict())


def test_state_keeps_its_type_beside_parameters_of_lower_precision():
    source, live = make(dtype=torch.bfloat16), make(dtype=torch.bfloat16)
    step(source)
    for state in source.optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 1 / 3, dtype=torch.float32)
    live.load_state_dict(through_file(source.state_dict()))
    for one, two in zip(source.optimizer.state.values(), live.optimizer.state.values()):
        assert two["exp_avg"].dtype is torch.float32 and torch.equal(one["exp_avg"], two["exp_avg"])


def test_a_loaded_state_is_not_trained_along():
    source, live = step(make()), make()
    state = copy.deepcopy(source.state_dict())
    before = copy.deepcopy(state)
    live.load_state_dict(state)
    step(live, 2)
    for number, entries in state["optimizer"]["state"].items():
        assert torch.equal(entries["exp_avg"], before["optimizer"]["state"][number]["exp_avg"])
        assert torch.equal(entries["step"], before["optimizer"]["state"][number]["step"])


def test_state_in_lists_round_trips():
    source, live = make(), make()
    for ctx in (source, live):
        ctx.optimizer = torch.optim.LBFGS(ctx.model.parameters(), max_iter=3)

    def run(ctx):
        def closure():
            ctx.optimizer.zero_grad()
            loss = (ctx.model(torch.ones(4, 2)) - 1).pow(2).sum()
            loss.backward()
            return loss

        ctx.optimizer.step(closure)
        return ctx

    run(source)
    live.load_state_dict(through_file(source.state_dict()))
    assert all(map(torch.equal, weights(run(source)), weights(run(live))))


def test_one_optimizer_over_two_modules_and_a_free_parameter():
    def session():
        torch.manual_seed(0)
        ctx = Context(one=nn.Linear(2, 2), two=nn.Linear(2, 1), scale=nn.Parameter(torch.ones(1)))
        parameters = [*ctx.two.parameters(), ctx.scale, *ctx.one.parameters()]
        ctx.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return ctx

    def advance(ctx):
        ctx.optimizer.zero_grad()
        (ctx.two(ctx.one(torch.ones(1, 2))) * ctx.scale).sum().backward()
        ctx.optimizer.step()
        return ctx.scale.detach().clone()

    source, live = session(), session()
    advance(source)
    names = source.state_dict()["optimizer"]["param_groups"][0]["param_names"]
    assert names == ["two.weight", "two.bias", "scale", "one.weight", "one.bias"]
    live.load_state_dict(through_file(source.state_dict()))
    assert torch.equal(advance(source), advance(live))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: Lookahead(torch.optim.AdamW(p, lr=0.1, fused=True), k=2),
        lambda p: DecoupledAdamW(p, lr=0.1, fused=True),
    ],
)
@pytest.mark.parametrize(
    "formats", [(torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)]
)
def test_a_state_continues_in_a_model_of_another_memory_format(make_optimizer, formats):
    """A fused kernel walks through parameter, gradient and state in one order."""
    contexts = []
    for memory_format in formats:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        contexts.append(Context(model=model, optimizer=make_optimizer(model.parameters())))

    def run_steps(ctx, times):
        for step in range(times):
            for p in ctx.model.parameters():
                p.grad = torch.sin(p.detach() * 7 + step)
            ctx.optimizer.step()

    source, live = contexts
    run_steps(source, 3)
    live.load_state_dict(through_file(source.state_dict()))
    for ctx in contexts:
        run_steps(ctx, 2)
    assert torch.equal(live.model.weight, source.model.weight)
