"""Things that happen every so often: evaluation, checkpoints, averages, metrics."""

import math
from collections.abc import Mapping
from typing import Any

from drivetrain.core.time import Clock, Time, TimeUnit


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
            every = Time(share if unit is TimeUnit.SECOND else max(1, round(share)), unit)
        self.every = every
        self.is_per_epoch = every.unit is TimeUnit.EPOCH
        self._counter = "total_wct" if every.unit in (TimeUnit.SECOND, TimeUnit.DURATION) else every.unit.name.lower()
        self._passed = 0

    def reset(self, clock: Clock) -> None:
        """Count from the clock's present time, so that a resumed run keeps its intervals."""
        self.count_from(getattr(clock, self._counter))

    def count_from(self, now: float) -> None:
        """Count from `now`, in the interval's unit."""
        self._passed = self._multiples(now)

    def due(self, clock: Clock) -> bool:
        """Return whether a multiple was passed since the last time this was true."""
        return self.passes(getattr(clock, self._counter))

    def passes(self, now: float) -> bool:
        """Return whether `now`, in the interval's unit, has passed a multiple since the last time this was true."""
        passed = self._multiples(now)
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

    def _multiples(self, now: float) -> int:
        every = self.every.value
        if every <= 0:
            return 0
        if isinstance(now, int) and isinstance(every, int):
            return now // every
        return math.floor(round(now / every, 9))  # nine decimals forgive binary fractions: 0.3 is three times 0.1
