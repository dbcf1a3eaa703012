"""What one rank's process has told about a trial so far, and what all ranks' reports come to together."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.strategy.trial.per_parameter import PerParameter
from drivetrain.strategy.trial.values import PLAIN, OutcomeKind, TrialResult, Yardstick

State = Literal["running", "over", "cut", "failed", "echo"]
"""`cut`: ended by the deadline after some steps; `echo`: failed because another rank did."""


@dataclass(kw_only=True)
class Report:
    """The lines of one process, folded together as they come. All of it is plain data."""

    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    """When the process last said something."""
    state: State = "running"
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
    aim: tuple[float, float] | None = None
    """What loss and norm were compared with."""
    yardstick: dict[str, Any] | None = None
    is_clean: bool = False
    notes: list[str] = field(default_factory=list)
    startup: float = 0.0

    def take(self, line: dict[str, Any]) -> None:
        """Take one line."""
        now = self.heard = time.monotonic()
        event = line["event"]
        if event == "phase":
            self.phases.append((self.phase, now - self.phase_began))
            self.phase, self.phase_began = line["name"], now
            if self.phase == "steps":
                self.startup = now - self.began
        elif event == "note":
            self.notes.append(line["text"])
        elif event == "checked":
            self.loss, self.norm = line["loss"], line["norm"]
            self.is_verified, self.aim, self.yardstick = line["is_verified"], line["aim"], line["yardstick"]
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
        """Fail a process that has been silent for too long, and cut one that the deadline has reached."""
        now = time.monotonic()
        if self.state != "running":
            return
        if now >= deadline:
            if self.seconds:
                self.state = "cut"
            else:
                self.fail("timeout", f"the deadline came in phase {self.phase!r}, before a step was timed")
        elif self.phase == "compile":
            if now - self.phase_began > compile_limit:
                self.fail("timeout", f"compiling took more than {compile_limit:.0f} s")
        elif now - self.heard > patience:
            self.fail("timeout", f"nothing was heard for {patience:.0f} s in phase {self.phase!r}")


def yardstick_of(values: dict[str, Any]) -> Yardstick:
    """Return the yardstick that a line of JSON holds."""
    return Yardstick(**{**values, "each": PerParameter(**values["each"])})


def merge(reports: Sequence[Report], wanted: int, device_type: str) -> TrialResult:
    """Return what the reports of all ranks come to; the same reports give the same result everywhere."""
    first = reports[0]
    common: dict[str, Any] = {
        "loss": first.loss,
        "gradient_norm": first.norm,
        "startup_seconds": max(report.startup for report in reports),
        "phases": tuple(first.phases),
        "yardstick": None if first.yardstick is None else yardstick_of(first.yardstick),
    }
    if first.aim is not None and first.yardstick is not None and first.yardstick["source"] == PLAIN:
        common["plain_loss"], common["plain_gradient_norm"] = first.aim
    if (failed := cause_of(reports)) is not None:
        report = reports[failed]
        return TrialResult(
            outcome=report.kind,
            message=f"rank {failed}: {report.message}" if len(reports) > 1 else report.message,
            error_class=report.error_class,
            notes=tuple(first.notes),
            **common,
        )
    count = min(len(report.seconds) for report in reports)
    if count == 0 and wanted:
        return TrialResult(outcome="timeout", message="the deadline came before every rank had timed a step", **common)
    slowest = [max(report.seconds[index] for report in reports) for index in range(count)]
    notes = list(first.notes)
    if count < wanted:
        notes.append(f"{count} of {wanted} steps were timed before the deadline")
    if device_type == "cpu":
        notes.append("memory is the growth of the process's resident memory")
    return TrialResult(
        outcome="ok",
        step_seconds=statistics.median(slowest) if slowest else None,
        steps=count,
        peak_bytes=max((report.peak for report in reports if report.peak is not None), default=None),
        reserved_bytes=max((report.reserved for report in reports if report.reserved is not None), default=None),
        is_verified=all(report.is_verified for report in reports),
        notes=tuple(notes),
        **common,
    )


def cause_of(reports: Sequence[Report]) -> int | None:
    """Return the rank whose failure is the cause, None if none failed.

    A lost connection is an echo of something else, and a silence may be the wait for a rank that failed otherwise.
    """
    order = {"echo": 2, "failed": 0}
    failed = [rank for rank, report in enumerate(reports) if report.state in order]
    return min(
        failed,
        key=lambda rank: (order[reports[rank].state], reports[rank].kind == "timeout", rank),
        default=None,
    )
