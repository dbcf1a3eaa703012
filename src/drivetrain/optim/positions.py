"""How far a run is and how long a time is, as real numbers of one unit.

A `Time` counts whole batches or epochs. A schedule asks finer questions: 0.2 of a run of 7 epochs is 1.4 epochs, and the third
batch of ten is 0.3 of an epoch. Conversion goes through the length of the loader where it is known, and is rejected where not.
"""

from typing import Any, NamedTuple

from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time, TimeUnit

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


def position_in(unit: TimeUnit, state: Any) -> float:
    """Return the time since the start of the run in a unit; epochs include the part of the present one, if its length is known."""
    clock, ahead = state.clock, getattr(state, "ahead", 0)
    if unit is _EPOCH:
        batches = _batches_per_epoch(state)
        return (clock.epoch * batches + clock.batch_in_epoch + ahead) / batches if batches else float(clock.epoch)
    if unit in (_BATCH, _STEP):
        return float(clock.get(unit).value + ahead)
    return float(clock.get(unit).value)


def span_of(time: Time, state: Any, ssr: float = 1.0) -> Span:
    """Return a time as a real number of units; a fraction of the run in the unit of its length, others multiplied by `ssr`."""
    if time.unit is not TimeUnit.DURATION:
        return Span(round(time.value * ssr, _DECIMALS), time.unit)
    run = state.max_duration
    if run is None:
        raise ConfigError(
            f"{str(time)!r} is a fraction of the run, whose length is not known: give max_duration, such as '10ep'."
        )
    return Span(round(time.value * run.value, _DECIMALS), run.unit)


def in_common_unit(first: Span, second: Span, state: object, who: str) -> tuple[Span, Span]:
    """Return both spans in the second one's unit, or both in batches where one is in epochs."""
    if first.unit is second.unit:
        return first, second
    converted = _convert(first, second.unit, state)
    if converted is None:
        raise ConfigError(
            f"{who}: {first} and {second} cannot be compared: epochs become batches where the length of the loader is known, and other "
            "units stay apart. Write both in one unit."
        )
    return converted, second


def check_covers_run(end: Span, state: Any, who: str) -> None:
    """Reject a schedule that ends before the run does; one that cannot be compared is taken as it is."""
    run = state.max_duration
    if run is None:
        return
    length = _convert(Span(float(run.value), run.unit), end.unit, state)
    if length is not None and round(length.value - end.value, 9) > 0:
        raise ConfigError(
            f"{who} ends after {end}, before the run of {run} does. Use '1dur', or a t_max of at least {length}."
        )


def _convert(span: Span, unit: TimeUnit, state: object) -> Span | None:
    batches, window = _batches_per_epoch(state), getattr(state, "accumulation_steps", 1) or 1
    in_batches = {_EPOCH: batches, _BATCH: 1, _STEP: window if batches is None or batches % window == 0 else None}
    if span.unit is unit:
        return span
    given, wanted = in_batches.get(span.unit), in_batches.get(unit)
    return Span(span.value * given / wanted, unit) if given and wanted else None


def _batches_per_epoch(state: Any) -> int | None:
    length = state.dataloader_len
    return None if length is None else int(length)
