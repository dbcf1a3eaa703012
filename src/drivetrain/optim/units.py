"""The schedules as OptimSchedulers: one class each, with its arguments and its formula, and the table of their names.

s is the real step (from 1), w the length of the warm-up, w' = max(w, 1), T the length of the run, and u runs from 0 at the peak to
1 after the end. f multiplies the configured rate. Papers are cited in `schedules.py`, which has the formulas.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from drivetrain.core.arguments import check_count, check_fraction
from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.optim import schedules
from drivetrain.optim.building import import_dotted
from drivetrain.optim.curve import FLOOR, LENGTH, REQUIRED, WARMUP, Argument, CurveLr, choice, duration, number, takes
from drivetrain.optim.positions import Duration, check_duration
from drivetrain.optim.scheduler import OptimScheduler


class NoamLr(CurveLr):
    """lr = init * min(s^-0.5, s * w^-1.5); with `d_model` init is d_model^-0.5, else the configured rate is the peak."""

    d_model: int | None

    sche_init = takes(
        Argument("d_model", None, lambda name, value: value if value is None else check_count(name, value)),
        duration("warmup_steps", 4000),
    )

    def check(self) -> None:
        super().check()
        if not self._times["warmup_steps"][0].value:
            check_count("warmup_steps", self.warmup_steps)

    def settle(self) -> None:
        super().settle()
        self._w = max(1, self.steps["warmup_steps"])
        self._init = self.base_lrs[0] * self._w**0.5 if self.d_model is None else self.d_model**-0.5

    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        return self._init * schedules.noam(real_step, self._w)

    def extra_repr_fn(self) -> str:
        return f"d_model={self.d_model}, warmup_steps={self.warmup_steps}"


Noamlr = NoamLr


class ExponentDecayLr(CurveLr):
    """lr = base * decay_factor^(epoch - 1), or of the real step with `per="step"`."""

    decay_factor: float
    per: str

    sche_init = takes(number("decay_factor", 0.999), choice("per", "epoch", ("epoch", "step")))

    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        number = real_step if self.per == "step" else epoch_num
        if number is None:
            raise ConfigError(f"unit {self.name!r} decays per epoch: pass epoch_num (from 1), or set per='step'.")
        return self.base_lrs[0] * schedules.exponential(number - 1, self.decay_factor)

    def extra_repr_fn(self) -> str:
        return f"decay_factor={self.decay_factor}, per={self.per!r}"


class ConstantLr(CurveLr):
    """f = 1."""

    decays = False

    sche_init = takes(*WARMUP)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return 1.0


class LinearLr(CurveLr):
    """f = 1 - u."""

    sche_init = takes(*LENGTH, *FLOOR, *WARMUP)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return schedules.linear(self.position(real_step))


class CosineLr(CurveLr):
    """f = (1 + cos(pi u^k)) / 2."""

    k_decay: float

    sche_init = takes(number("k_decay", 1.0), *LENGTH, *FLOOR, *WARMUP)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return schedules.cosine(self.position(real_step), self.k_decay)


class CosineRestartsLr(CurveLr):
    """A cosine within each cycle; cycle i lasts first_cycle * cycle_mult^i real steps, counted from the peak."""

    first_cycle: Duration
    cycle_mult: float

    sche_init = takes(duration("first_cycle", least_steps=1), number("cycle_mult", 1.0), *WARMUP)

    def check(self) -> None:
        super().check()
        if self.cycle_mult < 1:
            raise ConfigError(f"cycle_mult={self.cycle_mult}: cycles must not get shorter; expected at least 1.")

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return schedules.cosine_restarts(self.after_peak(real_step), self.steps["first_cycle"], self.cycle_mult)


class PolynomialLr(CurveLr):
    """f = (1 - u)^power."""

    power: float

    sche_init = takes(number("power", 1.0), *LENGTH, *FLOOR, *WARMUP)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return schedules.polynomial(self.position(real_step), self.power)


class StepLr(CurveLr):
    """f = gamma^floor((s - w') / step_size), counted from the peak."""

    step_size: Duration
    gamma: float

    sche_init = takes(duration("step_size", least_steps=1), number("gamma", 0.1), *WARMUP)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return schedules.step_decay(self.after_peak(real_step), self.steps["step_size"], self.gamma)


def _check_milestones(name: str, value: object) -> Sequence[Duration]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ConfigError(f"{name}={value!r}: expected a list of steps or times, such as [30, 60] or ['3ep', '6ep'].")
    for milestone in value:
        check_duration(name, milestone)
    return value


class MultiStepLr(CurveLr):
    """f = gamma^(number of milestones m <= s - 1)."""

    milestones: Sequence[Duration]
    gamma: float

    sche_init = takes(Argument("milestones", REQUIRED, _check_milestones), number("gamma", 0.1), *WARMUP)

    def settle(self) -> None:
        super().settle()
        times = [check_duration("milestones", milestone) for milestone in self.milestones]
        self._milestone_steps = [self.count_steps("milestones", time) for time in times]
        if self._milestone_steps != sorted(self._milestone_steps):
            raise ConfigError(f"milestones={list(self.milestones)!r}: expected ascending order.")

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return schedules.multistep(real_step - 1, self._milestone_steps, self.gamma)


class WSDLr(CurveLr):
    """f = 1 until T - d, then down over d steps: linear, sqrt (1 - sqrt v), cosine or inverse (1 / (v/r + 1 - v))."""

    decay_steps: Duration
    decay: str

    sche_init = takes(
        duration("decay_steps", "0.1dur"), choice("decay", "linear", schedules.DECAY_SHAPES), *LENGTH, *FLOOR, *WARMUP
    )

    def check(self) -> None:
        super().check()
        if self.decay == "inverse" and not self._floor > 0:
            raise ConfigError("decay='inverse' never reaches zero: give min_lr or min_lr_ratio above 0.")

    def settle(self) -> None:
        super().settle()
        self._decay = self.steps["decay_steps"]
        if self._w + self._decay > self._total:
            raise ConfigError(
                f"a warm-up of {self._w} and a decay of {self._decay} steps do not fit into a run of {self._total} steps."
            )

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        into_decay = real_step - (self._total - self._decay)
        if into_decay <= 0:
            return 1.0
        return schedules.decay(min(1.0, into_decay / (self._decay + 1)), self.decay, self._floor)

    def lifted(self, factor: float) -> float:
        """Return the factor as it is: its floor is part of the decay."""
        return factor


class InverseSqrtLr(CurveLr):
    """f = sqrt(w' / max(s, w')), so the warm-up also sets how fast the rate falls; with a linear warm-up this is NoamLr."""

    sche_init = takes(*WARMUP)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return schedules.inverse_sqrt(real_step, max(self._w, 1))


class OneCycleLr(CurveLr):
    """As torch's OneCycleLR in two phases with max_lr = base; past the end the last rate holds."""

    pct_start: float
    div_factor: float
    final_div_factor: float
    anneal: str

    sche_init = takes(
        Argument("pct_start", 0.3, check_fraction),
        number("div_factor", 25.0),
        number("final_div_factor", 1e4),
        choice("anneal", "cos", schedules.ANNEAL_SHAPES),
        *LENGTH,
    )

    def settle(self) -> None:
        super().settle()
        self._peak, self._end = self.pct_start * self._total - 1, self._total - 1
        if self._peak > self._end:
            raise ConfigError(f"pct_start={self.pct_start}: the rise is longer than the run of {self._total} steps.")

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        start = 1.0 / self.div_factor
        end = start / self.final_div_factor
        return schedules.one_cycle(real_step - 1, self._peak, self._end, start, end, self.anneal)


def _check_function(name: str, value: object) -> Any:
    found = import_dotted(value, name) if isinstance(value, str) else value
    if not callable(found):
        raise ConfigError(f"{name}={value!r}: expected a function of the step, or of step and epoch.")
    count = _num_required(found)
    if not 1 <= count <= 2:
        raise ConfigError(f"{name}={value!r} needs {count} arguments; expected fn(step) or fn(step, epoch).")
    return found


def _num_required(function: Callable[..., object]) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in parameters)


class LambdaLr(CurveLr):
    """f = fn(s) or fn(s, epoch); `fn` is a callable or the dotted path of one."""

    decays = False

    fn: Callable[..., float]

    sche_init = takes(Argument("fn", REQUIRED, _check_function), *WARMUP)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        return self.fn(real_step, epoch_num) if self._wants_epoch else self.fn(real_step)

    def check(self) -> None:
        """Find out which arguments the function needs."""
        super().check()
        self._wants_epoch = _num_required(self.fn) == 2


_CLASSES: dict[str, tuple[type[OptimScheduler], ...]] = {
    "noam": (NoamLr,),
    "exp": (ExponentDecayLr,),
    "constant": (ConstantLr,),
    "linear": (LinearLr,),
    "cosine": (CosineLr, CosineRestartsLr),
    "polynomial": (PolynomialLr,),
    "step": (StepLr,),
    "multistep": (MultiStepLr,),
    "wsd": (WSDLr,),
    "inverse_sqrt": (InverseSqrtLr,),
    "one_cycle": (OneCycleLr,),
    "function": (LambdaLr,),
}

SCHEDULES = {file: {cls.__name__: cls for cls in classes} for file, classes in _CLASSES.items()}
"""The first half of a configuration's `type: noam.NoamLr`, and the classes that may follow it, by name."""

_LAMBDAS = {name: classes[0] for name, classes in _CLASSES.items() if name not in ("exp", "function")} | {
    "cosine_restarts": CosineRestartsLr
}


def as_lr_lambda(name: str, **sche_conf: Any) -> Callable[[int], float]:
    """Return the factor of the base rate as a function of the updates made so far, for `torch.optim.lr_scheduler.LambdaLR`.

    >>> fall = as_lr_lambda("linear", total_steps=4)
    >>> [fall(n) for n in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if name not in _LAMBDAS:
        raise ConfigError(unknown_name("curve", name, _LAMBDAS, where="as_lr_lambda"))
    if sche_conf.get("min_lr") is not None:
        raise ConfigError("as_lr_lambda returns factors, not rates: use min_lr_ratio instead of min_lr.")
    # A unit with the rate 1 is the curve itself, checks included; its one parameter is never trained.
    unit = _LAMBDAS[name]("SGD", {"lr": 1.0}, nn.Linear(1, 1, bias=False), **sche_conf)
    unit.lr_at(1)  # complain about the length now, not in the middle of a run
    return lambda updates: unit.lr_at(updates + 1)
