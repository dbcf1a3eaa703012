"""Composer's schedulers: callables `(state, ssr=1.0) -> factor` on the learning rate each group was given.

Times may be in any unit. `dur` follows the length of the run; every other time is multiplied by `ssr`, the ratio by which a run
is made shorter or longer (warm-up only with `scale_warmup`). The formulas are those of `drivetrain.optim.schedules`; this file
says what their positions are.
"""

from collections.abc import Sequence

from drivetrain.context.state import State
from drivetrain.core.arguments import check_choice, check_flag, check_number
from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time, TimeLike, TimeUnit
from drivetrain.optim import positions, schedules
from drivetrain.optim.positions import Span, StateSchedule, in_common_unit, position_in, span_of

ComposerScheduler = StateSchedule
compile_composer_scheduler = positions.compile_state_schedule


class _Scheduler:
    """Is recognized by the Trainer, also in classes derived from these; and how arguments are checked."""

    follows_state = True

    def _name(self) -> str:
        return getattr(self, "__name__", type(self).__name__)

    def _time(self, name: str, value: TimeLike) -> Time:
        try:
            time = Time.from_input(value)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self._name()}({name}={value!r}): {error}") from error
        if time.value < 0:
            raise ConfigError(f"{self._name()}({name}={str(time)!r}): a time cannot be negative.")
        return time

    def _positive(self, name: str, value: TimeLike) -> Time:
        time = self._time(name, value)
        if not time.value > 0:
            raise ConfigError(
                f"{self._name()}({name}={str(time)!r}): expected a time above 0, such as '1dur' or '10ep'."
            )
        return time

    def _factor(self, name: str, value: float) -> float:
        """Return a factor of the learning rate, which is never negative."""
        return check_number(name, value, at_least=0, owner=self._name())

    def _span(self, name: str, state: State, ssr: float) -> Span:
        """Return the time of that name in the units of a run, where it must not be 0."""
        span = span_of(getattr(self, name), state, ssr)
        if not span.value > 0:
            raise ConfigError(f"{self._name()}: {name} has a length of 0 in a run of this length.")
        return span

    def _share(self, state: State, ssr: float) -> float:
        """Return tau: how much of `t_max` has passed, at most 1."""
        end = self._span("t_max", state, ssr)
        return min(1.0, position_in(end.unit, state) / end.value)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.body(self._share(state, ssr))

    def body(self, u: float) -> float:
        """Return the factor while u goes from 0 to 1: until `t_max`, after a warm-up where there is one."""
        raise NotImplementedError


class StepScheduler(_Scheduler):
    """Multiplies by gamma after every `step_size`."""

    def __init__(self, step_size: TimeLike, gamma: float = 0.1):
        self.step_size, self.gamma = self._positive("step_size", step_size), self._factor("gamma", gamma)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        size = self._span("step_size", state, ssr)
        return schedules.step_decay(position_in(size.unit, state), size.value, self.gamma)


class MultiStepScheduler(_Scheduler):
    """Multiplies by gamma at every milestone."""

    def __init__(self, milestones: Sequence[TimeLike], gamma: float = 0.1):
        if isinstance(milestones, str) or not isinstance(milestones, Sequence):
            raise ConfigError(
                f"{self._name()}(milestones={milestones!r}): expected a list of times, such as ['30ep', '60ep']."
            )
        self.milestones = [self._time("milestones", one) for one in milestones]
        self.gamma = self._factor("gamma", gamma)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        spans = [span_of(one, state, ssr) for one in self.milestones]
        reached = sum(position_in(span.unit, state) >= span.value for span in spans)  # their units may differ
        return schedules.exponential(reached, self.gamma)


