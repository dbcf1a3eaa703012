"""Composer's schedulers: callables `(state, ssr=1.0) -> factor` on the learning rate each group was given.

Times may be in any unit. `dur` follows the length of the run; every other time is multiplied by `ssr`, the ratio by which a run
is made shorter or longer (warm-up only with `scale_warmup`). The formulas are those of `drivetrain.optim.schedules`; this file
says what their positions are.
"""

from collections.abc import Sequence

from drivetrain.context.state import State
from drivetrain.core.arguments import check_flag, check_number
from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.core.time import Time, TimeLike
from drivetrain.optim import schedules
from drivetrain.optim.positions import (
    Span,
    StateSchedule,
    check_covers_run,
    compile_state_schedule,
    in_common_unit,
    position_in,
    span_of,
)

ComposerScheduler = StateSchedule
compile_composer_scheduler = compile_state_schedule

_DECAYS = ("linear", "cosine", "sqrt")


class _Scheduler:
    """Is recognized by the Trainer, also in classes derived from these."""

    follows_state = True


class StepScheduler(_Scheduler):
    """Multiplies by gamma after every `step_size`."""

    def __init__(self, step_size: TimeLike, gamma: float = 0.1):
        self.step_size, self.gamma = _positive(self, "step_size", step_size), _factor(self, "gamma", gamma)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        size = span_of(self.step_size, state, ssr)
        return schedules.step_decay(position_in(size.unit, state), _nonzero(self, "step_size", size), self.gamma)


class MultiStepScheduler(_Scheduler):
    """Multiplies by gamma at every milestone."""

    def __init__(self, milestones: Sequence[TimeLike], gamma: float = 0.1):
        self.milestones, self.gamma = _times(self, "milestones", milestones), _factor(self, "gamma", gamma)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        spans = [span_of(one, state, ssr) for one in self.milestones]
        reached = sum(position_in(span.unit, state) >= span.value for span in spans)  # their units may differ
        return schedules.exponential(reached, self.gamma)


class ConstantScheduler(_Scheduler):
    """Stays at `alpha` until `t_max`, then goes to 1."""

    def __init__(self, alpha: float = 1.0, t_max: TimeLike = "1dur"):
        self.alpha, self.t_max = _factor(self, "alpha", alpha), _time(self, "t_max", t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        end = span_of(self.t_max, state, ssr)
        return self.alpha if position_in(end.unit, state) < end.value else 1.0


class LinearScheduler(_Scheduler):
    """Goes from `alpha_i` to `alpha_f` in a straight line."""

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeLike = "1dur"):
        self.t_max = _positive(self, "t_max", t_max)
        self.alpha_i, self.alpha_f = _factor(self, "alpha_i", alpha_i), _factor(self, "alpha_f", alpha_f)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return schedules.between(self.alpha_i, self.alpha_f, schedules.linear(_share(self, self.t_max, state, ssr)))


class ExponentialScheduler(_Scheduler):
    """Multiplies by gamma once per `decay_period`, smoothly."""

    def __init__(self, gamma: float, decay_period: TimeLike = "1ep"):
        self.gamma, self.decay_period = _factor(self, "gamma", gamma), _positive(self, "decay_period", decay_period)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        period = span_of(self.decay_period, state, ssr)
        passed = position_in(period.unit, state) / _nonzero(self, "decay_period", period)
        return schedules.exponential(passed, self.gamma)


class CosineAnnealingScheduler(_Scheduler):
    """Falls along half a cosine to `alpha_f`."""

    def __init__(self, t_max: TimeLike = "1dur", alpha_f: float = 0.0):
        self.t_max, self.alpha_f = _positive(self, "t_max", t_max), _factor(self, "alpha_f", alpha_f)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return schedules.with_floor(schedules.cosine(_share(self, self.t_max, state, ssr)), self.alpha_f)


class CosineAnnealingWarmRestartsScheduler(_Scheduler):
    """Falls along half a cosine again and again; each fall is `t_mult` times as long as the last."""

    def __init__(self, t_0: TimeLike, t_mult: float = 1.0, alpha_f: float = 0.0):
        self.t_0, self.alpha_f = _positive(self, "t_0", t_0), _factor(self, "alpha_f", alpha_f)
        self.t_mult = check_number(
            "t_mult", t_mult, above=0, owner=_name(self), hint=", else the second interval has a length of 0"
        )

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        first = span_of(self.t_0, state, ssr)
        length, now = _nonzero(self, "t_0", first), position_in(first.unit, state)
        if self.t_mult < 1 and now >= length / (1 - self.t_mult):
            raise ConfigError(
                f"{_name(self)}(t_0={str(self.t_0)!r}, t_mult={self.t_mult}): the intervals have shrunk to a length of 0. "
                "Use t_mult of at least 1."
            )
        return schedules.with_floor(schedules.cosine_restarts(now, length, self.t_mult), self.alpha_f)


