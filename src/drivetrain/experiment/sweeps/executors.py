"""Where trials run: in this process one after the other, or in processes of their own with GPUs of their own."""

import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time, TimeUnit
from drivetrain.experiment.processes import END_SECONDS, ExperimentReference, leave_launched_world, reference_to
from drivetrain.experiment.records import read_run
from drivetrain.experiment.running import run_experiment
from drivetrain.experiment.sweeps.trial import (
    FAILED,
    FINISHED,
    PRUNED,
    TIMED_OUT,
    Trial,
    TrialOutcome,
    TrialPruned,
    reporting_to,
)
from drivetrain.runtime.environment import end_with_parent

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

POLL_SECONDS = 60.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)

Pruner = Callable[[Trial, float, int], bool]


@dataclass
class TrialWork:
    """What every trial of a sweep has in common."""

    experiment: "Experiment"
    fixed: dict[str, Any]
    sweep: str
    should_prune: Pruner
    timeout: float | None = None
    """Seconds after which one attempt at a trial is ended."""
    seed: int = 0
    """Seed of the sweep; a trial whose `random_seed` nobody gave has one derived from it."""

    def for_process(self) -> "TrialWork":
        """Return what travels to another process, which loads the experiment itself and reports over a channel."""
        return replace(self, experiment=None, should_prune=never_prune)  # type: ignore[arg-type]

    def call(self, trial: Trial, experiment: "Experiment | None" = None) -> Any:
        """Run a trial in this process, in its folder, and return what the experiment returns."""
        experiment = experiment or self.experiment
        resolved = experiment.resolve(self.fixed | trial.params)
        if not resolved.is_declared("random_seed"):
            from drivetrain.runtime.seeds import derive_seed

            resolved.values["random_seed"] = derive_seed(self.seed, "sweep trial", trial.index) % 2**32
            resolved.origins["random_seed"] = "sweep"
        place = {"sweep": self.sweep, "index": trial.index, "attempt": trial.attempts}
        return run_experiment(experiment, resolved, folder=trial.run_dir, trial=place)


class Executor:
    """Runs trials; `slots` of them at a time."""

    slots = 1
    ends_trials = False
    """Whether trials that reach `work.timeout` are ended."""

    def start(self, work: TrialWork) -> None:
        """Prepare for the trials of one sweep."""
        self.work = work

    def submit(self, trial: Trial) -> "Future[TrialOutcome]":
        """Begin a trial and return the future of its outcome; called when a slot is free."""
        raise NotImplementedError

    def close(self) -> None:
        """End what still runs."""


class InlineExecutor(Executor):
    """Runs each trial in this process; an interruption ends the sweep, which can be resumed."""

    def submit(self, trial: Trial) -> "Future[TrialOutcome]":
        """Run a trial and return its outcome as a future that is done."""
        future: Future[TrialOutcome] = Future()
        began = time.monotonic()
        try:
            with reporting_to(lambda value, step: self.work.should_prune(trial, value, step)):
                outcome = TrialOutcome(FINISHED, self.work.call(trial))
        except TrialPruned as pruned:
            outcome = TrialOutcome(PRUNED, error=str(pruned))
        except SystemExit as stop:
            if stop.code in STOPPED:
                raise
            outcome = TrialOutcome(FAILED, error=f"SystemExit: {stop.code}")
        except Exception as error:
            outcome = TrialOutcome(FAILED, error=f"{type(error).__name__}: {error}")
        outcome.seconds = time.monotonic() - began
        future.set_result(outcome)
        return future


