"""The parent's side of one trial process: start it, send to it, read from it, end it with everything it started.

`spawn` runs a script's top level again in every child. A script that calls Drivetrain there, without a main guard, would start trials
inside of trials without end. Children carry a mark in their environment, and whatever would start one looks for it first. The child then
ends silently, with an exit status that its parent explains once.

A task that cannot be pickled reaches a child by `fork`, which is safe where no device and no process group is in use.
"""

import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.child import ChildSettings, serve
from drivetrain.strategy.trial.memory import MemoryKills, resident_bytes_of
from drivetrain.strategy.trial.report import Report

NO_GUARD = (
    "A new process runs the script's top level again. Start training under `if __name__ == '__main__':`, so that it does not run "
    "there."
)
NO_GUARD_STATUS = 97
"""The exit status of a child whose script called Drivetrain at its top level."""


class TrialProcess:
    """One process that tries plans; it is forked where a task is given, and begins with that."""

    def __init__(self, place: ChildSettings, task: TrainingTask | None = None):
        context: Any = multiprocessing.get_context("spawn" if task is None else "fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, place, task), name="drivetrain trial", daemon=True)
        self._kills, self._resident = MemoryKills(), 0
        self.is_ready = False
        """Whether it has begun to listen."""
        self.is_received = False
        """Whether it holds the task."""
        try:
            with marked_environment(), warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # of forking beside other threads: the child uses none of theirs
                self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_waiting(self) -> bool:
        """Whether it lives, holds the task and can be given a plan."""
        return self.is_received and self._process.is_alive()

    def send(self, message: bytes) -> None:
        """Send a pickled object; a process that is gone shows itself when it is heard next."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send_bytes(message)

    def hear(self, report: Report, seconds: float) -> None:
        """Take the lines that come within some seconds into a report; return after the first ones, or the process's end."""
        ready = wait([self._pipe, self._process.sentinel], seconds)
        self._resident = max(self._resident, resident_bytes_of(self.pid))
        try:
            while self._pipe.poll():
                self._take(json.loads(self._pipe.recv_bytes()), report)
        except (EOFError, ConnectionResetError):
            ready.append(self._process.sentinel)
        if self._process.sentinel in ready:
            self._process.join(5)
            self._fail_by_exit(report)

    def _take(self, line: dict[str, Any], report: Report) -> None:
        event = line["event"]
        if event == "ready":
            self.is_ready = True
        elif event in ("received", "unsendable"):
            self.is_received = event == "received"
            if event == "unsendable":
                report.fail("error", f"the task cannot be read in another process ({line['message']})", "Unsendable")
            else:
                report.state = "over"
        report.take(line)

    def _fail_by_exit(self, report: Report) -> None:
        code = self._process.exitcode
        if code == NO_GUARD_STATUS and not self.is_ready:
            report.fail("error", f"the script has no main guard. {NO_GUARD}", "NoGuard")
            return
        if not self.is_ready:
            report.fail(
                "error", f"a process for trials ended with exit code {code} before it began. {NO_GUARD}", "Start"
            )
            return
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by signal {signal.Signals(-code).name}"
            if -code == signal.SIGKILL and self._kills.explain(self._resident):
                report.fail("oom", "the system ended the process, because the machine ran out of memory")
                return
        report.fail("error", f"the process ended {how} in phase {report.phase!r}")

    def end(self) -> None:
        """End the process and everything it started, at once."""
        self._pipe.close()
        with suppress(ProcessLookupError, PermissionError):
            if self._process.is_alive() and os.getpgid(self.pid) != self.pid:
                self._process.kill()  # it has no group of its own yet, so it has started nothing either
            else:
                os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self._process.close()


MARK = "DRIVETRAIN_TRIAL"
"""The environment variable that says: this process is a trial's."""


def is_trial_process() -> bool:
    """Return whether this process was started to try a plan."""
    return MARK in os.environ


def refuse_inside_trial(what: str) -> None:
    """Raise in a trial's process: what starts trials, or trains, was called by a script's top level.

    While that top level runs for the first time, the process ends instead: its parent has the better words.
    """
    if is_trial_process():
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            sys.stdout.flush()
            os._exit(NO_GUARD_STATUS)
        raise ConfigError(
            f"{what} was called inside a process that only tries a plan. The process runs the script's top level again, so put the "
            "call under a main guard:\n\n    if __name__ == '__main__':\n        main()\n"
        )


@contextmanager
def marked_environment() -> Iterator[None]:
    """Mark the processes that are started in this context."""
    os.environ[MARK] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[MARK]
