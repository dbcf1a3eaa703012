"""Warm-up, stable, decay: against the formula, and its life over several runs."""

import math
from types import SimpleNamespace

import pytest
import torch

from drivetrain.train.schedulers import WSDLrScheduler, estimate_checkpoint_steps
from drivetrain.train.settings import replace_trainer_placeholder_values


def make_optimizer(*rates):
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates], lr=1.0)


def values_of(scheduler, steps):
    seen = []
    for _ in range(steps):
        scheduler.step()
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
    return seen


def make(rate=0.01, **arguments):
    return WSDLrScheduler(make_optimizer(rate), **arguments)


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(1000, 1, [1000]), (1000, 2, [500, 1000]), (200_000, 3, [50_000, 100_000, 200_000]), (7, 3, [1, 3, 7])],
)
def test_checkpoints_double_and_the_last_one_is_the_end(total, count, expected):
    assert estimate_checkpoint_steps(total, count) == expected
    assert make(total_steps=total, num_checkpoints=count).get_checkpoint_steps() == expected


@pytest.mark.parametrize("use_sqrt", [True, False])
def test_values_equal_the_formula(use_sqrt):
    scheduler = make(
        total_steps=100, num_warmup_steps=10, num_checkpoints=2, lr_min=0.1, use_inverse_sqrt_decay=use_sqrt
    )
    expected = []
    for n in range(110):
        if n < 10:
            expected.append(1e-6 + n / 10 * (0.01 - 1e-6))
            continue
        start = 45 if n < 50 else 95
        t = min(max((n - start) / 5, 0), 1)
        factor = 0.1 + 0.9 * (1 - math.sqrt(t)) if use_sqrt else 0.1 / (t + 0.1 * (1 - t))
        expected.append(0.01 * factor)
    assert values_of(scheduler, 110) == pytest.approx(expected, rel=1e-12)


def test_every_group_keeps_its_own_base_rate():
    optimizer = make_optimizer(0.01, 0.002)
    scheduler = WSDLrScheduler(optimizer, total_steps=10, decay_phase_ratio=0.5, lr_min=0.5)
    scheduler.step_update(10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.001])


def test_periods_tell_start_end_and_decay():
    scheduler = make(total_steps=100, num_checkpoints=2)
    first, second = scheduler.get_decay_info()
    assert first == {"period_start": 0, "period_end": 50, "decay_steps": 5, "pre_decay_step": 45}
    assert second == {"period_start": 50, "period_end": 100, "decay_steps": 5, "pre_decay_step": 95}
    assert scheduler.get_phase_info(50) is first
    assert scheduler.get_phase_info(51) is second
    assert scheduler.get_phase_info(1000) is second
    assert scheduler._get_checkpoint_info(50) == (50, 0)
    scheduler._get_checkpoint_info.cache_clear()


def test_the_scheduler_knows_where_it_is():
    scheduler = make(total_steps=100, num_checkpoints=2)
    assert scheduler.get_current_step() == 0
    values_of(scheduler, 61)
    assert scheduler.get_current_step() == 60
    assert scheduler.get_current_phase_info()["period_end"] == 100


def test_warm_up_none_means_one_percent():
    assert make(total_steps=1000, num_warmup_steps=None).num_warmup_steps == 10


def test_the_first_update_runs_with_the_warm_up_start():
    scheduler = make(total_steps=100, num_warmup_steps=10, warmup_starting_lr=1e-5)
    assert scheduler.optimizer.param_groups[0]["lr"] == 1e-5


@pytest.mark.parametrize("use_sqrt", [True, False])
def test_short_periods_and_a_minimum_of_zero_do_not_divide_by_zero(use_sqrt):
    short = make(total_steps=5, decay_phase_ratio=0.1, use_inverse_sqrt_decay=use_sqrt)
    assert values_of(short, 8) == [0.01] * 8  # too short for a decay: there is none
    to_zero = make(total_steps=10, decay_phase_ratio=0.5, lr_min=0, use_inverse_sqrt_decay=use_sqrt)
    values = values_of(to_zero, 12)
    assert values[5] == 0.01
    assert values[-1] == 0.0


