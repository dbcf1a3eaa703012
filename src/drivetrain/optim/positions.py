"""How far a run is and how long a time is: as real numbers of one unit for schedules of the state, as real steps for units.

A `Time` counts whole batches or epochs. A schedule asks finer questions: 0.2 of a run of 7 epochs is 1.4 epochs, and the third
batch of ten is 0.3 of an epoch. Conversion goes through the length of the loader where it is known, and is rejected where not.

A unit counts real steps, windows of `accum_grad` batches: `400`, `"3ep"`, `"500st"`, `"1000ba"` or `"0.05dur"`. Epochs and fractions can be
counted only when the length of the run is known; the Trainer passes it to `bind`, in batches.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time, TimeUnit, ensure_time

if TYPE_CHECKING:
    from drivetrain.context.state import State

_DECIMALS = 9  # forgives binary fractions: 0.2 of 7 epochs is 1.4 epochs, and 0.29 of 100 batches is batch 29
_EPOCH, _BATCH, _STEP = TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.STEP


class Span(NamedTuple):
    """A length of training as a real number of units."""

    value: float
    unit: TimeUnit

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}"


class Position:
    """A state seen some updates ahead of its clock; everything else is the state's.

    Seconds, samples and tokens of a batch are not known before the loop has counted it, so those lag by one batch.
    """

    def __init__(self, state: object):
        self._state, self.ahead = state, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def position_in(unit: TimeUnit, state: "State") -> float:
    """Return the time since the start of the run in a unit; epochs include the part of the present one, if its length is known."""
    clock, ahead = state.clock, getattr(state, "ahead", 0)
    if unit is _EPOCH:
        batches = _batches_per_epoch(state)
        return (clock.epoch * batches + clock.batch_in_epoch + ahead) / batches if batches else float(clock.epoch)
    return float(clock.get(unit).value + (ahead if unit in (_BATCH, _STEP) else 0))


def span_of(time: Time, state: "State", ssr: float = 1.0) -> Span:
    """Return a time as a real number of units; a fraction of the run in the unit of its length, others multiplied by `ssr`."""
    if time.unit is not TimeUnit.DURATION:
        return Span(round(time.value * ssr, _DECIMALS), time.unit)
    run = state.planned_duration
    if run is None:
        raise ConfigError(
            f"{str(time)!r} is a fraction of the run, whose length is unknown: set max_duration, such as '10ep'."
        )
    return Span(round(time.value * run.value, _DECIMALS), run.unit)


def in_common_unit(first: Span, second: Span, state: "State", who: str) -> tuple[Span, Span]:
    """Return both spans in the second one's unit, or both in batches where one is in epochs."""
    if first.unit is second.unit:
        return first, second
    converted = _convert(first, second.unit, state)
    if converted is None:
        raise ConfigError(
            f"{who}: {first} and {second} cannot be compared: only epochs and batches convert to each other, and only if the loader "
            "has a length. Write both in one unit."
        )
    return converted, second


def check_covers_run(end: Span, state: "State", who: str) -> None:
    """Reject a schedule that ends before the run does; one that cannot be compared is taken as it is."""
    run = state.planned_duration
    if run is None:
        return
    length = _convert(Span(float(run.value), run.unit), end.unit, state)
    if length is not None and round(length.value - end.value, 9) > 0:
        raise ConfigError(
            f"{who} ends after {end}, before the run of {run} does. Use '1dur', or a t_max of at least {length}."
        )


def _convert(span: Span, unit: TimeUnit, state: "State") -> Span | None:
    if span.unit is unit:
        return span
    batches, window = _batches_per_epoch(state), getattr(state, "accumulation_steps", 1) or 1
    in_batches = {_EPOCH: batches, _BATCH: 1, _STEP: window if batches is None or batches % window == 0 else None}
    given, wanted = in_batches.get(span.unit), in_batches.get(unit)
    return Span(span.value * given / wanted, unit) if given and wanted else None


def _batches_per_epoch(state: "State") -> int | None:
    length = state.dataloader_len
    return None if length is None else int(length)


