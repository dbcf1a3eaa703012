"""The cosine against its formula."""

import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from drivetrain.train.schedulers import CosineLrScheduler
from drivetrain.train.settings import replace_trainer_placeholder_values


def make_optimizer(*rates):
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates], lr=1.0)


def curve(steps, rates=(0.01,), **arguments):
    """Return, per group, the value that each call of step() sets."""
    optimizer = make_optimizer(*rates)
    scheduler = CosineLrScheduler(optimizer, **arguments)
    seen = []
    for _ in range(steps):
        scheduler.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return [list(column) for column in zip(*seen)]


def reference(n, base, total, warmup=0, cooldown=0, k=1.0, lowest=1e-6, start=1e-6):
    if n < warmup:
        return start + n * (base - start) / warmup
    if n < total - cooldown:
        position = (n - warmup) ** k / (total - warmup - cooldown) ** k
        return lowest + (base - lowest) / 2 * (1 + math.cos(math.pi * position))
    return lowest


@pytest.mark.parametrize("k", [0.5, 1.0, 1.5])
def test_values_equal_the_formula_for_every_group(k):
    arguments = {
        "total_num_epochs": 10,
        "num_update_steps_per_epoch": 10,
        "num_warmup_epochs": 2,
        "num_cooldown_epochs": 1,
    }
    seen = curve(105, (0.01, 0.002), k_decay=k, lr_min=1e-4, **arguments)
    for base, values in zip((0.01, 0.002), seen):
        assert values == pytest.approx([reference(n, base, 100, 20, 10, k, 1e-4) for n in range(105)], rel=1e-12)


def test_the_rate_falls_smoothly_to_the_minimum_at_the_very_end():
    (values,) = curve(101, total_num_epochs=100, num_update_steps_per_epoch=1, num_warmup_epochs=20)
    falls = [a - b for a, b in pairwise(values[20:])]
    assert values[20] == 0.01
    assert values[100] == 1e-6
    assert 0 < max(falls) < 0.01 * math.pi / 2 / 80 * 1.01  # the steepest fall of a cosine over 80 updates
    assert values[80] == pytest.approx(reference(80, 0.01, 100, 20))


def test_a_warm_up_that_starts_at_a_ratio_never_exceeds_the_base_rate():
    (values,) = curve(
        101, total_num_epochs=100, num_update_steps_per_epoch=1, num_warmup_epochs=20, warmup_starting_lr_ratio=0.5
    )
    assert values[0] == 0.005
    assert max(values) == values[20] == 0.01


def test_the_minimum_may_be_a_ratio_of_each_base_rate():
    seen = curve(11, (0.01, 0.002), total_num_epochs=1, num_update_steps_per_epoch=10, min_lr_ratio=0.5)
    assert [min(values) for values in seen] == [0.005, 0.001] == [values[-1] for values in seen]


def test_the_first_update_runs_with_the_warm_up_start():
    optimizer = make_optimizer(0.01)
    CosineLrScheduler(optimizer, 10, 10, num_warmup_epochs=1, warmup_starting_lr_ratio=0.1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_on_four_processes_the_whole_curve_is_covered():
    # 20 batches per process: 20 updates happen in an epoch, while 80 are counted over all processes.
    config = SimpleNamespace(num_epochs=3, num_update_steps_per_epoch=80, num_local_update_steps_per_epoch=20)
    trainer = SimpleNamespace(run_config=config)
    optimizer = make_optimizer(0.01)
    scheduler = replace_trainer_placeholder_values(trainer, CosineLrScheduler.create_scheduler_fn())(optimizer)
    for _ in range(61):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-6


def test_create_scheduler_fn_passes_every_argument_on():
    made = CosineLrScheduler.create_scheduler_fn(10, 5, 2.0, 1e-5, 0.1, 1, 1e-4, 0.2, 3)
    assert isinstance(made, partial)
    scheduler = made(make_optimizer(0.1))
    assert (scheduler.total_iterations, scheduler.warmup_iterations, scheduler.num_cooldown_iterations) == (50, 5, 15)
    assert (scheduler.k_decay, scheduler.lr_min, scheduler.lr_min_ratio) == (2.0, 1e-5, 0.1)
    assert (scheduler.warmup_lr_init, scheduler.warmup_lr_ratio) == (1e-4, 0.2)


def test_a_restored_scheduler_continues_the_curve(tmp_path):
    arguments = {"total_num_epochs": 10, "num_update_steps_per_epoch": 10, "num_warmup_epochs": 2}
    optimizer = make_optimizer(0.01)
    scheduler = CosineLrScheduler(optimizer, **arguments)
    for _ in range(37):
        scheduler.step()
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    other = make_optimizer(0.01)
    restored = CosineLrScheduler(other, total_num_epochs=1, num_update_steps_per_epoch=1)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(20):
        scheduler.step()
        restored.step()
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
@pytest.mark.parametrize(
    "wrong",
    [
        {"total_num_epochs": 0},
        {"num_update_steps_per_epoch": 0},
        {"lr_min": -1.0},
        {"k_decay": 0},
        {"min_lr_ratio": 1.5},
        {"num_warmup_epochs": 8, "num_cooldown_epochs": 3},
    ],
)
def test_wrong_arguments_are_both_kinds_of_error(wrong, kind):
    with pytest.raises(kind, match=next(iter(wrong))):
        CosineLrScheduler(make_optimizer(0.1), **{"total_num_epochs": 10, "num_update_steps_per_epoch": 1, **wrong})
