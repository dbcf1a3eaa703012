"""The one way from losses to an update, compared with what torch does on the whole batch at once."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from drivetrain.core.errors import ResumeError
from drivetrain.module.accumulation import AccumulationWindow
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.module.stepper import (
    Stepper,
    clip_grad_norm_,
    clip_grad_value_,
    grad_norm,
    merge_windows,
    unmarked_step,
)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make_parts(sizes):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (sum(sizes),), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes)))


def make_stepper(model, length=1, scaler=None, **kwargs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepper = Stepper(
        optimizer, AccumulationWindow(length, reference=kwargs.pop("reference", None)), scaler=scaler, **kwargs
    )
    stepper.model = model
    return stepper


def take(stepper, model, parts, reduction="mean", counted=int):
    """Take micro-batches into the window, the last one closing it."""
    for index, (x, y) in enumerate(parts):
        stepper.begin(last=index == len(parts) - 1)
        loss = F.cross_entropy(model(x), y, reduction=reduction)
        stepper.backward(stepper.weigh(loss, 1 if reduction == "sum" else counted(len(x)), counted(len(x))))


def whole_gradients(parts, reduction="mean"):
    model = make_model()
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("counted", [int, torch.tensor])  # labels are counted on their device
@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("sizes", [[4], [4, 4, 4], [5, 1, 2], [1, 6]])
def test_a_window_of_unequal_parts_has_the_gradient_of_the_whole(sizes, length, counted):
    parts, model = make_parts(sizes), make_model()
    stepper = make_stepper(model, max(length, len(sizes)))
    unused = nn.Parameter(torch.ones(1))
    stepper.optimizer.add_param_group({"params": [unused]})
    take(stepper, model, parts, counted=counted)
    stepper.finish()
    stepper.finish()  # changes nothing
    for p, expected in zip(model.parameters(), whole_gradients(parts)):
        torch.testing.assert_close(p.grad, expected)
    assert unused.grad is None


@pytest.mark.parametrize("counted", [int, torch.tensor])
def test_a_window_without_items_has_zero_gradients(counted):
    model = make_model()
    stepper = make_stepper(model, 2)
    take(stepper, model, make_parts([3, 4]), counted=lambda size: counted(0))
    stepper.finish()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_losses_that_are_sums_add_up():
    parts, model = make_parts([5, 1, 2]), make_model()
    stepper = make_stepper(model, 4)
    stepper.use_sums(True)
    take(stepper, model, parts, "sum")
    stepper.finish()
    for p, expected in zip(model.parameters(), whole_gradients(parts, "sum")):
        torch.testing.assert_close(p.grad, expected)


def test_scaled_gradients_are_unscaled_once_and_an_overflow_leaves_the_update_out():
    parts, model = make_parts([5, 3]), make_model().float()
    parts = [(x.float(), y) for x, y in parts]
    stepper = make_stepper(model, 2, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    take(stepper, model, parts)
    stepper.finish()
    stepper.finish()
    for p, expected in zip(model.parameters(), whole_gradients(make_parts([5, 3]))):
        torch.testing.assert_close(p.grad, expected.float())
    stepper.step()
    stepper.clear()
    stepper.end()
    before = [p.detach().clone() for p in model.parameters()]
    take(stepper, model, [(parts[0][0] * float("inf"), parts[0][1])])
    assert not stepper.update() and stepper.was_skipped
    assert stepper.scaler.get_scale() == 4.0 and all(map(torch.equal, before, model.parameters()))
    stepper.clear()
    for _ in range(2):  # a rejected update is over for the scaler too, so the next one can be unscaled
        take(stepper, model, parts)
        stepper.finish()
        stepper.end_skipped_update()
        stepper.end()


def test_an_update_that_is_not_finite_is_skipped_where_that_is_asked_for():
    model = make_model()
    stepper, before = make_stepper(model), [p.detach().clone() for p in model.parameters()]
    (x, y), good = make_parts([2])[0], make_parts([2])
    take(stepper, model, [(x * float("nan"), y)])
    assert stepper.update(skip_nonfinite=True) is False and all(map(torch.equal, before, model.parameters()))
    stepper.clear()
    take(stepper, model, good)
    assert stepper.update(skip_nonfinite=True) and not all(map(torch.equal, before, model.parameters()))


def test_a_window_of_an_earlier_version_goes_on():
    parts, first, second = make_parts([4, 4, 2, 2]), make_model(), make_model()
    stepper, resumed = make_stepper(first, 4), make_stepper(second, 4)
    for x, y in parts[:2]:
        stepper.begin(last=False)
        stepper.backward(stepper.weigh(F.cross_entropy(first(x), y), len(x), len(x)))
    saved = copy.deepcopy(stepper.state_dict())
    older = {name: count for name, count in saved["window"].items() if name not in ("is_sum", "length")}
    resumed.load_state_dict({"window": older, "partial": {"items": 8, **saved["partial"]["grads"]}})
    resumed.prepare()
    take(resumed, second, parts[2:])
    resumed.finish()
    for p, expected in zip(second.parameters(), whole_gradients(parts)):
        torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "sizes"), [(6, [4, 4, 2, 2]), (1, [4, 4, 3])])
def test_a_window_that_was_saved_goes_on_with_another_length(length, sizes):
    parts, first, second = make_parts(sizes), make_model(), make_model()
    stepper = make_stepper(first, 4)
    for x, y in parts[:2]:
        stepper.begin(last=False)
        stepper.backward(stepper.weigh(F.cross_entropy(first(x), y), len(x), len(x)))
    saved = copy.deepcopy(stepper.state_dict())
    assert set(saved) == {"window", "partial", "axes", "guard"}
    resumed = make_stepper(second, length)
    resumed.load_state_dict(saved)
    resumed.prepare()
    take(resumed, second, parts[2:])
    resumed.finish()
    for p, expected in zip(second.parameters(), whole_gradients(parts)):
        torch.testing.assert_close(p.grad, expected)
    stepper.axes = resumed.axes = {"tensor": 2}
    resumed.load_state_dict(stepper.state_dict())
    stepper.axes = {}
    with pytest.raises(ResumeError, match="with the axes of data alone, and this run has {'tensor': 2}"):
        resumed.load_state_dict(saved)
    stepper.end()
    resumed.load_state_dict(stepper.state_dict())  # between two windows nothing belongs to a rank
    assert (resumed.window.count, resumed.window.items, resumed.window.everywhere) == (0, 0, 0)


def test_windows_one_after_the_other_are_updates_of_a_plain_loop():
    parts, model, reference = make_parts([4, 2, 3, 5, 1]), make_model(), make_model()
    stepper, optimizer = make_stepper(model, 2), torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for window in (parts[:2], parts[2:4], parts[4:]):
        take(stepper, model, window)
        assert stepper.update()
        stepper.clear()
        x, y = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_sparse_gradients_of_an_open_window_are_saved_dense_and_restored_sparse():
    table = nn.Embedding(5, 3, sparse=True)
    stepper = make_stepper(table, 2)
    stepper.begin(last=False)
    stepper.backward(stepper.weigh(table(torch.tensor([1, 3, 1])).square().mean(), 3, 3))
    saved, expected = stepper.state_dict(), table.weight.grad.to_dense()
    assert saved["partial"]["grads"]["weight"].layout is torch.strided  # checkpoints hold dense tensors only
    table.weight.grad = None
    resumed = make_stepper(table, 2)
    resumed.load_state_dict(saved)
    assert table.weight.grad.is_sparse and torch.equal(table.weight.grad.to_dense(), expected)


def test_windows_of_two_ranks_become_one():
    parts, steppers = make_parts([4, 2, 2]), []
    for x, y in parts[:2]:
        model = make_model()
        steppers.append(make_stepper(model, 2))
        steppers[-1].begin(last=False)
        steppers[-1].backward(steppers[-1].weigh(F.cross_entropy(model(x), y), len(x), 6))
    states = [stepper.state_dict() for stepper in steppers]
    for state in states:
        state["window"]["reference"] = 4  # ranks agree on the first count
    partials = [state["partial"] for state in states]
    partials[1]["grads"] = {name: grad * 2 / 4 for name, grad in partials[1]["grads"].items()}  # of 2 items, not of 4
    model = make_model()
    alone = make_stepper(model, 2)
    alone.load_state_dict({**states[0], "partial": merge_windows(partials, rank=0)})
    x, y = parts[2]
    alone.begin(last=True)
    alone.backward(alone.weigh(F.cross_entropy(model(x), y), len(x), len(x)))
    alone.finish()
    for p, expected in zip(model.parameters(), whole_gradients(parts)):
        torch.testing.assert_close(p.grad, expected)
    assert merge_windows(partials, rank=1)["items"] == 0 and merge_windows([{}, {}], rank=0) == {}
    with pytest.raises(ResumeError, match="cannot be moved to another number of ranks"):
        merge_windows([{**partials[0], "is_whole": False}, partials[1]], rank=0)


def test_gradients_of_parameters_that_join_later_are_cleared_and_tested():
    model, late = make_model(), nn.Parameter(torch.ones(2))
    stepper = make_stepper(model, policy=NonFinitePolicy())
    stepper.prepare()
    assert stepper.is_simple and stepper.guard.should_step()
    stepper.optimizer.add_param_group({"params": [late]})
    late.grad = torch.tensor([1.0, float("nan")])
    assert not stepper.guard.should_step()
    stepper.clear()
    assert late.grad is None


def test_the_norm_is_torchs_and_gradients_on_it_are_scaled_as_torch_does():
    ours, theirs = make_model(), make_model()
    for model in (ours, theirs):
        x, y = make_parts([6])[0]
        F.cross_entropy(model(x), y).backward()
    norm = clip_grad_norm_(ours.parameters(), 0.05)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.05))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters()))


def mixed_norms():
    """One sharded, one replicated and one plain gradient on each of two ranks, as one stage and as two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(1.0, 9.0)

    def parameter(gradient):
        made = nn.Parameter(torch.zeros_like(gradient))
        made.grad = gradient
        return made

    sharded, replicated = (distribute_tensor(values.clone(), mesh, [kind]) for kind in (Shard(0), Replicate()))
    held = [parameter(sharded), parameter(replicated), parameter(values.clone())]
    norm = clip_grad_norm_(held, 1.0, device="cpu")
    stage = [parameter(values * (torch.distributed.get_rank() + 1))]
    pipe = clip_grad_norm_(stage, 1.0, device="cpu", stages=2)
    largest = clip_grad_norm_([parameter(values * (torch.distributed.get_rank() + 1))], 1.0, float("inf"), stages=2)
    return norm.item(), held[0].grad.full_tensor(), held[2].grad, pipe.item(), stage[0].grad, largest.item()