Duration = int | str | Time


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """The length of a run as the loader sees it."""

    total_batches: int | None = None
    """Batches of the whole run, or None while that is unknown."""
    batches_per_epoch: int | None = None
    """Batches of one epoch, or None while that is unknown."""

    def windows(self, batches: int, accum_grad: int) -> int:
        """Return the real steps in so many batches; windows end with their epoch, so each epoch may have a short one."""
        if self.batches_per_epoch is None:
            return math.ceil(batches / accum_grad)
        epochs, rest = divmod(batches, self.batches_per_epoch)
        return epochs * math.ceil(self.batches_per_epoch / accum_grad) + math.ceil(rest / accum_grad)

    def total(self, accum_grad: int) -> int | None:
        """Return the real steps of the whole run, or None while that is unknown."""
        return None if self.total_batches is None else self.windows(self.total_batches, accum_grad)


def check_duration(name: str, value: object) -> Time:
    """Return the duration as a Time, or raise an error; a bare whole number counts real steps."""
    if isinstance(value, bool) or not isinstance(value, (Integral, str, Time)):
        raise ConfigError(
            f"{name}={value!r}: expected a whole number of steps or a time such as '3ep', '500st', '0.05dur'."
        )
    try:
        time = ensure_time(int(value) if isinstance(value, Integral) else value, TimeUnit.STEP)
    except (ValueError, TypeError) as problem:
        raise ConfigError(f"{name}: {problem}") from None
    if time.unit not in (_STEP, _BATCH, _EPOCH, TimeUnit.DURATION):
        raise ConfigError(
            f"{name}={value!r}: a schedule counts in st (steps), ba (batches), ep (epochs) or dur, not in {time.unit}."
        )
    if time.value < 0:
        raise ConfigError(f"{name}={value!r}: expected at least 0.")
    return time


def real_steps(name: str, time: Time, run: RunLength, accum_grad: int, total: int | None = None) -> int:
    """Return a duration in real steps; `total` overrides the run's own length for fractions."""
    if time.unit is TimeUnit.STEP:
        return int(time.value)
    if time.unit is TimeUnit.BATCH:
        return run.windows(int(time.value), accum_grad)
    if time.unit is TimeUnit.EPOCH:
        if run.batches_per_epoch is None:
            raise ConfigError(
                f"{name}={str(time)!r} counts epochs, but the number of batches in an epoch is not known. Call "
                "bind(total_steps=..., steps_per_epoch=...) before training, or give a number of steps."
            )
        return run.windows(int(time.value) * run.batches_per_epoch, accum_grad)
    total = total if total is not None else run.total(accum_grad)
    if total is None:
        raise ConfigError(
            f"{name}={str(time)!r} is a fraction of the run, whose length is not known. Give total_steps, or call "
            "bind(total_steps=...) before training."
        )
    return int(round(time.value * total, 9))  # nine decimals forgive binary fractions: 0.29 of 100 is 29


# ---------------------------------------------------------------------- learning rates as a function of the state


@runtime_checkable
class StateSchedule(Protocol):
    """Anything that returns the factor on the learning rate for a state."""

    def __call__(self, state: "State", ssr: float = 1.0) -> float:
        """Return the factor."""


def compile_state_schedule(
    scheduler: Callable[..., float], state: "State", ssr: float = 1.0
) -> LambdaLR | tuple[LambdaLR, ...]:
    """Return torch's LambdaLR for the state's optimizer that follows a scheduler; a tuple of them for several optimizers."""
    arguments: tuple[float, ...] = (ssr,)
    try:
        inspect.signature(scheduler).bind(None, ssr)
    except (TypeError, ValueError):
        arguments = ()
    if not arguments and ssr != 1.0:
        name = getattr(scheduler, "__name__", type(scheduler).__name__)
        raise ConfigError(
            f"{name} takes only the state, so it cannot be scaled: expected ssr=1.0, got {ssr}. Add a second argument, "
            "def scheduler(state, ssr=1.0)."
        )
    if not ssr > 0:
        raise ConfigError(f"ssr={ssr!r}: expected a number above 0; 1 does not change a schedule.")
    moment = Position(state)

    def factor(updates: int) -> float:
        # Within an update the loop counts the batch last. What the rate is set for is the next batch.
        moment.ahead = max(0, updates - state.clock.step)
        return scheduler(moment, *arguments)

    optimizers = [one for one in state.optimizers if isinstance(one, Optimizer)]
    if not optimizers:
        raise ConfigError("compile_state_schedule: the state has no torch optimizer whose rate could be scheduled.")
    made = tuple(LambdaLR(optimizer, factor) for optimizer in optimizers)
    return made[0] if len(made) == 1 else made


def follows_state(schedule: object) -> bool:
    """Return whether a schedule is called with the state, rather than with the optimizer to make a scheduler for it."""
    return getattr(type(schedule), "follows_state", False) is True
