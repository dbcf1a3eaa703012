"""What a trial of a plan showed, as a value that JSON can hold."""

from dataclasses import dataclass
from typing import Literal

OutcomeKind = Literal["ok", "oom", "timeout", "error", "nonfinite", "wrong"]


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
    """Largest over ranks: bytes allocated on the device."""
    reserved_bytes: int | None = None
    """Largest over ranks: bytes that the allocator took from the device."""
    loss: float | None = None
    plain_loss: float | None = None
    gradient_norm: float | None = None
    plain_gradient_norm: float | None = None
    startup_seconds: float = 0.0
    """From the start of the processes to the first timed step: imports, building, compiling."""
    is_verified: bool = False
    """Whether loss and gradient were compared with the plain model's."""
    notes: tuple[str, ...] = ()