def test_the_norm_of_mixed_gradients_and_of_stages_is_that_of_the_whole_model(world2):
    values = torch.arange(1.0, 9.0)
    for rank, (norm, sharded, plain, pipe, stage, largest) in enumerate(world2(mixed_norms)):
        expected = torch.cat([values] * 3).norm()
        assert norm == pytest.approx(expected.item())
        torch.testing.assert_close(sharded, values / expected)
        torch.testing.assert_close(plain, values / expected)
        both = torch.cat([values, values * 2]).norm()
        assert pipe == pytest.approx(both.item()) and largest == 16.0
        torch.testing.assert_close(stage, values * (rank + 1) / both)


def test_a_step_without_the_profilers_mark_still_calls_hooks_and_is_seen_by_a_profiler():
    model, seen = make_model(), []
    stepper, other = make_stepper(model), make_stepper(make_model())
    for one in (stepper, other):
        one.prepare()
        take(one, model if one is stepper else other.model, make_parts([4]))
        one.finish()
    stepper.step()
    other.optimizer.step()
    assert all(map(torch.equal, model.parameters(), other.model.parameters()))
    handle = stepper.optimizer.register_step_pre_hook(lambda *_: seen.append("own"))
    stepper.step()
    handle.remove()
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("all"))
    stepper.step()
    handle.remove()
    stepper.step()
    assert seen == ["own", "all"]
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:  # torch 2.11 warns without
        stepper.step()
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())
    torch.optim.lr_scheduler.ExponentialLR(stepper.optimizer, 0.5)  # replaces `step` on the instance
    stepper.prepare()
    stepper.step()
    assert stepper.optimizer._opt_called