class ConstantScheduler(_Scheduler):
    """Stays at `alpha` until `t_max`, then goes to 1."""

    def __init__(self, alpha: float = 1.0, t_max: TimeLike = "1dur"):
        self.alpha, self.t_max = self._factor("alpha", alpha), self._time("t_max", t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        end = span_of(self.t_max, state, ssr)
        return self.alpha if position_in(end.unit, state) < end.value else 1.0


class LinearScheduler(_Scheduler):
    """Goes from `alpha_i` to `alpha_f` in a straight line."""

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeLike = "1dur"):
        self.t_max = self._positive("t_max", t_max)
        self.alpha_i, self.alpha_f = self._factor("alpha_i", alpha_i), self._factor("alpha_f", alpha_f)

    def body(self, u: float) -> float:
        return schedules.between(self.alpha_i, self.alpha_f, schedules.linear(u))


class ExponentialScheduler(_Scheduler):
    """Multiplies by gamma once per `decay_period`, smoothly."""

    def __init__(self, gamma: float, decay_period: TimeLike = "1ep"):
        self.gamma, self.decay_period = self._factor("gamma", gamma), self._positive("decay_period", decay_period)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        period = self._span("decay_period", state, ssr)
        return schedules.exponential(position_in(period.unit, state) / period.value, self.gamma)


class CosineAnnealingScheduler(_Scheduler):
    """Falls along half a cosine to `alpha_f`."""

    def __init__(self, t_max: TimeLike = "1dur", alpha_f: float = 0.0):
        self.t_max, self.alpha_f = self._positive("t_max", t_max), self._factor("alpha_f", alpha_f)

    def body(self, u: float) -> float:
        return schedules.with_floor(schedules.cosine(u), self.alpha_f)


class CosineAnnealingWarmRestartsScheduler(_Scheduler):
    """Falls along half a cosine again and again; each fall is `t_mult` times as long as the last."""

    def __init__(self, t_0: TimeLike, t_mult: float = 1.0, alpha_f: float = 0.0):
        self.t_0, self.alpha_f = self._positive("t_0", t_0), self._factor("alpha_f", alpha_f)
        self.t_mult = check_number(
            "t_mult", t_mult, above=0, owner=self._name(), hint=", else the second interval has a length of 0"
        )

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        first = self._span("t_0", state, ssr)
        length, now = first.value, position_in(first.unit, state)
        if self.t_mult < 1 and now >= length / (1 - self.t_mult):
            raise ConfigError(
                f"{self._name()}(t_0={str(self.t_0)!r}, t_mult={self.t_mult}): the intervals have shrunk to a length of 0. "
                "Use t_mult of at least 1."
            )
        return schedules.with_floor(schedules.cosine_restarts(now, length, self.t_mult), self.alpha_f)


class PolynomialScheduler(_Scheduler):
    """Falls to `alpha_f` as a power of what is left."""

    def __init__(self, power: float, t_max: TimeLike = "1dur", alpha_f: float = 0.0):
        self.power, self.t_max = self._factor("power", power), self._positive("t_max", t_max)
        self.alpha_f = self._factor("alpha_f", alpha_f)

    def body(self, u: float) -> float:
        return schedules.with_floor(schedules.polynomial(u, self.power), self.alpha_f)


class MultiStepWithWarmupScheduler(_Scheduler):
    """Rises in a straight line, then multiplies by gamma at every milestone, counted from the start of the run."""

    def __init__(
        self, t_warmup: TimeLike, milestones: Sequence[TimeLike], gamma: float = 0.1, scale_warmup: bool = False
    ):
        self.t_warmup = self._time("t_warmup", t_warmup)
        self.scale_warmup = check_flag("scale_warmup", scale_warmup, owner=self._name())
        self.steps = MultiStepScheduler(milestones, gamma)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        risen = _rise(span_of(self.t_warmup, state, ssr if self.scale_warmup else 1.0), state)
        return self.steps(state, ssr) if risen is None else risen