def test_after_the_end_the_last_value_holds():
    values = values_of(make(total_steps=10, decay_phase_ratio=0.5, lr_min=0.2), 15)
    assert values[10:] == pytest.approx([0.002] * 5)


def test_a_restored_scheduler_continues(tmp_path):
    scheduler = make(total_steps=100, num_warmup_steps=10, num_checkpoints=2)
    values_of(scheduler, 47)
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    restored = make(total_steps=100, num_warmup_steps=10, num_checkpoints=2)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert restored.get_current_step() == 46
    assert values_of(restored, 60) == values_of(scheduler, 60)


def continuation_of(state, total_steps=50, **arguments):
    scheduler = make(total_steps=total_steps, is_continuation_from_checkpoint=True, **arguments)
    scheduler.load_state_dict(state)
    return scheduler


def test_a_continuation_has_its_own_length_the_old_shape_and_no_warm_up():
    first = make(total_steps=100, num_warmup_steps=20, decay_phase_ratio=0.2, num_checkpoints=2, lr_min=0.5)
    values_of(first, 45)
    second = continuation_of(first.state_dict(), total_steps=60, decay_phase_ratio=0.1)
    assert (second.total_steps, second.decay_phase_ratio, second.num_checkpoints) == (60, 0.2, 2)
    assert second.get_checkpoint_steps() == [30, 60]
    assert second.is_continuation_from_checkpoint
    values = values_of(second, 61)
    assert values[:25] == [0.01] * 25
    assert values[25] < 0.01
    assert values[30] == 0.01
    assert values[60] == pytest.approx(0.005)


def test_a_continuation_that_is_resumed_goes_on_in_its_middle():
    first = make(total_steps=100)
    values_of(first, 90)
    second = continuation_of(first.state_dict())
    values_of(second, 47)
    resumed = continuation_of(second.state_dict())
    assert resumed.get_current_step() == 46
    assert values_of(resumed, 5) == values_of(second, 5)


def test_a_continuation_of_a_continuation_starts_afresh():
    second = continuation_of(make(total_steps=100).state_dict(), total_steps=50)
    values_of(second, 45)
    third = continuation_of(second.state_dict(), total_steps=80)
    assert values_of(third, 72) == [0.01] * 72


def test_restart_counts_from_the_beginning_and_sets_the_rate():
    scheduler = make(total_steps=10, decay_phase_ratio=0.5, lr_min=0.1)
    values_of(scheduler, 11)
    scheduler.restart()
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.01
    assert scheduler.get_current_step() == 0


def test_create_scheduler_fn_counts_warm_up_in_epochs():
    config = SimpleNamespace(num_epochs=10, num_local_update_steps_per_epoch=30)
    make_scheduler = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=2, num_checkpoints=2, lr_min=0.1)
    scheduler = replace_trainer_placeholder_values(SimpleNamespace(run_config=config), make_scheduler)(
        make_optimizer(0.1)
    )
    assert (scheduler.total_steps, scheduler.num_warmup_steps, scheduler.lr_min) == (300, 60, 0.1)
    default = WSDLrScheduler.create_scheduler_fn(total_num_epochs=10, num_update_steps_per_epoch=20)
    assert default(make_optimizer(0.1)).num_warmup_steps == 2


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
@pytest.mark.parametrize(
    "wrong",
    [{"total_steps": 0}, {"decay_phase_ratio": 1.5}, {"lr_min": -0.1}, {"num_checkpoints": 0}, {"num_checkpoints": 9}],
)
def test_wrong_arguments_are_both_kinds_of_error(wrong, kind):
    with pytest.raises(kind, match=next(iter(wrong))):
        make(**{"total_steps": 100, **wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"total_steps": 10, "num_epochs": 2, "num_update_steps_per_epoch": 5}, "set twice"),
        ({}, "is missing"),
        ({"num_epochs": 2}, "is missing"),
        ({"total_steps": 10, "warmup_starting_lr": 0.1}, "above the base rate"),
        ({"total_steps": 100, "num_checkpoints": 2, "decay_phase_ratio": 0.4}, "at most a third"),
    ],
)
def test_contradictions_are_value_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)
