"""The formulas and their classes against hand-computed numbers and torch's own schedulers."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from drivetrain.core.errors import ConfigError
from drivetrain.optim import (
    ConstantLr,
    CosineLr,
    CosineRestartsLr,
    ExponentDecayLr,
    InverseSqrtLr,
    LambdaLr,
    LinearLr,
    MultiStepLr,
    NoamLr,
    OneCycleLr,
    PolynomialLr,
    StepLr,
    WSDLr,
    as_lr_lambda,
    curves,
    schedules,
)


def unit(cls, lr=1.0, **conf):
    return cls("SGD", {"lr": lr}, nn.Linear(1, 1), **conf)


def rates(cls, count, **conf):
    made = unit(cls, **conf)
    return [made.lr_at(step) for step in range(1, count + 1)]


@pytest.mark.parametrize(
    ("cls", "conf", "expected"),
    [
        (NoamLr, {"warmup_steps": 4, "ft_factor": 0.1}, [0.025, 0.05, 0.075, 0.1, 0.0894, 0.0816]),
        (CosineLr, {"total_steps": 4}, [1, 0.853553, 0.5, 0.146447, 0, 0]),
        (CosineLr, {"total_steps": 6, "warmup_steps": 2}, [0.5, 1, 0.904508, 0.654508, 0.345492, 0.095492]),
        (LinearLr, {"total_steps": 4}, [1, 0.75, 0.5, 0.25, 0]),
        (PolynomialLr, {"power": 2, "total_steps": 4}, [1, 0.5625, 0.25, 0.0625, 0]),
        (StepLr, {"step_size": 2}, [1, 1, 0.1, 0.1, 0.01]),
        (MultiStepLr, {"milestones": [2, 4]}, [1, 1, 0.1, 0.1, 0.01, 0.01]),
        (WSDLr, {"total_steps": 10, "warmup_steps": 2, "decay_steps": 4}, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0]),
        (
            WSDLr,
            {"total_steps": 10, "warmup_steps": 2, "decay_steps": 4, "decay": "sqrt"},
            [0.5, 1, 1, 1, 1, 1, 0.5528, 0.3675, 0.2254, 0.1056],
        ),
        (
            WSDLr,
            {"total_steps": 4, "decay_steps": 1, "decay": "inverse", "min_lr_ratio": 0.5},
            [1, 1, 1, 1 / (0.5 / 0.5 + 0.5), 0.5],
        ),
        (
            OneCycleLr,
            {"total_steps": 10},
            [0.04, 0.52, 1, 0.950485, 0.811746, 0.611262, 0.388742, 0.188258, 0.049519, 4e-6, 4e-6],
        ),
        (InverseSqrtLr, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, math.sqrt(4 / 5), math.sqrt(4 / 6)]),
        (ConstantLr, {}, [1, 1, 1]),
        (ConstantLr, {"warmup_steps": 4, "warmup_start": 0.2}, [0.4, 0.6, 0.8, 1, 1]),
        (ConstantLr, {"warmup_steps": 4, "warmup_start": 0.2, "warmup": "constant"}, [0.2, 0.2, 0.2, 1]),
        (ConstantLr, {"warmup_steps": 2, "warmup": "cosine"}, [0.5, 1, 1]),
        (CosineRestartsLr, {"first_cycle": 2, "cycle_mult": 2}, [1, 0.5, 1, 0.853553, 0.5, 0.146447, 1]),
        (CosineRestartsLr, {"first_cycle": 2, "warmup_steps": 2}, [0.5, 1, 0.5, 1, 0.5]),
        (ExponentDecayLr, {"decay_factor": 0.9, "per": "step"}, [1, 0.9, 0.81]),
        (LambdaLr, {"fn": lambda step: step / 10}, [0.1, 0.2, 0.3]),
        (LambdaLr, {"fn": "math.sqrt", "warmup_steps": 2}, [0.5, math.sqrt(2), math.sqrt(3)]),
    ],
)
def test_schedules_have_the_documented_values(cls, conf, expected):
    assert rates(cls, len(expected), **conf) == pytest.approx(expected, abs=6e-5, rel=1e-4)


def test_noam_with_a_model_width():
    made = unit(NoamLr, d_model=512, warmup_steps=4000)
    assert made.lr_at(1) == pytest.approx(1.7469e-7, rel=1e-4)
    assert made.lr_at(4000) == pytest.approx(6.98771e-4, rel=1e-5)


def test_inverse_square_root_with_warmup_is_noam():
    assert rates(InverseSqrtLr, 20, warmup_steps=4) == pytest.approx(rates(NoamLr, 20, warmup_steps=4), rel=1e-12)


def test_warmup_reaches_the_base_rate_on_its_last_step_and_never_starts_at_zero():
    for cls, conf in [(CosineLr, {"total_steps": 30}), (LinearLr, {"total_steps": 30}), (WSDLr, {"total_steps": 30})]:
        values = rates(cls, 30, warmup_steps=5, **conf)
        assert values[4] == 1.0 and values[0] == pytest.approx(0.2) and max(values) == 1.0


def torch_rates(make, count):
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.7)
    scheduler = make(optimizer)
    values = []
    for _ in range(count):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize(
    ("cls", "conf", "make"),
    [
        (CosineLr, {"total_steps": 9, "min_lr": 0.07}, lambda o: lr_scheduler.CosineAnnealingLR(o, 9, eta_min=0.07)),
        (LinearLr, {"total_steps": 9}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=9)),
        (PolynomialLr, {"total_steps": 9, "power": 3}, lambda o: lr_scheduler.PolynomialLR(o, 9, power=3)),
        (StepLr, {"step_size": 3, "gamma": 0.5}, lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5)),
        (MultiStepLr, {"milestones": [2, 5]}, lambda o: lr_scheduler.MultiStepLR(o, [2, 5])),
        (ExponentDecayLr, {"decay_factor": 0.8, "per": "step"}, lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
        (
            CosineRestartsLr,
            {"first_cycle": 3, "cycle_mult": 2},
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
        ),
        (
            OneCycleLr,
            {"total_steps": 9},
            lambda o: lr_scheduler.OneCycleLR(o, 0.7, total_steps=9, cycle_momentum=False),
        ),
        (
            OneCycleLr,
            {"total_steps": 9, "pct_start": 0.4, "anneal": "linear", "div_factor": 10},
            lambda o: lr_scheduler.OneCycleLR(
                o, 0.7, total_steps=9, pct_start=0.4, anneal_strategy="linear", div_factor=10, cycle_momentum=False
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_without_warmup_schedules_equal_torchs(cls, conf, make):
    count = 8
    assert rates(cls, count, lr=0.7, **conf) == pytest.approx(torch_rates(make, count), rel=1e-6)


def test_floors_lift_the_whole_body_and_scale_with_ft_factor():
    assert rates(LinearLr, 5, total_steps=4, min_lr_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert rates(LinearLr, 5, lr=2.0, total_steps=4, min_lr=0.4) == pytest.approx([2, 1.6, 1.2, 0.8, 0.4])
    assert rates(LinearLr, 5, lr=2.0, total_steps=4, min_lr=0.4, ft_factor=0.5) == pytest.approx(
        [1, 0.8, 0.6, 0.4, 0.2]
    )


def test_k_decay_above_one_keeps_the_rate_high_for_longer():
    plain, late = (rates(CosineLr, 10, total_steps=10, k_decay=k) for k in (1.0, 2.0))
    assert all(b >= a for a, b in zip(plain, late)) and late[5] > plain[5]


def test_exponential_decay_per_epoch():
    made = unit(ExponentDecayLr, decay_factor=0.9, ft_factor=0.5)
    seen = []
    for step in range(1, 5):
        made.step(made.model(torch.ones(1, 1)).sum(), step_num=step, epoch_num=(step - 1) // 2 + 1)
        seen.append(made.get_lr())
    assert seen == pytest.approx([0.5, 0.5, 0.45, 0.45])
    with pytest.raises(ConfigError, match="epoch_num"):
        made.lr_at(1)


@pytest.mark.parametrize(
    ("given", "accum", "expected"),
    [
        (12, 1, 12),
        ("12st", 4, 12),
        ("3ep", 1, 30),
        ("3ep", 4, 9),
        ("0.5dur", 1, 25),
        ("25ba", 4, 3 + 3 + 2),
        ("10ba", 1, 10),
    ],
)
def test_durations_become_real_steps(given, accum, expected):
    made = unit(ConstantLr, warmup_steps=given, accum_grad=accum)
    made.bind(total_steps=50, steps_per_epoch=10)
    values = [made.lr_at(step) for step in range(1, 50)]
    assert values.index(1.0) + 1 == expected


def test_an_unknown_length_comes_from_bind_and_counts_short_windows_of_each_epoch():
    made = unit(LinearLr, accum_grad=4)
    with pytest.raises(ConfigError, match="total_steps"):
        made.lr_at(1)
    with pytest.raises(ConfigError, match="total_steps"):
        made.bind(steps_per_epoch=6)
    made.bind(total_steps=18, steps_per_epoch=6)  # three epochs of two windows
    assert [made.lr_at(step) for step in range(1, 7)] == pytest.approx([1 - n / 6 for n in range(6)])


def test_wsd_decays_over_the_last_tenth_by_default():
    values = rates(WSDLr, 101, total_steps=100)
    assert values[:90] == [1.0] * 90 and values[90] == pytest.approx(10 / 11) and values[-1] == 0.0


@pytest.mark.parametrize(
    ("cls", "conf", "message"),
    [
        (CosineLr, {"total_steps": 10, "warmup_steps": 10}, r"10 .*10"),
        (CosineLr, {"total_steps": 0}, "at least 1"),
        (CosineLr, {"total_steps": 10, "min_lr": 0.1, "min_lr_ratio": 0.1}, "Use one"),
        (CosineLr, {"total_steps": 10, "min_lr": 2.0}, "from 0 to"),
        (CosineLr, {"total_steps": "10mm"}, "unknown time unit"),
        (CosineLr, {"total_steps": "10tok"}, "steps"),
        (CosineLr, {"total_steps": 10, "warmup_steps": True}, "warmup_steps"),
        (CosineLr, {"total_steps": 10, "warmup_steps": 2.5}, "warmup_steps"),
        (CosineLr, {"total_steps": 10, "warmup": "liner"}, "'linear'"),
        (CosineLr, {"total_steps": 10, "warmup_start": 2}, "fraction"),
        (WSDLr, {"total_steps": 10, "decay": "inverse"}, "min_lr"),
        (WSDLr, {"total_steps": 10, "decay_steps": 8, "warmup_steps": 5}, "do not fit"),
        (StepLr, {"step_size": 0}, "at least 1"),
        (MultiStepLr, {"milestones": [4, 2]}, "ascending"),
        (MultiStepLr, {"milestones": 5}, "list"),
        (CosineRestartsLr, {"first_cycle": 4, "cycle_mult": 0.5}, "at least 1"),
        (NoamLr, {"warmup_steps": 0}, "at least 1"),
        (NoamLr, {"d_model": 0}, "d_model"),
        (ExponentDecayLr, {"per": "batch"}, "epoch, step"),
        (LambdaLr, {"fn": "math.sqtr"}, "'sqrt'"),
        (LambdaLr, {"fn": 5}, "function"),
    ],
)
def test_bad_schedule_arguments_are_value_errors(cls, conf, message):
    with pytest.raises(ValueError, match=message):
        unit(cls, **conf).lr_at(1)


def test_a_warmup_in_epochs_needs_the_length_of_an_epoch():
    made = unit(ConstantLr, warmup_steps="2ep")
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        made.lr_at(1)


def test_lr_lambdas_are_the_same_curves_for_a_plain_optimizer():
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scheduler = lr_scheduler.LambdaLR(
        optimizer, as_lr_lambda("cosine", total_steps=6, warmup_steps=2, min_lr_ratio=0.1)
    )
    seen = []
    for _ in range(6):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx(rates(CosineLr, 6, lr=0.5, total_steps=6, warmup_steps=2, min_lr_ratio=0.1))
    with pytest.raises(ConfigError, match="'cosine'"):
        as_lr_lambda("cosin", total_steps=4)
    with pytest.raises(ConfigError, match="min_lr_ratio"):
        as_lr_lambda("cosine", total_steps=4, min_lr=0.1)
    with pytest.raises(ConfigError, match="total_steps"):
        as_lr_lambda("cosine")


def test_curves_is_a_second_name_of_the_formulas():
    assert curves.cosine is schedules.cosine
    assert set(curves.__all__) == {
        name for name in vars(schedules) if callable(vars(schedules)[name]) and name[0].islower()
    } - {
        "bisect_right",
    }
