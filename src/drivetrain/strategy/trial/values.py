"""What a trial of a plan showed, as values that JSON can hold."""

from dataclasses import dataclass, field
from typing import Literal

from drivetrain.strategy.trial.per_parameter import PerParameter

PLAIN = "plain"
"""The source of numbers that are the plain model's."""

OutcomeKind = Literal["ok", "oom", "timeout", "error", "nonfinite", "wrong"]


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What the loss of a few samples, and each parameter's part of it, ought to be."""

    loss: float
    gradient_norm: float
    samples: int = 8
    """How many samples they were computed on."""
    each: PerParameter = field(default_factory=PerParameter)
    """What each parameter gets."""
    split_error: float = 0.0
    """By how much, relatively, the loss differs from the mean of the losses of its halves: not at all for a mean over samples."""
    is_steady: bool | None = None
    """Whether training mode gives the same loss, so that it may be compared in the shape of training; None where nobody has looked,
    because only compiled plans ask."""
    source: str = PLAIN
    """Whose numbers they are: the plain model's, or those of another plan."""


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
