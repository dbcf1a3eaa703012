"""One trial of a sweep, and what came of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.secret import masked

ASKED, RUNNING, FINISHED, FAILED, PRUNED = "asked", "running", "finished", "failed", "pruned"


@dataclass(repr=False)
class Trial:
    """A set of parameters that a sweep tries, and how it went."""

    index: int
    params: dict[str, Any]
    status: str = ASKED
    value: float | None = None
    """The objective; None while there is none."""
    metrics: dict[str, float] = field(default_factory=dict)
    run_dir: Path | None = None
    error: str | None = None
    seconds: float = 0.0
    attempts: int = 0

    def __repr__(self) -> str:
        shown = f"{self.index}, {masked(self.params)}, {self.status!r}, value={self.value}"
        return f"Trial({shown}, run_dir={self.run_dir}, error={self.error!r})"

    @property
    def is_over(self) -> bool:
        """Nothing more will happen to it."""
        return self.status in (FINISHED, FAILED, PRUNED)


@dataclass
class Outcome:
    """How one attempt at a trial ended."""

    status: str
    result: Any = None
    error: str | None = None
    seconds: float = 0.0
