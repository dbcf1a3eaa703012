"""One trial process. Its parent starts it, sends to it, reads from it, and ends it with everything it started.

`spawn` runs a script's top level again in every child. Without a main guard, a script that calls Drivetrain there would start trials
inside of trials without end. So children have a mark in their environment; one whose script starts a trial ends silently, with an exit
status that its parent explains once. A task that cannot be pickled reaches a child by `fork`.

The child takes a task over a private pipe, then one order after another, and reports each event as a dict. It ends when its pipe closes
or its parent is gone. After a failure it only waits to be ended: leaving would show the other ranks a lost connection in place of the
cause.
"""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from drivetrain.core.errors import ConfigError
from drivetrain.runtime.environment import end_with_parent
from drivetrain.runtime.group import init_distributed
from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.runtime.seeds import set_seed
from drivetrain.runtime.workers import is_lost_peer
from drivetrain.strategy.registry import find_method, method_names, register_method
from drivetrain.strategy.snapshot import ProcessSettings
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.measuring import Order, failure_of, measure, release_unused_memory
from drivetrain.strategy.trial.memory import MemoryKills, MemoryMeter, resident_bytes_of
from drivetrain.strategy.trial.report import Report

SIGKILL = getattr(signal, "SIGKILL", 9)  # Windows has none
MARK = "DRIVETRAIN_TRIAL"
"""The environment variable of processes that were started to try a plan."""
NO_GUARD = (
    "A new process runs the script's top level again. Start training under `if __name__ == '__main__':`, so that it does not run "
    "there."
)
NO_GUARD_STATUS = 97
"""The exit status of a child whose script called Drivetrain at its top level."""


@dataclass(frozen=True, kw_only=True)
class ChildSettings:
    """Where a trial process runs."""

    device: str
    settings: ProcessSettings
    environment: Mapping[str, str]
    """Rank, world and meeting place."""
    joins_group: bool
    timeout: float
    """Seconds a collective may take before it fails by itself."""


class TrialProcess:
    """One process that tries plans. With a task it is forked and starts with that task."""

    def __init__(self, place: ChildSettings, task: TrainingTask | None = None):
        context: Any = multiprocessing.get_context("spawn" if task is None else "fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, place, task), name="drivetrain trial", daemon=True)
        self._kills, self._resident = MemoryKills(), 0
        self.is_ready = False
        """Whether it has begun to listen."""
        self.is_received = False
        """Whether it holds the task."""
        os.environ[MARK] = str(os.getpid())
        try:
            # Python warns of forking with threads, which are unused there.
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            del os.environ[MARK]
            theirs.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_waiting(self) -> bool:
        """Whether it runs, holds the task and can take a plan."""
        return self.is_received and self._process.is_alive()

    def send(self, message: bytes) -> None:
        """Send a pickled object. A process that has ended is detected at the next read."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send_bytes(message)

    def read(self, report: Report, seconds: float) -> None:
        """Read the lines that arrive within some seconds into a report. Return after the first ones, or when the process ends."""
        ready = wait([self._pipe, self._process.sentinel], seconds)
        self._resident = max(self._resident, resident_bytes_of(self.pid))
        try:
            while self._pipe.poll():
                line = self._pipe.recv()
                report.take(line)
                self.is_ready = True
                if line["event"] == "received":
                    self.is_received, report.state = True, "over"
        except (EOFError, OSError):  # also in the middle of a message
            ready.append(self._process.sentinel)
        if self._process.sentinel in ready:
            self._process.join(5)
            self._fail_by_exit(report)

    def _fail_by_exit(self, report: Report) -> None:
        code = self._process.exitcode
        is_signal = code is not None and code < 0
        how = f"by signal {signal.Signals(-code).name}" if is_signal else f"with exit code {code}"
        if code == NO_GUARD_STATUS and not self.is_ready:
            report.fail("error", f"the script has no main guard. {NO_GUARD}", "NoGuard")
        elif not self.is_ready:
            report.fail("error", f"a process for trials ended {how} before it began. {NO_GUARD}", "Start")
        elif code == -SIGKILL and self._kills.explain(self._resident):
            report.fail("oom", "the system ended the process, because the machine ran out of memory")
        else:
            report.fail("error", f"the process ended {how} in phase {report.phase!r}")

    def end(self) -> None:
        """End the process and everything it started immediately."""
        self._pipe.close()
        with suppress(ProcessLookupError, PermissionError):
            if not hasattr(os, "setsid") or (self._process.is_alive() and os.getpgid(self.pid) != self.pid):
                self._process.kill()  # Windows; or it has no group of its own yet, so it has started nothing either
            else:
                os.killpg(self.pid, SIGKILL)
        self._process.join()
        self._process.close()


def reject_inside_trial(what: str) -> None:
    """Raise in a trial process: the script's top level called something that trains or starts trials.

    While that top level runs for the first time, the process ends instead: its parent has the better words.
    """
    if MARK not in os.environ:
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stdout.flush()
        os._exit(NO_GUARD_STATUS)
    raise ConfigError(
        f"{what} was called inside a process that only tries a plan. The process runs the script's top level again, so put the "
        "call under a main guard:\n\n    if __name__ == '__main__':\n        main()\n"
    )


LEFT_BYTES = {"cuda": 128 << 20}
"""How much a trial may leave in use for the process to be used again; matrix libraries keep workspaces of some ten MiB."""
LEFT_ON_HOST = 512 << 20
"""The same for resident memory: the compiler's own code is 200 MiB."""


def serve(pipe: Connection, place: ChildSettings, task: TrainingTask | None = None) -> None:
    """Run as a trial process. A forked one already has its task."""
    if hasattr(os, "setsid"):
        os.setsid()  # a group of its own: its parent can end it with everything it started, and the keyboard does not reach it
    end_with_parent()

    def run() -> None:
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):
            _Service(pipe, place, task).run()

    if task is None:
        run()
    else:  # OpenMP keeps a pool for each thread that uses it; the one of the forked thread has lost its workers, and would hang
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    os._exit(0)  # an orderly end would wait for ranks that are no longer there


