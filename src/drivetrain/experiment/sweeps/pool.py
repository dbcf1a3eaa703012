"""Trials in processes of their own, several at a time, with GPUs of their own.

A trial needs torch and this library, which take seconds to import. On Linux a server process imports them once, does nothing else (no
threads, no CUDA), and is forked for every trial. Each trial still loads the program itself, as a new interpreter would. Elsewhere a
new interpreter is started. What trials print comes out line by line, after the number of the trial.
"""

import io
import itertools
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import context, reduction, spawn, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from drivetrain.core.arguments import check_count
from drivetrain.core.errors import ConfigError
from drivetrain.experiment.processes import END_SECONDS, ExperimentReference, leave_launched_world, reference_to
from drivetrain.experiment.sweeps.executors import VISIBLE, Executor, TrialWork, outcome_of, timed_out, visible_gpus
from drivetrain.experiment.sweeps.trial import Trial, TrialOutcome, TrialPruned, reporting_to
from drivetrain.runtime.environment import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.forkserver import ForkServer

logger = logging.getLogger("drivetrain")

PRELOADED = ("numpy", "numpy.random", "torch", "torch.utils.data", "yaml", __name__)
"""What every trial needs. Modules of this library that the sweep's process has loaded are added."""
CAN_PRELOAD = sys.platform == "linux"
POLL_SECONDS = 60.0
PIECE = 65536


