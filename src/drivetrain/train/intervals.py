"""Things that happen every so often: evaluation, checkpoints."""

from collections.abc import Mapping
from typing import Any

from drivetrain.core.time import Clock, Time, TimeUnit

_COUNTERS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.STEP: "step",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.ITERATION: "iteration",
}


class Interval:
    """Is due whenever its counter passes a multiple of the interval; a value of 0 is never due.

    A share of the run (`'0.1dur'`) is counted in the run's unit, and in batches where epochs are known to have so many.
    """

    def __init__(self, every: Time, duration: Time | None = None, batches_per_epoch: int | None = None):
        if every.unit is TimeUnit.DURATION and duration is not None:
            share, unit = every.value * duration.value, duration.unit
            if unit is TimeUnit.EPOCH and batches_per_epoch:
                share, unit = share * batches_per_epoch, TimeUnit.BATCH
            every = Time(share if unit is TimeUnit.SECOND else max(1, round(share)), unit)
        self.every = every
        self.is_per_epoch = every.unit is TimeUnit.EPOCH
        self._counter = _COUNTERS.get(every.unit)
        self._passed = 0

    def reset(self, clock: Clock) -> None:
        """Count from where the clock stands, so that a resumed run keeps the rhythm."""
        self._passed = self._multiples(clock)

    def due(self, clock: Clock) -> bool:
        """Whether a multiple was passed since the last time this was true."""
        passed = self._multiples(clock)
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

    def _multiples(self, clock: Clock) -> int:
        if self.every.value <= 0:
            return 0
        now = clock.total_wct if self._counter is None else getattr(clock, self._counter)
        return int(now // self.every.value)