class _WithWarmup(_Scheduler):
    """Rises in a straight line during `t_warmup`; a subclass says what follows until `t_max`."""

    peak = 1.0

    def __init__(self, t_warmup: TimeLike, t_max: TimeLike, scale_warmup: bool):
        self.t_warmup = self._time("t_warmup", t_warmup)
        self.scale_warmup = check_flag("scale_warmup", scale_warmup, owner=self._name())
        self.t_max = self._positive("t_max", t_max)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warmup = span_of(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        end = span_of(self.t_max, state, ssr)
        positions.check_covers_run(end, state, f"{self._name()}(t_max={str(self.t_max)!r})")
        if _starts(warmup, end, state):
            return 0.0
        warmup, end = _in_common_unit(warmup, end, state, self._name())
        risen = _rise(warmup, state)
        if risen is not None:
            return self.peak * risen
        left = end.value - warmup.value
        done = position_in(end.unit, state) - warmup.value
        return self.body(min(1.0, done / left) if left > 0 else 1.0)


class ConstantWithWarmupScheduler(_WithWarmup):
    """Rises to `alpha` and stays there."""

    def __init__(self, t_warmup: TimeLike, alpha: float = 1.0, t_max: TimeLike = "1dur", scale_warmup: bool = False):
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha = self.peak = self._factor("alpha", alpha)

    def body(self, u: float) -> float:
        return self.alpha


class LinearWithWarmupScheduler(_WithWarmup, LinearScheduler):
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
        self.alpha_i = self.peak = self._factor("alpha_i", alpha_i)
        self.alpha_f = self._factor("alpha_f", alpha_f)


class CosineAnnealingWithWarmupScheduler(_WithWarmup, CosineAnnealingScheduler):
    """Rises to 1, then falls along half a cosine to `alpha_f`."""

    def __init__(self, t_warmup: TimeLike, t_max: TimeLike = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False):
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha_f = self._factor("alpha_f", alpha_f)


class PolynomialWithWarmupScheduler(_WithWarmup, PolynomialScheduler):
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
        self.power, self.alpha_f = self._factor("power", power), self._factor("alpha_f", alpha_f)


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
        check_choice("decay", decay, ("linear", "cosine", "sqrt"), owner=self._name())
        self.t_warmup, self.t_decay = self._time("t_warmup", t_warmup), self._time("t_decay", t_decay)
        self.t_max, self.decay = self._positive("t_max", t_max), decay
        self.alpha_f = self._factor("alpha_f", alpha_f)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        end = span_of(self.t_max, state, ssr)
        risen = _rise(span_of(self.t_warmup, state), state)
        if risen is not None:
            return risen
        fall, end = _in_common_unit(span_of(self.t_decay, state, ssr), end, state, self._name())
        passed = position_in(end.unit, state) - (end.value - fall.value)
        if passed <= 0:
            return 1.0
        return schedules.decay(min(1.0, passed / fall.value) if fall.value else 1.0, self.decay, self.alpha_f)


class InverseSqrtScheduler(_Scheduler):
    """Rises to 1 during the warm-up, then falls with the inverse square root of the time."""

    def __init__(self, t_warmup: TimeLike):
        self.t_warmup = self._time("t_warmup", t_warmup)

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
        self.t_up, self.t_max = self._time("t_up", t_up), self._positive("t_max", t_max)
        self.alpha_i, self.alpha_f = self._factor("alpha_i", alpha_i), self._factor("alpha_f", alpha_f)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        up, end = span_of(self.t_up, state, ssr), span_of(self.t_max, state, ssr)
        if _starts(up, end, state):
            return self.alpha_i
        up, end = _in_common_unit(up, end, state, self._name())
        return schedules.one_cycle(position_in(end.unit, state), up.value, end.value, self.alpha_i, self.alpha_f)


def _starts(first: Span, second: Span, state: State) -> bool:
    """Return whether nothing of a span has passed; then the loader, whose length relates the units, may not be there yet."""
    is_counted = {first.unit, second.unit} <= {TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.STEP}
    return is_counted and first.value > 0 and position_in(first.unit, state) == 0


def _in_common_unit(first: Span, second: Span, state: State, who: str) -> tuple[Span, Span]:
    """Return both spans in one unit; 0 is 0 in every unit."""
    return in_common_unit(first if first.value else Span(0.0, second.unit), second, state, who)


def _rise(warmup: Span, state: State) -> float | None:
    """Return the factor within the warm-up, or None after it; a warm-up of 0 is none."""
    now = position_in(warmup.unit, state)
    return schedules.warm_up(now / warmup.value) if now < warmup.value else None
