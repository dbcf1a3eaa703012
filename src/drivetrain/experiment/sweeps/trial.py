"""One trial of a sweep: its parameters, how it went, and how it reports to the sweep while it runs."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.secret import masked
from drivetrain.core.types import Settings

ASKED, RUNNING, FINISHED, FAILED, PRUNED = "asked", "running", "finished", "failed", "pruned"
TIMED_OUT, INTERRUPTED = "timed out", "interrupted"
ENDS = (FINISHED, FAILED, PRUNED, TIMED_OUT)


@dataclass(repr=False)
class Trial:
    """A set of parameters that a sweep tries, and how it went."""

    index: int
    params: Settings
    status: str = ASKED
    value: float | None = None
    """The objective; None until it is known, and when there are several."""
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

    def begin(self, sweep_folder: Path) -> None:
        """Count a new attempt; the first retry continues from the trial's checkpoint, a further one begins from nothing."""
        self.attempts += 1
        self.status, self.reported = RUNNING, None
        if self.run_dir is None or self.attempts > 2:
            suffix = f"-{self.attempts}" if self.attempts > 1 else ""
            self.run_dir = sweep_folder / f"trial-{self.index:04d}{suffix}"

    def settle(self, status: str, error: str | None, seconds: float, metrics: dict[str, float]) -> None:
        """Take how an attempt ended."""
        self.status, self.error, self.metrics = status, error, metrics
        self.seconds += seconds

    def judge(self, objectives: Sequence[str], result: object) -> None:
        """Take the objectives from the metrics, without a name the returned number; the trial fails where one is missing."""
        missing = [name for name in objectives if name not in self.metrics]
        if missing:
            known = ", ".join(self.metrics) or "no numbers"
            self.fail(f"the experiment returned no objective {missing[0]!r} (returned: {known}).")
        elif len(objectives) > 1:
            self.values = {name: self.metrics[name] for name in objectives}
        elif objectives:
            self.value = self.metrics[objectives[0]]
        elif isinstance(result, int | float) and not isinstance(result, bool):
            self.value = float(result)

    def report(self, value: float, step: int) -> None:
        """Take a report."""
        self.reported = (step, value)

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
