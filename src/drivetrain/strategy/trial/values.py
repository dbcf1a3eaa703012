"""What a trial of a plan showed, as values that JSON can hold."""

from dataclasses import dataclass, replace
from typing import Literal

PLAIN = "plain"
"""The source of numbers that are the plain model's."""

OutcomeKind = Literal["ok", "oom", "timeout", "error", "nonfinite", "wrong"]


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What loss and gradient norm of a few samples ought to be."""

    loss: float
    gradient_norm: float
    samples: int = 8
    """How many samples they were computed on."""
    is_steady: bool | None = None
    """Whether training mode gives the same loss for repeated samples, so that it may be compared in the shape of training; None where
    nobody has looked, because only compiled plans ask."""
    training_loss: float | None = None
    """The loss in training mode, where it is steady."""
    training_norm: float | None = None
    training_drift: float = 0.0
    """By how much it differs for repeated samples, because kernels for another size round differently."""
    is_magnified: bool = False
    """Whether small errors grow on their way: they do where a batch is divided by its own deviation."""
    source: str = PLAIN
    """Whose numbers they are: the plain model's, or those of another plan."""

    def trained(self) -> "Yardstick":
        """Return the numbers of training mode instead of those of evaluation."""
        loss, norm = self.training_loss, self.training_norm
        assert loss is not None and norm is not None, "only a steady model has them"
        noticeable = 1e-5 * max(1.0, abs(self.loss))
        has_batch_statistics = abs(loss - self.loss) > noticeable
        is_magnified = has_batch_statistics or self.training_drift > noticeable
        return replace(self, loss=loss, gradient_norm=norm, is_magnified=is_magnified)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One plan, tried on all ranks."""

    outcome: OutcomeKind
    message: str = ""
    """What went wrong, with the rank."""
    step_seconds: float | None = None
    """Median over steps of the slowest rank's time for one global batch."""
    steps: int = 0
    """How many steps were timed."""
    peak_bytes: int | None = None
    """Largest over ranks: bytes allocated on the device. On the CPU: by how much the process's resident memory grew."""
    reserved_bytes: int | None = None
    """Largest over ranks: bytes that the allocator took from the device; None on the CPU."""
    loss: float | None = None
    plain_loss: float | None = None
    gradient_norm: float | None = None
    plain_gradient_norm: float | None = None
    startup_seconds: float = 0.0
    """From the start of the processes to the first timed step: imports, building, compiling."""
    is_verified: bool = False
    """Whether loss and gradient were compared with the plain model's."""
    notes: tuple[str, ...] = ()
    error_class: str = ""
    """The name of the exception, where one was raised."""
    is_in_process: bool = False
    """Whether no process of its own could be had, and the trial ran in the caller's."""
    yardstick: Yardstick | None = None
    """What later trials of the same task may be compared with, without running the plain model again."""
    phases: tuple[tuple[str, float], ...] = ()
    """How long rank 0 took for each part of the trial before the timed steps, in seconds."""