class _Service:
    def __init__(self, pipe: Connection, place: ChildSettings, task: TrainingTask | None):
        self.pipe, self.place, self.task = pipe, place, task
        self.device = torch.device(place.device)

    def tell(self, event: str, **values: object) -> None:
        self.pipe.send({"event": event, **values})

    def run(self) -> None:
        warnings.simplefilter("ignore")  # applying the plan in the caller repeats them
        self.tell("ready")
        try:
            sent = self.pipe.recv()
        except EOFError:
            raise
        except Exception as error:  # whatever importing the user's modules raises
            message = f"the task cannot be read in another process ({type(error).__name__}: {error})"
            self.tell("failed", kind="error", message=message, error_class="Unsendable", is_echo=False)
            self._wait_for_end()
        task = sent if self.task is None else self.task
        try:
            self._settle()
        except Exception as error:  # a device or a group that cannot be had
            self._send_failure(error)
        self.tell("received")
        while True:
            self._serve_order(self.pipe.recv(), task)

    def _settle(self) -> None:
        """Take the parent's settings, the device and the place among the ranks."""
        import torch._dynamo  # every optimizer loads it: here it counts neither as a plan's memory nor as its time

        os.environ |= dict(self.place.environment)
        with suppress(ImportError):
            # The compiler calls tqdm, whose own lock is a named semaphore. A process that is ended at once cannot release it, and its
            # parent would warn of a leak at its exit.
            from tqdm import tqdm

            tqdm.set_lock(threading.RLock())
        self.place.settings.restore()
        if self.device.type not in ("cpu", "mps"):
            torch.accelerator.set_device_index(self.device.index or 0)
        if self.place.joins_group:
            init_distributed("gloo" if self.device.type == "cpu" else None, timeout=self.place.timeout)

    def _serve_order(self, order: Order, task: TrainingTask) -> None:
        """Try one plan, and wait to be ended if the process cannot be used again."""
        for method in order.methods:
            if method.name not in method_names():
                register_method(method)
        set_seed(0)  # a model that is made again is then the same on every rank and in every trial
        meter = MemoryMeter(self.device)
        try:
            measure(order, task, self.device, self.tell, may_reset=True)
        except Exception as error:  # whatever goes wrong in the user's model or a kernel is the outcome of the trial
            self._send_failure(error)
        torch._dynamo.reset()
        self.place.settings.restore()
        clear_data_ranks()
        release_unused_memory(self.device)
        is_clean = meter.growth() <= LEFT_BYTES.get(self.device.type, LEFT_ON_HOST)
        is_clean = is_clean and all(find_method(name).leaves_no_trace for name in order.plan.opt_names())
        self.tell("done", is_clean=is_clean)
        if not is_clean:
            self._wait_for_end()

    def _send_failure(self, error: BaseException) -> NoReturn:
        kind, message = failure_of(error)
        is_echo = kind == "error" and is_lost_peer(error)
        self.tell("failed", kind=kind, message=message, error_class=type(error).__name__, is_echo=is_echo)
        self._wait_for_end()

    def _wait_for_end(self) -> NoReturn:
        while True:
            self.pipe.recv_bytes()
