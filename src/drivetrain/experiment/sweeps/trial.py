"""One trial of a sweep: its parameters, how it went, and how it reports to the sweep while it runs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.secret import masked

ASKED, RUNNING, FINISHED, FAILED, PRUNED = "asked", "running", "finished", "failed", "pruned"
TIMED_OUT, INTERRUPTED = "timed out", "interrupted"
ENDS = (FINISHED, FAILED, PRUNED, TIMED_OUT)


@dataclass(repr=False)
class Trial:
    """A set of parameters that a sweep tries, and how it went."""

    index: int
    params: dict[str, Any]
    status: str = ASKED
    value: float | None = None
    """The objective; None while there is none, and where there are several."""
    values: dict[str, float] = field(default_factory=dict)
    """The objectives by name, where there are several."""
    metrics: dict[str, float] = field(default_factory=dict)
    run_dir: Path | None = None
    error: str | None = None
    seconds: float = 0.0
    attempts: int = 0
    reported: tuple[int, float] | None = None
    """The step and value of its last report."""

    def __repr__(self) -> str:
        shown = f"{self.index}, {masked(self.params)}, {self.status!r}, value={self.values or self.value}"
        return f"Trial({shown}, run_dir={self.run_dir}, error={self.error!r})"

    @property
    def objectives(self) -> list[float]:
        """What trials are compared by; empty where there is nothing, or one is not a number."""
        found = list(self.values.values()) if self.values else [] if self.value is None else [self.value]
        return [] if any(math.isnan(value) for value in found) else found

    def fail(self, error: str) -> None:
        """Count as failed, for this reason."""
        self.status, self.error = FAILED, error

    @property
    def is_over(self) -> bool:
        """Nothing more will happen to it."""
        return self.status in ENDS


@dataclass
class TrialOutcome:
    """How one attempt at a trial ended."""

    status: str
    result: Any = None
    error: str | None = None
    seconds: float = 0.0


class TrialPruned(DrivetrainError):
    """Ends a trial that its sweep stops early; it counts as neither failed nor complete."""


Channel = Callable[[float, int], bool]
"""Takes a value and its step and returns whether to stop the trial."""

_channel: Channel | None = None


def report(value: float, step: int) -> None:
    """Report the objective to the sweep, which may stop the trial early. Does nothing outside a sweep.

    A trial is stopped by a `TrialPruned` exception, so `finally` blocks run.
    """
    if _channel is not None and _channel(float(value), int(step)):
        raise TrialPruned(f"the sweep stopped this trial at step {step}, with the objective at {value}")


@contextmanager
def reporting_to(channel: Channel | None) -> Iterator[None]:
    """Send reports to a channel within the block."""
    global _channel
    before, _channel = _channel, channel
    try:
        yield
    finally:
        _channel = before