class PoolExecutor(Executor):
    """Runs each trial in a process of its own; with `gpus_per_trial` no two of them see the same GPU.

    `preload` names further modules that are imported once for all trials; importing them must start no threads and not touch CUDA.
    """

    ends_trials = True

    def __init__(self, num_processes: int = 1, gpus_per_trial: int | None = None, *, preload: Sequence[str] = ()):
        check_count("num_processes", num_processes)
        if sys.platform == "win32":
            raise ConfigError(
                "executor='pool' starts processes on Linux and macOS only. On Windows use executor='inline', one trial at a time, "
                "or WSL, the Linux within Windows."
            )
        if isinstance(preload, str) or not all(isinstance(name, str) for name in preload):
            raise ConfigError(f"preload: {preload!r} is not a list of module names, such as ['transformers'].")
        self.slots = num_processes
        self._preload = tuple(preload)
        self._gpus_per_trial = gpus_per_trial
        self._free: list[str] = []
        if gpus_per_trial is not None:
            self._free = list(visible_gpus())
            if type(gpus_per_trial) is not int or not 1 <= gpus_per_trial <= len(self._free):
                raise ConfigError(
                    f"gpus_per_trial: {gpus_per_trial!r} GPUs per trial were requested, but this process sees {len(self._free)} "
                    f"({VISIBLE}={os.environ.get(VISIBLE)!r}). Give a number from 1 to {max(1, len(self._free))}, or None."
                )
            self.slots = min(num_processes, len(self._free) // gpus_per_trial)
        self._processes: dict[int, BaseProcess] = {}
        self._starter: ProcessStarter | None = None
        self._lock = threading.Lock()

    def start(self, work: TrialWork) -> None:
        """Check that a new process will find the experiment, and begin to load what trials need."""
        super().start(work)
        self._reference = reference_to(work.experiment)
        self._starter = ProcessStarter(self._preload)

    def submit(self, trial: Trial) -> "Future[TrialOutcome]":
        """Start a process for a trial."""
        assert self._starter is not None
        ours, theirs = multiprocessing.Pipe()
        outputs = {name: multiprocessing.Pipe(duplex=False) for name in ("stdout", "stderr")}
        with self._lock:
            gpus = [self._free.pop(0) for _ in range(self._gpus_per_trial or 0)]
        stdout, stderr = (ends[1] for ends in outputs.values())
        visible = ",".join(gpus) or None
        share = TrialShare(self._reference, self.work.for_process(), trial, theirs, stdout, stderr, visible)
        try:
            process = self._starter.start(share)
        except BaseException:
            self._give_back(gpus)
            raise
        finally:
            for end in (theirs, stdout, stderr):
                end.close()
        self._processes[trial.index] = process
        printed = {ends[0]: PrefixedLines(trial.index, name) for name, ends in outputs.items()}
        started = StartedTrial(trial, process, ours, printed, gpus, Future())
        threading.Thread(target=self._watch, args=(started,), daemon=True).start()
        return started.future

    def close(self) -> None:
        """Ask the processes that still run to end, and kill those that do not."""
        for process in list(self._processes.values()):
            if process.is_alive():
                process.terminate()
        for process in list(self._processes.values()):
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        if self._starter is not None:
            self._starter.close()

    def _watch(self, started: "StartedTrial") -> None:
        """Answer a trial's reports and print its lines until its process has ended, then give its outcome."""
        trial, process, reports, printed, gpus, future = started
        began = time.monotonic()
        deadline = math.inf if self.work.timeout is None else began + self.work.timeout
        try:
            is_late = self._follow(started, deadline)
            if is_late:
                end_group(process)
            process.join()
            outcome = timed_out(self.work.timeout) if is_late else _outcome(trial, process.exitcode)
            outcome.seconds = time.monotonic() - began
            self._give_back(gpus)
            self._processes.pop(trial.index, None)
            for end, lines in printed.items():
                lines.finish(end)
            future.set_result(outcome)
        except Exception as error:
            future.set_exception(error)
        finally:
            for end in (reports, *printed):
                end.close()

    def _follow(self, started: "StartedTrial", deadline: float) -> bool:
        """Serve a trial until its process ends; True if it was still running at the deadline."""
        trial, process, reports, printed, *_ = started
        open_ends: list[Connection] = [reports, *printed]
        while time.monotonic() < deadline:
            seconds = min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            ready = wait([*open_ends, process.sentinel], seconds)
            for end in open_ends[:]:
                if end not in ready:
                    continue
                try:
                    if end is reports:
                        value, step = reports.recv()
                        reports.send(self.work.should_prune(trial, value, step))
                    elif not printed[end].take(end):
                        open_ends.remove(end)
                except (EOFError, OSError):
                    open_ends.remove(end)
            if process.sentinel in ready:
                return False
        return process.is_alive()

    def _give_back(self, gpus: Sequence[str]) -> None:
        with self._lock:
            self._free.extend(gpus)


def _outcome(trial: Trial, exit_code: int | None) -> TrialOutcome:
    how = f"the process ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        names = {entry.value: entry.name for entry in signal.Signals}
        how = f"killed by {names.get(-exit_code, f'signal {-exit_code}')}"
    return outcome_of(trial.run_dir, how, is_good=exit_code == 0)


class PrefixedLines:
    """Prints what one trial writes to stdout or stderr, a whole line at a time; of a progress bar its last state."""

    def __init__(self, index: int, name: str):
        self._prefix, self._name, self._rest = f"trial {index} | ", name, b""

    def take(self, source: Connection) -> bool:
        """Print the lines that have come; False at the end of the stream."""
        piece = os.read(source.fileno(), PIECE)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._print(lines)
        return bool(piece)

    def finish(self, source: Connection) -> None:
        """Print what is left when the process has ended; others that it started may still hold the stream."""
        os.set_blocking(source.fileno(), False)
        with suppress(OSError):  # nothing there, or closed
            while self.take(source):
                pass
        self._print([self._rest] if self._rest else [])

    def _print(self, lines: Iterable[bytes]) -> None:
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]
        stream: TextIO | None = getattr(sys, self._name)
        if not texts or stream is None:
            return
        text = "".join(f"{self._prefix}{text}\n" for text in texts)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        with suppress(OSError, ValueError):  # an output that is closed must not end a trial
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()


class StartedTrial(NamedTuple):
    """A trial with its process, what this process reads from it, and what it was given."""

    trial: Trial
    process: BaseProcess
    reports: Connection
    printed: dict[Connection, PrefixedLines]
    gpus: list[str]
    future: "Future[TrialOutcome]"


@dataclass
class TrialShare:
    """What travels to the process of one trial."""

    reference: ExperimentReference
    work: TrialWork
    trial: Trial
    reports: Connection
    stdout: Connection
    stderr: Connection
    gpus: str | None
    """What `CUDA_VISIBLE_DEVICES` is to be; None: as it is."""


