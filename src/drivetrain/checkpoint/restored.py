"""What a restore gives back: how far the run is, and the random states to continue with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.layout import Manifest
from drivetrain.checkpoint.reader import Rejected
from drivetrain.runtime.seeds import restore_rng


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state that has been restored."""

    path: Path
    manifest: Manifest | None = None
    """None for a file of another program, which says nothing about itself."""
    rejected: tuple[Rejected, ...] = ()
    """Newer checkpoints that were passed over, each with the reason."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the run that wrote it, empty outside a run."""
    rng: dict[str, Any] | None = field(default=None, repr=False)
    """This rank's random states."""
    report: Any = field(default=None, repr=False)
    """What the Context said while loading."""

    @property
    def id(self) -> str:
        """The id under which it was saved."""
        return self.path.stem if self.manifest is None else self.manifest.id

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return 0 if self.manifest is None else self.manifest.step

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return 0 if self.manifest is None else self.manifest.epoch

    @property
    def samples(self) -> int:
        """Samples seen."""
        return 0 if self.manifest is None else self.manifest.samples

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics at the time of the save."""
        return {} if self.manifest is None else dict(self.manifest.metrics)

    @property
    def elapsed(self) -> float:
        """Seconds the run had taken."""
        return 0.0 if self.manifest is None else float(self.manifest.progress.get("sec", 0.0))

    def apply_rng(self) -> None:
        """Set the random generators once more, just before the first step that continues the run."""
        if self.rng is not None:
            restore_rng(self.rng)
