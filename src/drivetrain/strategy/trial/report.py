"""The result of a trial: each rank's report as its process sends it, and the combined result of all ranks."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from drivetrain.strategy.trial.per_parameter import PerParameter

PLAIN = "plain"
"""The source of numbers that are the plain model's."""

OutcomeKind = Literal["ok", "oom", "timeout", "error", "nonfinite", "wrong"]


@dataclass(frozen=True, kw_only=True)
class ReferenceResults:
    """The expected loss of a few samples, and the expected gradient and update of each parameter."""

    loss: float
    gradient_norm: float
    samples: int = 8
    """How many samples they were computed on."""
    each: PerParameter = field(default_factory=PerParameter)
    """What each parameter gets."""
    split_error: float = 0.0
    """By how much, relatively, the loss differs from the mean of the losses of its halves: not at all for a mean over samples."""
    is_steady: bool | None = None
    """Whether training mode gives the same loss, so that it may be compared in the shape of training; None if it was not checked,
    because only compiled plans ask."""
    is_quiet: bool = False
    """Whether they are of training mode without dropout, because the model has no gradients in evaluation mode."""
    is_random: bool = False
    """Whether the loss depends on random numbers that cannot be switched off, so that nothing can be compared."""
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
    startup_seconds: float = 0.0
    """From the start of the processes to the first timed step: imports, building, compiling."""
    is_verified: bool = False
    """Whether loss and gradient were compared with the plain model's."""
    notes: tuple[str, ...] = ()
    error_class: str = ""
    """The name of the exception, where one was raised."""
    is_in_process: bool = False
    """Whether no process of its own could be had, and the trial ran in the caller's."""
    yardstick: ReferenceResults | None = None
    """What later trials of the same task may be compared with, without running the plain model again."""
    phases: tuple[tuple[str, float], ...] = ()
    """How long rank 0 took for each part of the trial before the timed steps, in seconds."""


ReportState = Literal["running", "over", "cut", "failed", "echo"]
"""`cut`: ended by the deadline after some steps; `echo`: failed because another rank did."""


@dataclass(kw_only=True)
class Report:
    """What one process has reported."""

    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    """When the process last reported something."""
    state: ReportState = "running"
    kind: OutcomeKind = "ok"
    message: str = ""
    error_class: str = ""
    phase: str = "start"
    phase_began: float = field(default_factory=time.monotonic)
    phases: list[tuple[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    reserved: int | None = None
    loss: float | None = None
    norm: float | None = None
    is_verified: bool = False
    yardstick: ReferenceResults | None = None
    """What loss and norm were compared with, or their own numbers where there was nothing to compare with."""
    is_clean: bool = False
    notes: list[str] = field(default_factory=list)
    startup: float = 0.0

    def take(self, line: dict[str, Any]) -> None:
        """Add one line."""
        now = self.heard = time.monotonic()
        event = line["event"]
        if event == "phase":
            self.phases.append((self.phase, now - self.phase_began))
            self.phase, self.phase_began = line["name"], now
            if self.phase == "steps":
                self.startup = now - self.began
        elif event == "note":
            self.notes.append(line["text"])
        elif event == "verified":
            self.is_verified = True
        elif event == "checked":
            self.loss, self.norm = line["loss"], line["norm"]
            self.is_verified, self.yardstick = self.is_verified or line["is_verified"], line["yardstick"]
        elif event == "step":
            self.seconds.append(line["seconds"])
            self.peak, self.reserved = line["peak"], line["reserved"]
        elif event == "done":
            self.state, self.is_clean = "over", line["is_clean"]
        elif event == "failed":
            self.fail(line["kind"], line["message"], line["error_class"], is_echo=line["is_echo"])

    def fail(self, kind: OutcomeKind, message: str, error_class: str = "", *, is_echo: bool = False) -> None:
        """End the report with a failure; the first one counts."""
        if self.state in ("running", "echo"):
            self.state = "echo" if is_echo else "failed"
            self.kind, self.message, self.error_class = kind, message, error_class

    def check_time(self, deadline: float, patience: float, compile_limit: float) -> None:
        """Fail a process that has been silent for too long, and end one that reached its deadline."""
        now = time.monotonic()
        if self.state != "running":
            return
        if now >= deadline:
            if self.seconds:
                self.state = "cut"
            else:
                self.fail("timeout", f"the deadline passed in phase {self.phase!r}, before a step was timed")
        elif self.phase == "compile":
            if now - self.phase_began > compile_limit:
                self.fail("timeout", f"compiling took more than {compile_limit:.0f} s")
        elif now - self.heard > patience:
            self.fail("timeout", f"no progress for {patience:.0f} s in phase {self.phase!r}")


def merge(reports: Sequence[Report], wanted: int, device_type: str) -> TrialResult:
    """Return the combined result of all ranks. The same reports give the same result on every rank."""
    first = reports[0]
    result = TrialResult(
        outcome="ok",
        loss=first.loss,
        gradient_norm=first.norm,
        startup_seconds=max(report.startup for report in reports),
        phases=tuple(first.phases),
        notes=tuple(first.notes),
        yardstick=first.yardstick,
    )
    if (expected := first.yardstick) is not None and expected.source == PLAIN:
        result = replace(result, plain_loss=expected.loss)
    if (failed := cause_of(reports)) is not None:
        cause = reports[failed]
        message = f"rank {failed}: {cause.message}" if len(reports) > 1 else cause.message
        return replace(result, outcome=cause.kind, message=message, error_class=cause.error_class)
    count = min(len(report.seconds) for report in reports)
    if count == 0 and wanted:
        return replace(result, outcome="timeout", message="the deadline passed before every rank had timed a step")
    slowest = [max(report.seconds[index] for report in reports) for index in range(count)]
    notes = [f"{count} of {wanted} steps were timed before the deadline"] if count < wanted else []
    if device_type == "cpu":
        notes.append("memory is the growth of the process's resident memory")
    return replace(
        result,
        step_seconds=statistics.median(slowest) if slowest else None,
        steps=count,
        peak_bytes=max((report.peak for report in reports if report.peak is not None), default=None),
        reserved_bytes=max((report.reserved for report in reports if report.reserved is not None), default=None),
        is_verified=all(report.is_verified for report in reports),
        notes=(*result.notes, *notes),
    )


def cause_of(reports: Sequence[Report]) -> int | None:
    """Return the rank whose failure is the cause, None if none failed.

    A lost connection is an echo of something else, and a silence may be the wait for a rank that failed otherwise.
    """
    order = {"echo": 2, "failed": 0}
    failed = [rank for rank, report in enumerate(reports) if report.state in order]
    return min(failed, key=lambda rank: (order[reports[rank].state], reports[rank].kind == "timeout"), default=None)
