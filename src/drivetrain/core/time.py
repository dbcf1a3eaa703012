"""Where a run is: a `Timestamp` is one moment, counted in every unit at once; a `Clock` is the hand that moves.

The loop advances the clock once per batch, so the clock is plain numbers in slots and nothing else. Whoever wants to
keep a moment takes a `snapshot()`. `Time` and its units are in `core/units.py` and can be imported from here too.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import total_ordering
from time import perf_counter
from typing import Any

from drivetrain.core.errors import ConfigTypeError, StateError, TimeUnitError, unknown_name
from drivetrain.core.units import Time, TimeLike, TimeUnit, ensure_time

__all__ = ["Clock", "Time", "TimeLike", "TimeUnit", "Timestamp", "Interval", "elapsed_duration", "ensure_time"]

_UNIT_FIELD: dict[TimeUnit, str] = {
    TimeUnit.ITERATION: "iteration",
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.STEP: "step",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.SECOND: "total_wct",
}


@total_ordering
@dataclass(frozen=True, eq=False)
class Timestamp:
    """One moment of a run, counted in every unit; `get(unit)` returns it as a `Time`, each field is a plain number.

    Wall-clock fields (`*_wct`) are seconds.

    >>> now = Timestamp().to_next_batch(samples=32)
    >>> now.batch, now >= "1ba", now.get("sp")
    (1, True, Time(32, TimeUnit.SAMPLE))
    """

    iteration: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    sample: int = 0
    token: int = 0
    epoch_in_iteration: int = 0
    batch_in_iteration: int = 0
    step_in_iteration: int = 0
    sample_in_iteration: int = 0
    token_in_iteration: int = 0
    batch_in_epoch: int = 0
    step_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    total_wct: float = 0.0
    iteration_wct: float = 0.0
    epoch_wct: float = 0.0
    batch_wct: float = 0.0

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the time since the start of the run in `unit`."""
        unit = TimeUnit(unit)
        return Time(getattr(self, unit_field(unit)), unit)

    def to_next_batch(
        self, samples: int = 0, tokens: int = 0, duration: timedelta | float | None = None, stepped: bool = True
    ) -> "Timestamp":
        """Return the moment after one more batch; `stepped`: it closed an accumulation window."""
        clock = self._clock_after(duration)
        seconds = clock.batch_wct
        clock.next_batch(samples, tokens, stepped)
        return replace(clock.snapshot(), batch_wct=seconds)

    def to_next_epoch(self, duration: timedelta | float | None = None) -> "Timestamp":
        """Return the moment at which the next epoch begins."""
        clock = self._clock_after(duration)
        clock.next_epoch()
        return clock.snapshot()

    def to_next_iteration(self, duration: timedelta | float | None = None) -> "Timestamp":
        """Return the moment at which the next iteration begins."""
        clock = self._clock_after(duration)
        clock.next_iteration()
        return clock.snapshot()

    def _clock_after(self, duration: timedelta | float | None) -> "Clock":
        """Return a clock that stopped so long after this moment."""
        clock = Clock()
        clock.load_state_dict(self.state_dict())
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration or 0)
        clock.add_seconds(seconds)
        clock.batch_wct = seconds
        return clock

    def copy(self, **changes: int | float) -> "Timestamp":
        """Return the same moment with some fields changed."""
        for name in changes:
            if name not in FIELDS:
                raise ConfigTypeError(unknown_name("timestamp field", name, FIELDS))
        return replace(self, **changes)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, int | float]:
        """Return every field."""
        return dict(vars(self))

    @classmethod
    def load_state_dict(cls, state: Mapping[str, object]) -> "Timestamp":
        """Return the moment that `state_dict` described."""
        return cls(**checked_fields(state))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return vars(self) == vars(other)
        return self._compared(other, operator.eq)

    def __lt__(self, other: object) -> bool:
        return self._compared(other, operator.lt)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def _compared(self, other: object, how: Callable[[Any, Any], bool]) -> bool:
        if not isinstance(other, Time | str):
            return NotImplemented
        time = Time.from_input(other)
        return how(getattr(self, unit_field(time.unit)), time.value)


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Timestamp))
EPOCH_FIELDS: tuple[str, ...] = (*(name for name in FIELDS if name.endswith("_in_epoch")), "epoch_wct", "batch_wct")
ITERATION_FIELDS: tuple[str, ...] = (*(name for name in FIELDS if name.endswith("_in_iteration")), "iteration_wct")


def unit_field(unit: TimeUnit) -> str:
    """Return the field of `Timestamp` that counts `unit` since the start of the run."""
    if unit is TimeUnit.DURATION:
        raise TimeUnitError(
            "'dur' is a fraction of the run and is not counted here: use another unit, such as 'ba' or 'ep', or the state's elapsed "
            "duration."
        )
    return _UNIT_FIELD[unit]