def optimizer_with_a_gradient():
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return torch.optim.SGD([weight], lr=0.1), weight


def test_a_step_without_the_profilers_mark_is_the_optimizers_own():
    (optimizer, weight), (marked, expected) = optimizer_with_a_gradient(), optimizer_with_a_gradient()
    step = unmarked_step(optimizer)
    assert step is not None
    step()
    marked.step()
    assert torch.equal(weight, expected)


def test_a_step_calls_hooks_and_whatever_was_put_in_its_place_later():
    optimizer, _ = optimizer_with_a_gradient()
    step, called = unmarked_step(optimizer), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: called.append("before")),
        optimizer.register_step_post_hook(lambda *_: called.append("after")),
    ]
    step()
    assert called == ["before", "after"]
    for handle in handles:
        handle.remove()
    step()
    assert called == ["before", "after"]
    optimizer.step = lambda: called.append("replaced")
    step()
    assert called[-1] == "replaced"
    assert unmarked_step(optimizer) is None


def test_a_step_leaves_its_mark_while_a_profiler_is_on():
    optimizer, _ = optimizer_with_a_gradient()
    step = unmarked_step(optimizer)
    with torch.autograd.profiler.profile() as profile:
        step()
    assert any("SGD.step" in event.name for event in profile.function_events)