class PolynomialScheduler(_Scheduler):
    """Falls to `alpha_f` as a power of what is left."""

    def __init__(self, power: float, t_max: TimeLike = "1dur", alpha_f: float = 0.0):
        self.power, self.t_max = _factor(self, "power", power), _positive(self, "t_max", t_max)
        self.alpha_f = _factor(self, "alpha_f", alpha_f)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return schedules.with_floor(
            schedules.polynomial(_share(self, self.t_max, state, ssr), self.power), self.alpha_f
        )


class MultiStepWithWarmupScheduler(_Scheduler):
    """Rises in a straight line, then multiplies by gamma at every milestone, counted from the start of the run."""

    def __init__(
        self, t_warmup: TimeLike, milestones: Sequence[TimeLike], gamma: float = 0.1, scale_warmup: bool = False
    ):
        self.t_warmup = _time(self, "t_warmup", t_warmup)
        self.scale_warmup = check_flag("scale_warmup", scale_warmup, owner=_name(self))
        self.steps = MultiStepScheduler(milestones, gamma)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warmup = span_of(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        risen = _rise(warmup, state)
        return self.steps(state, ssr) if risen is None else risen


class _WithWarmup(_Scheduler):
    """Rises in a straight line during `t_warmup`; a subclass says what follows until `t_max`."""

    peak = 1.0

    def __init__(self, t_warmup: TimeLike, t_max: TimeLike, scale_warmup: bool):
        self.t_warmup = _time(self, "t_warmup", t_warmup)
        self.scale_warmup = check_flag("scale_warmup", scale_warmup, owner=_name(self))
        self.t_max = _positive(self, "t_max", t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warmup = span_of(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        end = span_of(self.t_max, state, ssr)
        check_covers_run(end, state, f"{_name(self)}(t_max={str(self.t_max)!r})")
        warmup, end = in_common_unit(warmup, end, state, _name(self))
        risen = _rise(warmup, state)
        if risen is not None:
            return self.peak * risen
        left = end.value - warmup.value
        done = position_in(end.unit, state) - warmup.value
        return self.body(min(1.0, done / left) if left > 0 else 1.0)

    def body(self, u: float) -> float:
        """Return the factor after the warm-up; u goes from 0 to 1."""
        raise NotImplementedError


class ConstantWithWarmupScheduler(_WithWarmup):
    """Rises to `alpha` and stays there."""

    def __init__(self, t_warmup: TimeLike, alpha: float = 1.0, t_max: TimeLike = "1dur", scale_warmup: bool = False):
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha = self.peak = _factor(self, "alpha", alpha)

    def body(self, u: float) -> float:
        return self.alpha


class LinearWithWarmupScheduler(_WithWarmup):
    """Rises to `alpha_i`, then goes to `alpha_f` in a straight line."""

    def __init__(
        self,
        t_warmup: TimeLike,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: TimeLike = "1dur",
        scale_warmup: bool = False,
    ):
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha_i = self.peak = _factor(self, "alpha_i", alpha_i)
        self.alpha_f = _factor(self, "alpha_f", alpha_f)

    def body(self, u: float) -> float:
        return schedules.between(self.alpha_i, self.alpha_f, schedules.linear(u))


class CosineAnnealingWithWarmupScheduler(_WithWarmup):
    """Rises to 1, then falls along half a cosine to `alpha_f`."""

    def __init__(self, t_warmup: TimeLike, t_max: TimeLike = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False):
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha_f = _factor(self, "alpha_f", alpha_f)

    def body(self, u: float) -> float:
        return schedules.with_floor(schedules.cosine(u), self.alpha_f)


class PolynomialWithWarmupScheduler(_WithWarmup):
    """Rises to 1, then falls to `alpha_f` as a power of what is left."""

    def __init__(
        self,
        t_warmup: TimeLike,
        power: float = 2.0,
        t_max: TimeLike = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ):
        super().__init__(t_warmup, t_max, scale_warmup)
        self.power, self.alpha_f = _factor(self, "power", power), _factor(self, "alpha_f", alpha_f)

    def body(self, u: float) -> float:
        return schedules.with_floor(schedules.polynomial(u, self.power), self.alpha_f)


class WSDScheduler(_Scheduler):
    """Rises, stays at 1, and falls to `alpha_f` during the last `t_decay` (warm-up, stable, decay)."""

    def __init__(
        self,
        t_warmup: TimeLike = "0.02dur",
        t_decay: TimeLike = "0.1dur",
        t_max: TimeLike = "1dur",
        alpha_f: float = 0.0,
        decay: str = "linear",
    ):
        if decay not in _DECAYS:
            raise ConfigError(unknown_name("decay", decay, _DECAYS, where=_name(self)))
        self.t_warmup, self.t_decay = _time(self, "t_warmup", t_warmup), _time(self, "t_decay", t_decay)
        self.t_max, self.decay = _positive(self, "t_max", t_max), decay
        self.alpha_f = _factor(self, "alpha_f", alpha_f)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        end = span_of(self.t_max, state, ssr)
        risen = _rise(span_of(self.t_warmup, state), state)
        if risen is not None:
            return risen
        fall, end = in_common_unit(span_of(self.t_decay, state, ssr), end, state, _name(self))
        passed = position_in(end.unit, state) - (end.value - fall.value)
        if passed <= 0:
            return 1.0
        return schedules.decay(min(1.0, passed / fall.value) if fall.value else 1.0, self.decay, self.alpha_f)


class InverseSqrtScheduler(_Scheduler):
    """Rises to 1 during the warm-up, then falls with the inverse square root of the time."""

    def __init__(self, t_warmup: TimeLike):
        self.t_warmup = _time(self, "t_warmup", t_warmup)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warmup = span_of(self.t_warmup, state)
        risen = _rise(warmup, state)
        if risen is not None:
            return risen
        return schedules.inverse_sqrt(position_in(warmup.unit, state), warmup.value or 1.0)


class OneCycleScheduler(_Scheduler):
    """Rises from `alpha_i` to 1 along half a cosine, then falls to `alpha_f`."""

    def __init__(
        self, t_up: TimeLike = "0.3dur", t_max: TimeLike = "1dur", alpha_i: float = 0.04, alpha_f: float = 4e-6
    ):
        self.t_up, self.t_max = _time(self, "t_up", t_up), _positive(self, "t_max", t_max)
        self.alpha_i, self.alpha_f = _factor(self, "alpha_i", alpha_i), _factor(self, "alpha_f", alpha_f)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        up, end = in_common_unit(span_of(self.t_up, state, ssr), span_of(self.t_max, state, ssr), state, _name(self))
        return schedules.one_cycle(position_in(end.unit, state), up.value, end.value, self.alpha_i, self.alpha_f)


def _rise(warmup: Span, state: State) -> float | None:
    """Return the factor within the warm-up, or None after it; a warm-up of 0 is none."""
    now = position_in(warmup.unit, state)
    return schedules.warm_up(now / warmup.value) if now < warmup.value else None


def _share(scheduler: object, t_max: Time, state: State, ssr: float) -> float:
    """Return tau: how much of `t_max` has passed, at most 1."""
    end = span_of(t_max, state, ssr)
    return min(1.0, position_in(end.unit, state) / _nonzero(scheduler, "t_max", end))


def _name(scheduler: object) -> str:
    return getattr(scheduler, "__name__", type(scheduler).__name__)


def _time(scheduler: object, name: str, value: TimeLike) -> Time:
    try:
        time = Time.from_input(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{_name(scheduler)}({name}={value!r}): {error}") from error
    if time.value < 0:
        raise ConfigError(f"{_name(scheduler)}({name}={str(time)!r}): a time cannot be negative.")
    return time


def _times(scheduler: object, name: str, values: Sequence[TimeLike]) -> list[Time]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"{_name(scheduler)}({name}={values!r}): expected a list of times, such as ['30ep', '60ep'].")
    return [_time(scheduler, name, one) for one in values]


def _factor(scheduler: object, name: str, value: float) -> float:
    """Return a factor of the learning rate, which is never negative."""
    return check_number(name, value, at_least=0, owner=_name(scheduler))


def _positive(scheduler: object, name: str, value: TimeLike) -> Time:
    time = _time(scheduler, name, value)
    if not time.value > 0:
        raise ConfigError(
            f"{_name(scheduler)}({name}={str(time)!r}): expected a time above 0, such as '1dur' or '10ep'."
        )
    return time


def _nonzero(scheduler: object, name: str, span: Span) -> float:
    if not span.value > 0:
        raise ConfigError(f"{_name(scheduler)}: {name} has a length of 0 in a run of this length.")
    return span.value