def checked_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved timestamp; a foreign or missing one is an error."""
    for name in state:
        if name not in FIELDS:
            raise StateError(unknown_name("timestamp field", name, FIELDS, where="saved time"))
    if missing := [name for name in FIELDS if name not in state]:
        raise StateError(f"saved time lacks {', '.join(missing)}; it was not written by this version.")
    return {name: (float if name.endswith("_wct") else int)(state[name]) for name in FIELDS}


def elapsed_duration(
    now: "Clock | Timestamp", max_duration: Time | None, batches_per_epoch: int | None = None
) -> float | None:
    """Return the fraction of the run that is done at `now` (a `Timestamp` or `Clock`), or None without a limit.

    A limit in epochs counts the batches of the current epoch too, when the loader's length is known.

    >>> elapsed_duration(Timestamp(epoch=1, batch=14, batch_in_epoch=4), Time(7, "ep"), 10)
    0.2
    """
    if max_duration is None:
        return None
    done, whole = getattr(now, unit_field(max_duration.unit)), max_duration.value
    if max_duration.unit is TimeUnit.EPOCH and batches_per_epoch:
        # Counted in batches, so that one division rounds once: 14/70 is 0.2, but 1.4/7 is a little less.
        done, whole = done * batches_per_epoch + now.batch_in_epoch, whole * batches_per_epoch
    return done / whole if whole else 1.0


class Clock:
    """The counters of a run, made to be advanced once per batch at the cost of a few additions.

    Wall-clock time is taken when the clock advances. It runs from `start()` to `stop()`, so that the hours between a
    checkpoint and its resumption, or between two calls of `train()`, do not count. A clock that several ranks share moves only by
    `advance_to`, so that whatever depends on the time is decided alike on all of them.

    >>> clock = Clock()
    >>> clock.next_batch(samples=32)
    >>> clock.batch, clock.reached(Time(32, "sp"))
    (1, True)
    """

    __slots__ = (*FIELDS, "_ticked_at", "_zero_at")

    iteration: int
    epoch: int
    batch: int
    step: int
    sample: int
    token: int
    epoch_in_iteration: int
    batch_in_iteration: int
    step_in_iteration: int
    sample_in_iteration: int
    token_in_iteration: int
    batch_in_epoch: int
    step_in_epoch: int
    sample_in_epoch: int
    token_in_epoch: int
    total_wct: float
    iteration_wct: float
    epoch_wct: float
    batch_wct: float

    def __init__(self) -> None:
        self._ticked_at: float | None = None
        self._zero_at: float | None = None  # of a shared clock: when it would have read zero
        self.reset()

    def reset(self) -> None:
        """Go back to the beginning of a run."""
        self.load_state_dict(Timestamp().state_dict())

    def start(self, shared: bool = False) -> None:
        """Let wall-clock time run from now on; a shared clock waits for `advance_to`."""
        now = perf_counter()
        self._ticked_at, self._zero_at = (None, now - self.total_wct) if shared else (now, None)

    def stop(self) -> None:
        """Count the time since the last tick and stop until `start()`."""
        self._tick()
        self._ticked_at = self._zero_at = None

    def advance_to(self, seconds: float) -> None:
        """Move the wall-clock time of a shared clock to what the ranks have agreed on; it never goes back."""
        self.batch_wct = passed = max(0.0, seconds - self.total_wct)
        self.add_seconds(passed)

    def next_batch(self, samples: int = 0, tokens: int = 0, stepped: bool = True) -> None:
        """Count one batch; `stepped`: it closed an accumulation window."""
        if self._ticked_at is not None:  # a tick, written out: this is called in every step
            now = perf_counter()
            self.batch_wct = seconds = now - self._ticked_at
            self._ticked_at = now
            self.total_wct += seconds
            self.iteration_wct += seconds
            self.epoch_wct += seconds
        else:
            self.batch_wct = 0.0
        self.batch += 1
        self.batch_in_iteration += 1
        self.batch_in_epoch += 1
        if stepped:
            self.step += 1
            self.step_in_iteration += 1
            self.step_in_epoch += 1
        if samples:
            self.sample += samples
            self.sample_in_iteration += samples
            self.sample_in_epoch += samples
        if tokens:
            self.token += tokens
            self.token_in_iteration += tokens
            self.token_in_epoch += tokens

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self._tick()
        self.epoch += 1
        self.epoch_in_iteration += 1
        for name in EPOCH_FIELDS:
            setattr(self, name, _ZERO[name])

    def next_iteration(self) -> None:
        """Begin the next iteration."""
        self._tick()
        self.iteration += 1
        for name in (*ITERATION_FIELDS, *EPOCH_FIELDS):
            setattr(self, name, _ZERO[name])

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the time since the start of the run in `unit`."""
        unit = TimeUnit(unit)
        return Time(getattr(self, unit_field(unit)), unit)

    def reached(self, time: Time, max_duration: Time | None = None, batches_per_epoch: int | None = None) -> bool:
        """Return whether the run has reached `time`; a `dur` needs the length of the run to be compared with."""
        field = _UNIT_FIELD.get(time.unit)
        if field is not None:
            return getattr(self, field) >= time.value
        elapsed = elapsed_duration(self, max_duration, batches_per_epoch)
        if elapsed is None:
            raise TimeUnitError(f"{time} is a fraction of the run, whose length is unknown: set max_duration.")
        # Nine decimals forgive binary fractions, so that 0.3dur of 10 batches is reached at batch 3.
        return round(elapsed - time.value, 9) >= 0

    def total_seconds(self) -> float:
        """Return this process's wall-clock time of the run up to now, where `total_wct` changes only with a tick."""
        if self._zero_at is not None:
            return perf_counter() - self._zero_at
        return self.total_wct + (0.0 if self._ticked_at is None else perf_counter() - self._ticked_at)

    def snapshot(self) -> Timestamp:
        """Return the present moment, which stays as it is."""
        # Filled past the frozen __init__, whose nineteen guarded assignments would cost three times as much.
        moment = object.__new__(Timestamp)
        vars(moment).update(zip(FIELDS, _read_fields(self)))
        return moment

    def state_dict(self) -> dict[str, int | float]:
        """Return every counter."""
        return dict(zip(FIELDS, _read_fields(self)))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved moment; wall-clock time continues from there."""
        for name, value in checked_fields(state).items():
            setattr(self, name, value)
        if self._ticked_at is not None or self._zero_at is not None:
            self.start(shared=self._zero_at is not None)

    def __repr__(self) -> str:
        shown = ("epoch", "batch", "step", "sample", "token")
        return f"Clock({', '.join(f'{name}={getattr(self, name)}' for name in shown)})"

    def _tick(self) -> None:
        """Count the seconds since the last tick."""
        if self._ticked_at is not None:
            now = perf_counter()
            self.add_seconds(now - self._ticked_at)
            self._ticked_at = now

    def add_seconds(self, seconds: float) -> None:
        """Count wall-clock time."""
        self.total_wct += seconds
        self.iteration_wct += seconds
        self.epoch_wct += seconds


_ZERO: dict[str, int | float] = Timestamp().state_dict()
_read_fields = operator.attrgetter(*FIELDS)


class Interval:
    """Is due whenever its counter passes a multiple of the interval; a value of 0 is never due.

    A share of the run (`'0.1dur'`) is counted in the run's unit, and in batches where epochs are known to have so many. A caller
    that has no clock counts for itself and asks `passes(now)`.

    >>> every = Interval(Time(10, "ba"))
    >>> [every.passes(now) for now in (9, 10, 19, 31)]
    [False, True, False, True]
    """

    def __init__(self, every: Time, duration: Time | None = None, batches_per_epoch: int | None = None):
        if every.unit is TimeUnit.DURATION and duration is not None:
            share, unit = every.value * duration.value, duration.unit
            if unit is TimeUnit.EPOCH and batches_per_epoch:
                share, unit = share * batches_per_epoch, TimeUnit.BATCH
            every = Time(share if unit is TimeUnit.SECOND or not share else max(1, round(share)), unit)
        self.every = every
        self.is_per_epoch = every.unit is TimeUnit.EPOCH
        self._counter = _UNIT_FIELD.get(every.unit)  # a share of a run of unknown length is counted by the caller
        self._passed = 0

    def reset(self, clock: Clock) -> None:
        """Count from the clock's present time, so that a resumed run keeps its intervals."""
        self.count_from(self._now(clock))

    def count_from(self, now: float) -> None:
        """Count from `now`, in the interval's unit."""
        self._passed = self.multiples(now)

    def due(self, clock: Clock) -> bool:
        """Return whether a multiple was passed since the last time this was true."""
        return self.passes(self._now(clock))

    def passes(self, now: float) -> bool:
        """Return whether `now`, in the interval's unit, has passed a multiple since the last time this was true."""
        passed = self.multiples(now)
        if passed <= self._passed:
            return False
        self._passed = passed
        return True

    def state_dict(self) -> dict[str, str | int]:
        """Return how many multiples have been passed, and of what."""
        return {"every": str(self.every), "passed": self._passed}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the count of a saved run that had the same interval."""
        if state is not None and state["every"] == str(self.every):
            self._passed = int(state["passed"])

    def _now(self, clock: Clock) -> float:
        return getattr(clock, self._counter or unit_field(self.every.unit))

    def multiples(self, now: float) -> int:
        """Return how many multiples of the interval lie before `now`."""
        every = self.every.value
        if every <= 0:
            return 0
        if isinstance(now, int) and isinstance(every, int):
            return now // every
        return math.floor(round(now / every, 9))  # nine decimals forgive binary fractions: 0.3 is three times 0.1