class PoolExecutor(Executor):
    """Runs each trial in a new process, several at a time; with `gpus_per_trial` no two of them see the same GPU."""

    ends_trials = True

    def __init__(self, num_processes: int = 1, gpus_per_trial: int | None = None):
        if type(num_processes) is not int or num_processes < 1:
            raise ConfigError(
                f"num_processes: {num_processes!r} is not a number of processes. Give a whole number from 1 on."
            )
        self.slots = num_processes
        self._gpus_per_trial = gpus_per_trial
        self._free: list[str] = []
        if gpus_per_trial is not None:
            self._free = list(visible_gpus())
            if type(gpus_per_trial) is not int or not 1 <= gpus_per_trial <= len(self._free):
                raise ConfigError(
                    f"gpus_per_trial: {gpus_per_trial!r} GPUs per trial were asked for, and this process sees {len(self._free)} "
                    f"({VISIBLE}={os.environ.get(VISIBLE)!r}). Give a number from 1 to {max(1, len(self._free))}, or None."
                )
            self.slots = min(num_processes, len(self._free) // gpus_per_trial)
        self._processes: dict[int, Any] = {}
        self._lock = threading.Lock()

    def start(self, work: TrialWork) -> None:
        """Check that a new process will find the experiment."""
        super().start(work)
        self._reference = reference_to(work.experiment)

    def submit(self, trial: Trial) -> "Future[TrialOutcome]":
        """Start a process for a trial."""
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        share = self.work.for_process()
        process = context.Process(
            target=_run_trial, args=(self._reference, share, trial, theirs), name=f"trial {trial.index}"
        )
        with self._lock:
            gpus = [self._free.pop(0) for _ in range(self._gpus_per_trial or 0)]
        try:
            with _visible_to_child(gpus if self._gpus_per_trial else None):
                process.start()
        except BaseException:
            self._give_back(gpus)
            raise
        theirs.close()
        future: Future[TrialOutcome] = Future()
        self._processes[trial.index] = process
        watcher = threading.Thread(target=self._watch, args=(trial, process, ours, gpus, future), daemon=True)
        watcher.start()
        return future

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

    def _watch(
        self, trial: Trial, process: Any, pipe: Connection, gpus: list[str], future: "Future[TrialOutcome]"
    ) -> None:
        """Answer a trial's reports until its process has ended, then say how."""
        began = time.monotonic()
        deadline = math.inf if self.work.timeout is None else began + self.work.timeout
        try:
            while True:
                while not pipe.poll(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        raise TimeoutError
                value, step = pipe.recv()
                pipe.send(self.work.should_prune(trial, value, step))
        except (EOFError, OSError):  # a TimeoutError is one too
            pass
        try:
            process.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                end_group(process)
                outcome = timed_out(self.work.timeout)
            else:
                outcome = outcome_of(trial.run_dir, process.exitcode)
            outcome.seconds = time.monotonic() - began
            self._give_back(gpus)
            self._processes.pop(trial.index, None)
            future.set_result(outcome)
        except Exception as error:
            future.set_exception(error)
        finally:
            pipe.close()

    def _give_back(self, gpus: Sequence[str]) -> None:
        with self._lock:
            self._free.extend(gpus)


def timed_out(seconds: float | None) -> TrialOutcome:
    """Return the outcome of a trial that was ended at its time limit."""
    return TrialOutcome(TIMED_OUT, error=f"it was ended after trial_timeout={Time(seconds or 0, TimeUnit.SECOND)}")


def end_group(process: Any) -> None:
    """Ask a trial and the processes it started to end; kill those that do not.

    A trial with a time limit leads a process group of its own. One that has not come that far has started nothing.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.join(END_SECONDS)
    process.join()


def never_prune(trial: Trial, value: float, step: int) -> bool:
    """Replace the sampler where a trial runs; it is asked over a channel instead."""
    return False


def visible_gpus() -> list[str]:
    """Return the CUDA devices this process may use, by the names a child would be given, without starting CUDA."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() and name.strip() != "-1"]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


class _visible_to_child:
    """Let a process that is started within see the given GPUs only; this process's own environment is restored at once."""

    def __init__(self, gpus: Sequence[str] | None):
        self._gpus = gpus

    def __enter__(self) -> None:
        self._before = os.environ.get(VISIBLE)
        if self._gpus is not None:
            os.environ[VISIBLE] = ",".join(self._gpus)

    def __exit__(self, *error: object) -> None:
        if self._gpus is None:
            return
        if self._before is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = self._before


def _run_trial(reference: ExperimentReference, work: TrialWork, trial: Trial, pipe: Connection) -> None:
    """Be the process of one trial."""
    if work.timeout is not None and hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    leave_launched_world()
    end_with_parent(signal.SIGTERM)

    def ask(value: float, step: int) -> bool:
        pipe.send((value, step))
        return bool(pipe.recv())

    try:
        with reporting_to(ask):
            work.call(trial, reference.load())
    except TrialPruned:
        return
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def outcome_of(folder: Path | None, exit_code: int | None) -> TrialOutcome:
    """Return how a trial's process ended, by what it wrote into its run folder."""
    status: dict[str, Any] = {}
    if folder is not None and (folder / "status.json").is_file():
        status = read_run(folder).status
    if exit_code == 0 and status.get("state") == FINISHED:
        return TrialOutcome(PRUNED if status.get("pruned") else FINISHED, status.get("result"))
    if exit_code is not None and exit_code < 0:
        try:
            how = f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            how = f"killed by signal {-exit_code}"
    else:
        how = f"the process ended with exit code {exit_code}"
    return TrialOutcome(FAILED, error=str(status.get("error") or how))
