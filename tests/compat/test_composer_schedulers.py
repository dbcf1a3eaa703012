"""Composer's schedulers beside their formulas, in every unit and at every scale."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import optim
from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError
from drivetrain.core.event import Event
from drivetrain.train.trainer import Trainer
from tests.algorithms.tasks import Watch
from tests.train.tasks import make_data, make_trainer, train

LENGTH = 10  # batches per epoch


def state_at(batches: int, max_duration: str = "10ep", **kw) -> State:
    """Return a state after so many batches of 4 samples and 40 tokens, each taking half a second."""
    state = State(max_duration=max_duration, **kw)
    state.set_dataloader(range(LENGTH), "train")
    for _ in range(batches):
        state.clock.next_batch(samples=4, tokens=40)
        if state.clock.batch_in_epoch == LENGTH:
            state.clock.next_epoch()
    state.clock.total_wct = batches / 2
    return state


def cosine(u):
    return (1 + math.cos(math.pi * u)) / 2


# A time of n batches, written in each unit.
UNITS = {
    "ba": lambda n: f"{n}ba",
    "st": lambda n: f"{n}st",
    "ep": lambda n: f"{n // LENGTH}ep",
    "sp": lambda n: f"{4 * n}sp",
    "tok": lambda n: f"{40 * n}tok",
    "sec": lambda n: f"{n / 2}sec",
}

# Each scheduler for a run of 100 batches (times T = 100, w = 20), beside its factor after t batches; s scales all but the warm-up.
TABLE = {
    "step": (lambda u: optim.StepScheduler(u(30), 0.5), lambda t, s: 0.5 ** (t // (30 * s))),
    "multistep": (
        lambda u: optim.MultiStepScheduler([u(30), u(60)], 0.5),
        lambda t, s: 0.5 ** ((t >= 30 * s) + (t >= 60 * s)),
    ),
    "constant": (lambda u: optim.ConstantScheduler(0.3, u(50)), lambda t, s: 0.3 if t < 50 * s else 1.0),
    "linear": (
        lambda u: optim.LinearScheduler(0.9, 0.1, u(100)),
        lambda t, s: 0.9 + min(1, t / (100 * s)) * (0.1 - 0.9),
    ),
    "exponential": (lambda u: optim.ExponentialScheduler(0.9, u(10)), lambda t, s: 0.9 ** (t / (10 * s))),
    "cosine": (
        lambda u: optim.CosineAnnealingScheduler(u(100), 0.1),
        lambda t, s: 0.1 + 0.9 * cosine(min(1, t / (100 * s))),
    ),
    "restarts": (
        lambda u: optim.CosineAnnealingWarmRestartsScheduler(u(20), 2.0, 0.1),
        lambda t, s: (
            0.1
            + 0.9 * cosine(next((t / s - a) / l for a, l in ((0, 20), (20, 40), (60, 80), (140, 160)) if t / s < a + l))
        ),
    ),
    "polynomial": (
        lambda u: optim.PolynomialScheduler(3.0, u(100), 0.1),
        lambda t, s: 0.1 + 0.9 * (1 - min(1, t / (100 * s))) ** 3,
    ),
    "multistep with warm-up": (
        lambda u: optim.MultiStepWithWarmupScheduler(u(20), [u(30), u(60)], 0.5),
        lambda t, s: t / 20 if t < 20 else 0.5 ** ((t >= 30 * s) + (t >= 60 * s)),
    ),
    "constant with warm-up": (
        lambda u: optim.ConstantWithWarmupScheduler(u(20), 0.4, u(200)),
        lambda t, s: 0.4 * min(1, t / 20),
    ),
    "linear with warm-up": (
        lambda u: optim.LinearWithWarmupScheduler(u(20), 0.9, 0.1, u(200)),
        lambda t, s: 0.9 * t / 20 if t < 20 else 0.9 - 0.8 * min(1, (t - 20) / (200 * s - 20)),
    ),
    "cosine with warm-up": (
        lambda u: optim.CosineAnnealingWithWarmupScheduler(u(20), u(200), 0.1),
        lambda t, s: t / 20 if t < 20 else 0.1 + 0.9 * cosine(min(1, (t - 20) / (200 * s - 20))),
    ),
    "polynomial with warm-up": (
        lambda u: optim.PolynomialWithWarmupScheduler(u(20), 2.0, u(200), 0.1),
        lambda t, s: t / 20 if t < 20 else 0.1 + 0.9 * (1 - min(1, (t - 20) / (200 * s - 20))) ** 2,
    ),
    "wsd": (
        lambda u: optim.WSDScheduler(u(20), u(40), u(100), 0.1),
        lambda t, s: t / 20 if t < 20 else 1 - 0.9 * min(1, max(0, (t - 60 * s) / (40 * s))),
    ),
    "inverse square root": (
        lambda u: optim.InverseSqrtScheduler(u(20)),
        lambda t, s: 0.0 if t == 0 else min(t / 20, math.sqrt(20 / t)),
    ),
    "one cycle": (
        lambda u: optim.OneCycleScheduler(u(30), u(100), 0.04, 0.01),
        lambda t, s: (
            1 - 0.96 * cosine(t / (30 * s)) if t < 30 * s else 0.01 + 0.99 * cosine(min(1, (t - 30 * s) / (70 * s)))
        ),
    ),
}


def test_the_table_has_all_sixteen():
    assert len(TABLE) == 16


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", TABLE)
def test_schedulers_equal_their_formulas_at_every_scale(name, unit):
    make, expected = TABLE[name]
    scheduler = make(UNITS[unit])
    for ssr in (0.5, 1.0, 2.0):
        for batches in (0, 1, 10, 20, 21, 50, 99, 100, 130):  # start, end of warm-up, middle, end and past it
            state = state_at(batches, max_duration=f"{int(100 * ssr)}ba")
            assert scheduler(state, ssr) == pytest.approx(expected(batches, ssr), abs=1e-12), (ssr, batches)


@pytest.mark.parametrize("run", ["10ep", "100ba", "100st", "400sp", "4000tok", "50sec"])
def test_fractions_follow_a_run_in_any_unit_and_are_not_scaled(run):
    for batches in (0, 5, 15, 50, 95, 100):
        state = state_at(batches, max_duration=run)
        for ssr in (0.5, 1.0, 2.0):
            assert optim.CosineAnnealingScheduler()(state, ssr) == pytest.approx(cosine(batches / 100))
            assert optim.LinearWithWarmupScheduler("0.2dur")(state, ssr) == pytest.approx(
                batches / 20 if batches < 20 else 1 - (batches - 20) / 80
            )


def test_fractions_are_neither_floored_nor_rounded_away():
    assert optim.StepScheduler("0.2dur")(state_at(13, "7ep")) == 1.0  # 0.2 of 7 epochs is 1.4 epochs, not 1
    assert optim.StepScheduler("0.2dur")(state_at(14, "7ep")) == 0.1
    assert optim.MultiStepScheduler(["0.29dur"])(state_at(28, "100ba")) == 1.0
    assert optim.MultiStepScheduler(["0.29dur"])(state_at(29, "100ba")) == 0.1


def test_a_scaled_warm_up_has_no_jump_at_its_end():
    scheduler = optim.CosineAnnealingWithWarmupScheduler("2ep", scale_warmup=True)
    factors = [scheduler(state_at(batches, "20ep"), 2.0) for batches in range(60)]
    assert factors[40] == 1.0 and max(abs(a - b) for a, b in itertools.pairwise(factors)) < 0.026
    unscaled = optim.CosineAnnealingWithWarmupScheduler("2ep")
    assert unscaled(state_at(20, "20ep"), 2.0) == 1.0


def test_a_warm_up_of_zero_is_none():
    for scheduler in (
        optim.LinearWithWarmupScheduler("0ba"),
        optim.WSDScheduler("0ba"),
        optim.MultiStepWithWarmupScheduler("0ba", ["5ep"]),
        optim.InverseSqrtScheduler("0ba"),
    ):
        assert scheduler(state_at(0)) == 1.0


def test_other_shapes_of_the_last_phase():
    state = state_at(95, "100ba")
    assert optim.WSDScheduler(decay="sqrt", alpha_f=0.2)(state) == pytest.approx(0.2 + 0.8 * (1 - math.sqrt(0.5)))
    assert optim.WSDScheduler(decay="cosine")(state) == pytest.approx(0.5)


def test_epochs_and_batches_are_brought_together_and_other_units_are_not():
    assert optim.LinearWithWarmupScheduler("2ep", t_max="100ba")(state_at(10, "100ba")) == 0.5
    assert optim.LinearWithWarmupScheduler("20ba")(state_at(60)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="cannot be compared"):
        optim.LinearWithWarmupScheduler("100tok")(state_at(0))
    without_length = State(max_duration="10ep")
    without_length.clock.next_batch()
    with pytest.raises(ValueError, match="cannot be compared"):
        optim.LinearWithWarmupScheduler("20ba")(without_length)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: optim.LinearWithWarmupScheduler("1ep", t_max="5ep")(state_at(0)), "before the run"),
        (lambda: optim.CosineAnnealingWarmRestartsScheduler("0ep"), "above 0"),
        (lambda: optim.CosineAnnealingWarmRestartsScheduler("1ep", 0.0), "length of 0"),
        (lambda: optim.CosineAnnealingWarmRestartsScheduler("1ep", 0.5)(state_at(30)), "length of 0"),
        (lambda: optim.StepScheduler("0ba"), "above 0"),
        (lambda: optim.StepScheduler("-1ba"), "negative"),
        (lambda: optim.StepScheduler("3epp"), "'3ep'"),
        (lambda: optim.WSDScheduler(decay="liner"), "linear"),
        (lambda: optim.CosineAnnealingScheduler()(State()), "max_duration"),
    ],
)
def test_bad_times_are_refused(use, text):
    with pytest.raises(ConfigError, match=text):
        use()


def optimizers(*rates):
    return tuple(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate) for rate in rates)


def test_a_compiled_scheduler_is_a_lambda_lr_for_each_optimizer():
    state = state_at(0, optimizers=optimizers(0.1, 0.4))
    made = optim.compile_composer_scheduler(optim.LinearScheduler(), state)
    assert [type(one).__name__ for one in made] == ["LambdaLR", "LambdaLR"]
    for optimizer, scheduler in zip(state.optimizers, made):
        optimizer.step()
        state.clock.load_state_dict(state_at(50).clock.state_dict())
        scheduler.last_epoch = 49  # so many updates later
        scheduler.step()
    assert [one.param_groups[0]["lr"] for one in state.optimizers] == pytest.approx([0.05, 0.2])


def test_a_function_of_the_state_alone_cannot_be_scaled():
    state = state_at(0, optimizers=optimizers(0.1))
    assert optim.compile_composer_scheduler(lambda state: 0.5, state).get_last_lr() == [0.05]
    assert optim.compile_composer_scheduler(lambda state, ssr=1.0: ssr, state, 2.0).get_last_lr() == [0.2]
    with pytest.raises(ValueError, match="takes only the state"):
        optim.compile_composer_scheduler(lambda state: 0.5, state, 2.0)
    with pytest.raises(ValueError, match="ssr=0"):
        optim.compile_composer_scheduler(optim.LinearScheduler(), state, 0)
    with pytest.raises(ValueError, match="no torch optimizer"):
        optim.compile_composer_scheduler(optim.LinearScheduler(), state_at(0))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_in_a_run_the_rate_of_each_update_is_that_of_its_place(accumulation):
    rates = []
    trainer = make_trainer()
    step = trainer.optimizer_step
    trainer.optimizer_step = lambda: (rates.append(trainer.optimizer.param_groups[0]["lr"]), step())
    make = lambda _: optim.compile_composer_scheduler(optim.LinearScheduler(), trainer.state)
    train(trainer, make_data(64), num_epochs=2, create_scheduler_fn=make, gradient_accumulation_steps=accumulation)
    updates = len(rates)
    assert rates == pytest.approx([rates[0] * (1 - n / updates) for n in range(updates)])


def test_a_class_derived_from_a_scheduler_can_be_given_to_the_trainer():
    class Halved(optim.LinearScheduler):
        def __call__(self, state, ssr=1.0):
            return 0.5 * super().__call__(state, ssr)

    trainer, rates = make_trainer(), []
    base, step = trainer.optimizer.param_groups[0]["lr"], trainer.optimizer_step
    trainer.optimizer_step = lambda: (rates.append(trainer.optimizer.param_groups[0]["lr"]), step())
    train(trainer, make_data(64), num_epochs=2, create_scheduler_fn=Halved())
    assert rates == pytest.approx([0.5 * base * (1 - n / len(rates)) for n in range(len(rates))])


MIXED = {
    "cosine": (lambda: optim.CosineAnnealingWithWarmupScheduler("3ba"), [0, 1 / 3, 2 / 3, 1]),
    "constant": (lambda: optim.ConstantWithWarmupScheduler("3ba", 0.5), [0, 0.5 / 3, 1 / 3, 0.5]),
    "no warm-up": (lambda: optim.LinearWithWarmupScheduler("0ba"), [1, 7 / 8, 6 / 8, 5 / 8]),
    "one cycle": (lambda: optim.OneCycleScheduler("4ba", alpha_i=0.2), [0.2, None, 0.6, None]),
}


@pytest.mark.parametrize(("make", "expected"), MIXED.values(), ids=MIXED)
def test_a_warmup_in_batches_fits_a_run_in_epochs(make, expected):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates = Watch(Event.BEFORE_STEP, lambda state: optimizer.param_groups[0]["lr"])
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, [rates])
    data = TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    trainer.train(data, num_epochs=2, per_device_batch_size=2, create_scheduler_fn=make())
    seen = [rate for rate, wanted in zip(rates.values, expected) if wanted is not None]
    assert seen == pytest.approx([wanted for wanted in expected if wanted is not None])
