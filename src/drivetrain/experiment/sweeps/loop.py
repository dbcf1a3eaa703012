"""The loop of a sweep: samplers propose, executors run, the journal remembers."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivetrain.core.errors import ParameterError, nearest_name
from drivetrain.core.files import is_regular, load_json, read_limited
from drivetrain.core.locking import is_locked
from drivetrain.core.plain import is_number, plain
from drivetrain.core.secret import hide
from drivetrain.experiment.run_folder import METRICS
from drivetrain.experiment.sweeps.executors import Executor, TrialWork
from drivetrain.experiment.sweeps.result import Goal, SweepResult
from drivetrain.experiment.sweeps.samplers import Sampler
from drivetrain.experiment.sweeps.trial import (
    ASKED,
    FAILED,
    FINISHED,
    RUNNING,
    Journal,
    Trial,
    TrialOutcome,
    without_secrets,
)

logger = logging.getLogger("drivetrain")

ORPHAN_SECONDS = 45.0
"""How long a resumed sweep waits for a trial that outlived the process that had started it."""

OnChange = Callable[[SweepResult], object]
"""Gets the result so far whenever a trial begins or ends."""


@dataclass(eq=False)
class SweepLoop:
    """One sweep at work."""

    work: TrialWork
    sampler: Sampler
    executor: Executor
    goal: Goal
    folder: Path
    trials: dict[int, Trial]
    """By index; those of an earlier part of the sweep at the start."""
    retries: int
    on_change: OnChange | None
    waiting: deque[Trial] = field(default_factory=deque)
    running: "dict[Future[TrialOutcome], Trial]" = field(default_factory=dict)
    _has_warned: bool = False

    def __post_init__(self) -> None:
        self.work = replace(self.work, should_prune=self._report)

    def run(self, header: Mapping[str, object] | None) -> SweepResult:
        """Run until nothing is left to do; `header` begins the journal of a new sweep."""
        self.journal = Journal(self.folder)
        try:
            if header is not None:
                self.journal.write("sweep", **header)
            begin = getattr(self.sampler, "begin", None)  # a sampler of the user's need not derive from ours
            if begin is not None:
                begin(self.folder.name)
            self.executor.start(self.work)
            for trial in self.trials.values():  # of an earlier part of the sweep: what was begun runs first
                self.sampler.replay(trial)
                if trial.status in (ASKED, RUNNING) or (trial.status == FAILED and trial.attempts <= self.retries):
                    trial.wait()
                    self.waiting.append(trial)
                    _wait_for_orphan(trial)
            while self._fill() or self.running:
                done, _ = wait(self.running, return_when=FIRST_COMPLETED)
                for future in done:
                    self._settle(self.running.pop(future), future.result())
        finally:
            self.executor.close()
            self.journal.close()
        return self._result()

    def _fill(self) -> bool:
        """Start trials while there are free slots; False when none was left to start and none runs."""
        while len(self.running) < self.executor.slots:
            trial = self.waiting.popleft() if self.waiting else self.sampler.ask()
            if trial is None:
                break
            secrets = self.work.experiment.parameters.secrets
            if trial.index not in self.trials:
                self.trials[trial.index] = trial
                params = without_secrets(trial.params, secrets)
                self.journal.write(ASKED, index=trial.index, params=params)
            trial.begin(self.folder, secrets)
            self.journal.write("started", index=trial.index, attempts=trial.attempts, run_dir=trial.run_dir)
            self._changed()
            self.running[self.executor.submit(trial)] = trial
        return bool(self.running)

    def _settle(self, trial: Trial, outcome: TrialOutcome) -> None:
        metrics: dict[str, float] = {}
        if outcome.status == FINISHED:
            assert trial.run_dir is not None
            metrics = _numbers(outcome.result) | _summary(trial.run_dir / METRICS)
        error, experiment = outcome.error, self.work.experiment
        if error is not None and experiment.parameters.secrets:
            with suppress(ParameterError):  # the trial failed because of it, before it could hold a secret
                error = hide(error, self.work.resolve(trial, experiment).hidden())
        trial.settle(outcome.status, error, outcome.seconds, metrics)
        if outcome.status == FINISHED:
            trial.judge(self.goal.names, plain(outcome.result))
            if not self.goal.names and trial.value is None and trial.metrics and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "trial %d has no value to compare trials by: it returned %s. Choose one with objective='...' "
                    "(--objective on the command line), or return a number.",
                    trial.index,
                    ", ".join(trial.metrics),
                )
        self.journal.settle(trial)
        missing = next((name for name in self.goal.names if name not in trial.metrics), None)
        if (
            outcome.status == FINISHED
            and missing is not None
            and not any(one.objectives for one in self.trials.values())
        ):
            near = nearest_name(missing, trial.metrics)
            if near is not None:  # every other trial would fail as this one did
                raise ParameterError(f"{trial.error} Did you mean objective={near!r} (--objective {near})?")
        if trial.status == FAILED and trial.attempts <= self.retries:
            logger.warning("trial %d failed and is retried: %s", trial.index, trial.error)
            self.waiting.append(trial)
        else:
            self.sampler.tell(trial)
        self._changed()

    def _report(self, trial: Trial, value: float, step: int) -> bool:
        """Take a report of a running trial, and return whether to stop the trial."""
        trial.report(value, step)
        prune = getattr(self.sampler, "should_prune", None)
        return prune is not None and bool(prune(trial, value, step))

    def _result(self) -> SweepResult:
        return SweepResult(
            [self.trials[index] for index in sorted(self.trials)],
            goal=self.goal,
            folder=self.folder,
            secrets=self.work.experiment.parameters.secrets,
            total=getattr(self.sampler, "total", None),
            slots=self.executor.slots,
        )

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self._result())


def _wait_for_orphan(trial: Trial) -> None:
    """Let a trial end whose sweep was killed: its process notices, saves, and frees its lock."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while trial.run_dir is not None and is_locked(trial.run_dir) and time.monotonic() < deadline:
        time.sleep(0.2)


def _numbers(result: object) -> dict[str, float]:
    found = plain(result) if isinstance(result, Mapping) else {}
    return {name: value for name, value in found.items() if is_number(value)}


def _summary(metrics: Path) -> dict[str, float]:
    """Return the Recorder's summary of a run: lines of kind `summary` with a tag and a value, or a dict of values."""
    found: dict[str, float] = {}
    if is_regular(metrics):
        for line in read_limited(metrics, None).splitlines():
            with suppress(ValueError):
                entry = load_json(line) if b'"summary"' in line else None
                if isinstance(entry, dict) and entry.get("kind") == "summary":
                    value = entry.get("value")
                    found |= _numbers(value if isinstance(value, Mapping) else {str(entry.get("tag")): value})
    return found
