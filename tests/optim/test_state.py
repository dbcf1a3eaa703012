"""Saving and restoring units, between windows and inside them."""

import copy
import io

import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.optim import ConstantLr, CosineLr, NoamLr, OptimSet
from tests.optim.models import EncoderDecoder, batches, losses_of, same, weights


def build(model, **changes):
    conf = {"optim_type": "Adam", "optim_conf": {"lr": 0.05}, "model": model, **changes}
    return OptimSet(
        encoder=NoamLr(
            **conf,
            updated_modules="encoder",
            optim_loss="encoder_loss",
            warmup_steps=3,
            accum_grad=4,
            step_per_update=2,
        ),
        decoder=CosineLr(
            **conf,
            updated_modules="decoder",
            optim_loss="decoder_loss",
            total_steps=20,
            accum_grad=4,
            step_per_update=3,
            accumulate_skipped=True,
        ),
    )


def run(optim, model, first, last, lengths=10):
    for number in range(first, last + 1):
        plan = optim.begin_batch(number, (number - 1) // lengths + 1, last=number % lengths == 0)
        optim.backward(losses_of(model, batches(1, seed=number)[0]), weight=1.0 + number % 3)
        if plan.closes:
            optim.step()
            optim.zero_grad()


def through_a_file(state):
    """The state as a checkpoint would give it back: plain containers and tensors only."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("at", [1, 4, 6, 7, 8, 10, 13, 17])
def test_a_run_saved_at_any_batch_continues_bit_for_bit(at):
    model = EncoderDecoder()
    optim = build(model)
    run(optim, model, 1, at)
    state, parameters = through_a_file(optim.state_dict()), copy.deepcopy(model.state_dict())
    run(optim, model, at + 1, 30)

    resumed_model = EncoderDecoder(seed=9)
    resumed_model.load_state_dict(parameters)
    resumed = build(resumed_model)
    assert resumed.load_state_dict(state) == ([], [])
    run(resumed, resumed_model, at + 1, 30)

    assert same(weights(model), weights(resumed_model))
    for name in optim:
        ours, theirs = optim[name].state_dict(), resumed[name].state_dict()
        assert (ours["real_step"], ours["update_count"]) == (theirs["real_step"], theirs["update_count"])
    assert optim.get_lr() == resumed.get_lr()


@pytest.mark.parametrize("at", [3, 4, 5, 7])
def test_a_unit_driven_by_hand_resumes_its_own_count(at):
    def make(seed):
        model = EncoderDecoder(seed=seed)
        return model, CosineLr("Adam", {"lr": 0.1}, model, total_steps=10, accum_grad=3)

    model, unit = make(0)
    for x in batches(at):
        unit.step(losses_of(model, x))
    state, parameters = through_a_file(unit.state_dict()), copy.deepcopy(model.state_dict())
    other, resumed = make(5)
    other.load_state_dict(parameters)
    resumed.load_state_dict(state)
    for x in batches(9, seed=2):
        assert unit.step(losses_of(model, x)) == resumed.step(losses_of(other, x))
    assert same(weights(model), weights(other)) and unit.real_step == resumed.real_step


def test_partial_is_none_between_windows_and_holds_own_gradients_inside():
    model = EncoderDecoder()
    optim = build(model)
    assert optim.state_dict()["encoder"]["partial"] is None
    run(optim, model, 1, 6)
    partial = optim.state_dict()["encoder"]["partial"]
    assert partial["batches"] == 2 and set(partial["grads"]) == {"encoder.weight", "encoder.bias"}
    assert set(optim.state_dict()["encoder"]) == {
        "optimizer",
        "scaler",
        "real_step",
        "update_count",
        "skipped_steps",
        "param_names",
        "partial",
        "grad_norm",
    }


def test_a_saved_partial_gradient_does_not_change_afterwards():
    model = EncoderDecoder()
    optim = build(model)
    run(optim, model, 1, 6)
    partial = optim.state_dict()["encoder"]["partial"]["grads"]["encoder.weight"]
    kept = partial.clone()
    run(optim, model, 7, 7)
    assert torch.equal(partial, kept)


def test_base_rates_come_from_the_configuration():
    model = EncoderDecoder()
    optim = build(model)
    run(optim, model, 1, 4)
    other = EncoderDecoder()
    changed = build(other, optim_conf={"lr": 0.5})
    changed.load_state_dict(optim.state_dict())
    assert changed["decoder"].lr_at(1) == 0.5
    assert changed.param_groups[0]["unit"] == "encoder"


def test_names_must_match_unless_loading_is_not_strict():
    model = EncoderDecoder()
    state = build(model).state_dict()
    state["extra"] = state.pop("decoder")
    with pytest.raises(ConfigError, match=r"missing \['decoder'\], unexpected \['extra'\]"):
        build(model).load_state_dict(state)
    assert build(model).load_state_dict(state, strict=False) == (["decoder"], ["extra"])


def test_other_parameters_are_refused():
    model = EncoderDecoder()
    state = ConstantLr("SGD", None, model, updated_modules="encoder").state_dict()
    with pytest.raises(ConfigError, match=r"other parameters.*decoder.weight.*encoder.weight"):
        ConstantLr("SGD", None, model, updated_modules="decoder").load_state_dict(state)
    with pytest.raises(ConfigError, match="lacks"):
        ConstantLr("SGD", None, model, updated_modules="encoder").load_state_dict({"optimizer": {}, "real_step": 1})
    with pytest.raises(ConfigError, match="expected 'optimizer'"):
        ConstantLr("SGD", None, model).load_state_dict({})


def test_a_file_without_a_clock_takes_the_callers():
    model = EncoderDecoder()
    unit = NoamLr("Adam", {"lr": 1.0}, model, warmup_steps=8, accum_grad=2)
    run(OptimSet(main=unit), model, 1, 6)
    old = {"optimizer": unit.optimizer.state_dict(), "scaler": None}
    fresh = OptimSet(main=NoamLr("Adam", {"lr": 1.0}, EncoderDecoder(), warmup_steps=8, accum_grad=2))
    fresh.load_state_dict({"main": old})
    fresh.begin_batch(7, 1)
    assert fresh["main"].real_step == 4


def test_a_set_of_one_accepts_a_torch_optimizers_state():
    model = EncoderDecoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses_of(model, batches(1)[0])["loss"].backward()
    optimizer.step()
    optim = OptimSet(main=ConstantLr("Adam", {"lr": 0.1}, model))
    optim.load_state_dict(optimizer.state_dict())
    assert torch.equal(optim.state[model.encoder.weight]["exp_avg"], optimizer.state[model.encoder.weight]["exp_avg"])
    assert optim.param_groups[0]["unit"] == "main"


def test_a_scale_that_nobody_needs_is_left_out_with_a_warning():
    unit = ConstantLr("SGD", None, EncoderDecoder())
    state = unit.state_dict()
    state["scaler"] = {"scale": 65536.0, "growth_factor": 2.0}
    with pytest.warns(UserWarning, match="gradient scale"):
        unit.load_state_dict(state)


@pytest.mark.parametrize(("old", "new"), [(4, 8), (4, 3), (2, 5)])
def test_a_window_goes_on_with_another_length(old, new):
    xs, optim = batches(8), {}
    for length in (old, new):
        model = EncoderDecoder()
        optim[length] = OptimSet(ConstantLr("SGD", {"lr": 0.1}, model, accum_grad=length, grad_clip=None))
    for number, x in enumerate(xs, start=1):
        now = optim[old if number < old else new]
        if number == old:
            now.load_state_dict(optim[old].state_dict())
        model = now["main"].model
        now.begin_batch(number, 1)
        now.backward(losses_of(model, x))
        if now.step():
            break
    plain = EncoderDecoder()
    loss = sum(losses_of(plain, x)["loss"] for x in xs[:number]) / number
    for p, start, grad in zip(
        model.parameters(), plain.parameters(), torch.autograd.grad(loss, list(plain.parameters()))
    ):
        torch.testing.assert_close(p, start - 0.1 * grad)
