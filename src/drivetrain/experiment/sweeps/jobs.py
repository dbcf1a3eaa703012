"""Trials as jobs of a cluster: what travels to the process that runs one, and how the sweep follows it from afar.

A job may start minutes later on another machine, so the two sides share nothing but a file system: the run folder says how a
trial ended, and a mailbox of two files carries its reports and the answer to them. No result is ever unpickled.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.files import PRIVATE_FILE, load_json, open_regular, open_to_read
from drivetrain.core.types import Settings
from drivetrain.experiment.processes import ExperimentReference, leave_launched_world, reference_to
from drivetrain.experiment.run_folder import STATUS, read_json
from drivetrain.experiment.sweeps.executors import TrialWork, outcome_of, timed_out
from drivetrain.experiment.sweeps.trial import Trial, TrialOutcome, TrialPruned, reporting_to

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment

JOBS = "jobs"
"""The folder of a sweep in which its executor keeps notes about jobs."""

POLL_SECONDS = 0.2
SHARED_DISK_SECONDS = 10.0
"""How long the last words of a job on another machine may take to become visible here."""

SCRIPT = "drivetrain_script"
"""What a script is called where it is loaded again; not `__main__`, so that its main part does not run."""


@dataclass(frozen=True)
class Mailbox:
    """Reports of one trial, a line each, and a file that appears when the trial should stop."""

    reports: Path
    stop: Path

    @classmethod
    def of(cls, trial: Trial) -> "Mailbox":
        """Return the mailbox of a trial, in its sweep's folder."""
        return cls(job_note(trial, "reports.jsonl"), job_note(trial, "stop"))

    def clear(self) -> None:
        """Remove what an earlier attempt left."""
        self.reports.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.reports, self.stop):
            path.unlink(missing_ok=True)

    def say(self, **fields: object) -> None:
        """Append one line."""
        descriptor = open_regular(self.reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        with os.fdopen(descriptor, "ab") as stream:
            stream.write(json.dumps(fields).encode() + b"\n")

    def ask(self, value: float, step: int) -> bool:
        """Report, and return whether the sweep has decided to stop the trial."""
        self.say(value=value, step=step)
        return self.stop.exists()

    def read(self, position: int) -> tuple[list[Settings], int]:
        """Return the whole lines from a position on, and the position behind them."""
        try:
            with open_to_read(self.reports) as stream:
                stream.seek(position)
                text = stream.read()
        except FileNotFoundError:
            return [], position
        whole = text[: text.rfind(b"\n") + 1]
        letters = []
        for line in whole.splitlines():
            with suppress(ValueError):
                letter = load_json(line)
                if isinstance(letter, dict):
                    is_report = type(letter.get("value")) in (int, float) and type(letter.get("step")) is int
                    letters += [letter] if is_report or "began" in letter else []  # else no trial of ours wrote it
        return letters, position + len(whole)


def job_note(trial: Trial, kind: str) -> Path:
    """Return the path of a small file about the job of a trial."""
    assert trial.run_dir is not None
    return trial.run_dir.parent / JOBS / f"{trial.run_dir.name}.{kind}"


@dataclass(frozen=True)
class TrialJob:
    """One trial as a call without arguments that any process of the same installation can make."""

    reference: ExperimentReference
    work: TrialWork
    trial: Trial
    mailbox: Mailbox
    search_path: tuple[str, ...]
    """Where the sweep's process finds modules: a script next to others is found from elsewhere too."""

    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables to set, or with None to remove, before the experiment is loaded."""

    def __call__(self) -> None:
        """Run the trial; the run folder keeps what comes of it."""
        for name, value in self.environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        leave_launched_world()
        sys.path.extend(entry for entry in self.search_path if entry not in sys.path)
        self.mailbox.say(began=True)
        with reporting_to(self.mailbox.ask), suppress(TrialPruned):
            self.work.call(self.trial, self.reference.load())


def make_job(
    work: TrialWork, reference: ExperimentReference, trial: Trial, environment: Mapping[str, str | None] | None = None
) -> TrialJob:
    """Return a trial as a job, with an empty mailbox."""
    mailbox = Mailbox.of(trial)
    mailbox.clear()
    search_path = tuple(os.path.abspath(entry) for entry in sys.path)
    return TrialJob(reference, work.for_process(), trial, mailbox, search_path, dict(environment or {}))


def importable_reference(experiment: "Experiment") -> ExperimentReference:
    """Return how a process finds the experiment that is no child of this one, and so has another `__main__`."""
    reference = reference_to(experiment)
    if reference.module != "__main__":
        return reference
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return ExperimentReference(spec.name, None, reference.attribute)
    return ExperimentReference(SCRIPT, str(Path(str(main.__file__)).resolve()), reference.attribute)


def state_of(trial: Trial) -> str | None:
    """Return the state in a trial's run folder, None before there is one."""
    assert trial.run_dir is not None
    return read_json(trial.run_dir / STATUS).get("state")


@dataclass
class _Followed:
    trial: Trial
    ended: Callable[[], str | None]
    cancel: Callable[[], object]
    future: "Future[TrialOutcome]" = field(default_factory=Future)
    position: int = 0
    began: float | None = None
    over: float | None = None


class JobWatch:
    """Looks after all jobs of a sweep in one thread: reads their reports, and makes outcomes of their ends."""

    def __init__(self, work: TrialWork, *, patience: float = 0.0):
        """`patience`: seconds to wait for a run folder that does not yet record how its job ended."""
        self._work, self._patience = work, patience
        self._followed: list[_Followed] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drivetrain-job-watch", daemon=True)
        self._thread.start()

    def follow(
        self, trial: Trial, ended: Callable[[], str | None], cancel: Callable[[], object] = lambda: None
    ) -> "Future[TrialOutcome]":
        """Return the future of a job.

        `ended` returns how it ended, or None while it waits or runs; `cancel` ends it when it has run for `work.timeout`.
        """
        followed = _Followed(trial, ended, cancel)
        with self._lock:
            self._followed.append(followed)
        return followed.future

    def close(self) -> None:
        """Follow no job any longer."""
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            with self._lock:
                current = list(self._followed)
            for followed in current:
                try:
                    outcome = self._look(followed)
                except Exception as error:
                    followed.future.set_exception(error)
                else:
                    if outcome is None:
                        continue
                    followed.future.set_result(outcome)
                with self._lock:
                    self._followed.remove(followed)

    def _look(self, followed: _Followed) -> TrialOutcome | None:
        trial = followed.trial
        how = followed.ended()  # before the mailbox is read, so that no last report is missed
        self._answer(followed)
        now, limit = time.monotonic(), self._work.timeout
        if how is None:
            followed.over = None
            if limit is None or followed.began is None or now - followed.began <= limit:
                return None
            followed.cancel()
            outcome = timed_out(limit)
            outcome.seconds = now - followed.began
            return outcome
        followed.over = followed.over or now
        if state_of(trial) in (None, "running") and now - followed.over < self._patience:
            return None
        outcome = outcome_of(trial.run_dir, how)
        outcome.seconds = followed.over - (followed.began or followed.over)
        return outcome

    def _answer(self, followed: _Followed) -> None:
        mailbox = Mailbox.of(followed.trial)
        letters, followed.position = mailbox.read(followed.position)
        for letter in letters:
            if "began" in letter:
                followed.began = followed.began or time.monotonic()
            elif self._work.should_prune(followed.trial, letter["value"], letter["step"]):
                mailbox.stop.touch()
