"""What runs trials has in common, and the executor that runs them in this process, one after the other."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.plain import error_text
from drivetrain.core.time import Time, TimeUnit
from drivetrain.core.types import Settings
from drivetrain.experiment.parameters import own_containers
from drivetrain.experiment.processes import STOP_STATUSES
from drivetrain.experiment.resolve import Resolved, full_names
from drivetrain.experiment.run_folder import STATUS, read_json
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

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

VISIBLE = "CUDA_VISIBLE_DEVICES"

Pruner = Callable[[Trial, float, int], bool]


def never_prune(trial: Trial, value: float, step: int) -> bool:
    """Replace the sampler where a trial runs; reports go over a channel instead."""
    return False


@dataclass
class TrialWork:
    """What every trial of a sweep has in common."""

    experiment: "Experiment"
    fixed: Settings
    sweep: str
    should_prune: Pruner = never_prune
    timeout: float | None = None
    """Seconds after which one attempt at a trial is ended."""
    seed: int = 0
    """Seed of the sweep; a trial without a `random_seed` derives one from it."""

    def for_process(self) -> "TrialWork":
        """Return what travels to another process, which loads the experiment itself and reports over a channel."""
        return replace(self, experiment=None, should_prune=never_prune)  # type: ignore[arg-type]

    def resolve(self, trial: Trial, experiment: "Experiment") -> Resolved:
        """Return the parameters of a trial: its own, and those that all trials have, within a group of parameters too."""
        fixed, own = (full_names(values, experiment.parameters) for values in (self.fixed, trial.params))
        return experiment.resolve(own_containers(fixed | own))

    def call(self, trial: Trial, experiment: "Experiment | None" = None) -> Any:
        """Run a trial in this process, in its folder, and return what the experiment returns."""
        experiment = experiment or self.experiment
        resolved = self.resolve(trial, experiment)
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
            if stop.code in STOP_STATUSES:
                raise
            outcome = TrialOutcome(FAILED, error=f"SystemExit: {stop.code}")
        except Exception as error:
            outcome = TrialOutcome(FAILED, error=error_text(error))
        outcome.seconds = time.monotonic() - began
        future.set_result(outcome)
        return future


def timed_out(seconds: float | None) -> TrialOutcome:
    """Return the outcome of a trial that was ended at its time limit."""
    return TrialOutcome(TIMED_OUT, error=f"stopped after trial_timeout={Time(seconds or 0, TimeUnit.SECOND)}")


def visible_gpus() -> list[str]:
    """Return the CUDA devices this process may use, by the names a child would be given, without starting CUDA."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() and name.strip() != "-1"]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def outcome_of(folder: Path | None, how: str, *, is_good: bool = True) -> TrialOutcome:
    """Return the outcome of a trial whose process has ended, by what it wrote into its run folder, else `how` it ended."""
    status = {} if folder is None else read_json(folder / STATUS)
    if is_good and status.get("state") == FINISHED:
        return TrialOutcome(PRUNED if status.get("pruned") else FINISHED, status.get("result"))
    return TrialOutcome(FAILED, error=str(status.get("error") or how))