def test_values_of_gradients_are_clipped_as_torch_does():
    model, reference = make_model(), make_model()
    for one in (model, reference):
        (one(make_parts([3])[0][0]) * 50).sum().backward()
        one[0].bias.grad = None
    clip_grad_value_(model.parameters(), 0.7)
    torch.nn.utils.clip_grad_value_(reference.parameters(), 0.7)
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is expected.grad is None or torch.equal(ours.grad, expected.grad)
    clip_grad_value_([nn.Parameter(torch.ones(2))], 1.0)


def test_a_norm_without_gradients_is_where_other_norms_are():
    parameters = [nn.Parameter(torch.zeros(2))]
    assert grad_norm(parameters, device="meta").device.type == "meta"  # which stands for an accelerator
    assert grad_norm(parameters) == 0.0


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_fused_momentum_is_not_made_of_an_update_that_a_flag_skips(dampening):
    results = []
    for fused in (True, False):
        parameter = nn.Parameter(torch.zeros(5000))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, dampening=dampening, fused=fused)
        stepper = Stepper(optimizer, AccumulationWindow())
        stepper.prepare()
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            torch.full((5000,), 1e30)  # what is left in the memory that the momentum may be made in
            parameter.grad = torch.full((5000,), torch.nan)
            stepper.step_unless(torch.ones(()))
        for _ in range(2):
            parameter.grad = torch.ones(5000)
            stepper.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_sparse_gradients_are_clipped_like_dense_ones(clip):
    tables = [nn.Embedding(6, 3, sparse=sparse, dtype=torch.float64) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        for rows in ([1, 2, 2], [0, 2, 5]):
            table(torch.tensor(rows)).pow(3).sum().backward()
    norms = [clip(table.parameters(), 0.1) for table in tables]
    torch.testing.assert_close(tables[0].weight.grad.to_dense(), tables[1].weight.grad)
    assert clip is clip_grad_value_ or norms[0] == pytest.approx(float(norms[1]))


def test_a_state_sets_only_numbers_that_the_optimizer_has():
    class Counting(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            self.count += 1
            return super().step(closure)

    def make():
        return Stepper(Counting([nn.Parameter(torch.ones(1))], lr=0.1), AccumulationWindow())

    source, live = make(), make()
    source.optimizer.step()
    state = source.state_dict()
    assert state["optimizer"] == {"count": 1}
    live.load_state_dict({**state, "optimizer": {"count": 1, "step": 5, "unknown": 2, "defaults": 3}})
    assert live.optimizer.count == 1 and callable(live.optimizer.step) and isinstance(live.optimizer.defaults, dict)
    assert not hasattr(live.optimizer, "unknown")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16], [torch.float32, torch.float64]])
def test_the_norm_of_gradients_is_torchs_to_the_bit(norm_type, dtypes):
    torch.manual_seed(0)
    parameters = []
    for place, size in enumerate((1, 7, 300, 5000)):
        parameters.append(nn.Parameter(torch.zeros(3, size, dtype=dtypes[place % len(dtypes)])))
        parameters[-1].grad = torch.randn_like(parameters[-1])
    expected = nn.utils.get_total_norm([p.grad for p in parameters], norm_type)
    found = grad_norm(parameters, norm_type)
    assert torch.equal(found, expected) and found.dtype is expected.dtype