def run_trial(share: TrialShare) -> None:
    """Be the process of one trial."""
    if share.work.timeout is not None and hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    for descriptor, (stream, end) in enumerate([(sys.stdout, share.stdout), (sys.stderr, share.stderr)], start=1):
        os.dup2(end.fileno(), descriptor)
        end.close()
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    if share.gpus is not None:
        os.environ[VISIBLE] = share.gpus
    leave_launched_world()
    end_with_parent(signal.SIGTERM)

    def ask(value: float, step: int) -> bool:
        share.reports.send((value, step))
        return bool(share.reports.recv())

    try:
        with reporting_to(ask):
            share.work.call(share.trial, share.reference.load())
    except TrialPruned:
        return
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def end_group(process: BaseProcess) -> None:
    """Ask a trial and the processes it started to end; kill those that do not.

    A trial with a time limit leads a process group of its own. One that has not come that far has started nothing.
    """
    assert process.pid is not None
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.join(END_SECONDS)
    process.join()


# ---------------------------------------------------------------------- processes that have everything loaded


class ProcessStarter:
    """Starts the processes of one sweep: forked from a server of its own that has loaded what they need, or new interpreters.

    The server has the environment of the moment the sweep began, and ends with it.
    """

    def __init__(self, preload: Sequence[str] = ()):
        self._key = next(_keys)
        if CAN_PRELOAD:
            from multiprocessing.forkserver import ForkServer

            own = [name for name in sys.modules if name.startswith("drivetrain.") and "compat" not in name]
            server = ForkServer()
            server.set_forkserver_preload([*PRELOADED, *own, *preload])
            _servers[self._key] = server
            server.ensure_running()

    def start(self, share: TrialShare) -> BaseProcess:
        """Start the process of a trial."""
        if self._key in _servers:
            served = ServedProcess(self._key, share)
            try:
                served.start()
                return served
            except (EOFError, OSError):  # the server has ended: a module that it loads failed, or it was killed
                logger.warning("the process that loads modules for all trials has ended; each trial now loads its own.")
                self.close()
        name = f"trial {share.trial.index}"
        process = multiprocessing.get_context("spawn").Process(target=run_trial, args=(share,), name=name)
        process.start()
        return process

    def close(self) -> None:
        """End the server; by a signal, because what trials have left running would keep it alive."""
        server: Any = _servers.pop(self._key, None)  # what follows has no public name
        if server is not None and server._forkserver_pid is not None:
            with suppress(ProcessLookupError, ChildProcessError):  # it has ended by itself
                os.kill(server._forkserver_pid, signal.SIGKILL)
                server._stop()


_keys = itertools.count()
_servers: "dict[int, ForkServer]" = {}


if sys.platform != "win32":
    from multiprocessing import forkserver, popen_forkserver

    class ServedProcess(context.ForkServerProcess):
        """A process of `multiprocessing` that is forked from a server of our own, not from the one that a program may use."""

        def __init__(self, key: int, share: TrialShare):
            super().__init__(target=run_trial, args=(share,), name=f"trial {share.trial.index}")
            self.key = key

        @staticmethod
        def _Popen(process_obj: BaseProcess) -> popen_forkserver.Popen:
            return _ServedPopen(process_obj)

    class _ServedPopen(popen_forkserver.Popen):
        _fds: list[int]

        def _launch(self, process_obj: ServedProcess) -> None:
            data = io.BytesIO()
            context.set_spawning_popen(self)
            try:
                reduction.dump(spawn.get_preparation_data(process_obj.name), data)
                reduction.dump(process_obj, data)
            finally:
                context.set_spawning_popen(None)
            self.sentinel, sink = _servers[process_obj.key].connect_to_new_process(self._fds)
            kept = os.dup(sink)  # the process sees by its end that this one is gone
            self.finalizer = util.Finalize(self, _close, (kept, self.sentinel))
            with open(sink, "wb") as stream:
                stream.write(data.getbuffer())
            self.pid = forkserver.read_signed(self.sentinel)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
