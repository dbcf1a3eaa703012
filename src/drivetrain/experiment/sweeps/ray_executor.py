"""Trials as tasks of Ray (Moritz et al., 2018), on a cluster or on a Ray of this machine that lives as long as the sweep."""

import logging
import math
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.errors import ConfigError, MissingExtra
from drivetrain.core.types import Settings
from drivetrain.experiment.processes import END_SECONDS
from drivetrain.experiment.sweeps.executors import Executor, TrialWork
from drivetrain.experiment.sweeps.jobs import SHARED_DISK_SECONDS, JobWatch, TrialJob, make_job, reference_from_afar
from drivetrain.experiment.sweeps.trial import Trial, TrialOutcome

logger = logging.getLogger("drivetrain")


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The resources of each trial, and which Ray to use."""

    num_processes: int | None = None
    """Number of parallel trials; None: as many as the nodes can run when the sweep starts."""

    address: str | None = None
    """A cluster to join. None: the one this process has joined, `RAY_ADDRESS`, or a Ray that is started here."""

    num_cpus: int | None = None
    """CPUs of a Ray that is started here; None: all."""

    cpus_per_trial: float = 1
    """CPUs that Ray reserves for each trial."""

    gpus_per_trial: int | None = None
    """GPUs reserved for each trial; None requests none."""

    resources: Mapping[str, float] = field(default_factory=dict)
    """Further resources of a trial, by the names that the nodes were started with."""

    runtime_env: Mapping[str, object] = field(default_factory=dict)
    """Ray's runtime environment of the trials: environment variables, packages, a folder to send."""

    def __post_init__(self) -> None:
        for name in ("num_processes", "num_cpus", "gpus_per_trial"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(
                    f"RayConfig.{name}: {value!r} is not a whole number of at least 1. Give one, or None."
                )
        if type(self.cpus_per_trial) not in (int, float) or not 0 <= self.cpus_per_trial < math.inf:
            raise ConfigError(f"RayConfig.cpus_per_trial: {self.cpus_per_trial!r} is not a number of at least 0.")
        if self.address is not None and self.num_cpus is not None:
            raise ConfigError(
                f"RayConfig.num_cpus: {self.num_cpus} is for a Ray that is started here, but address={self.address!r} names "
                "one that is already running. Remove one of them."
            )

    @property
    def needs(self) -> dict[str, float]:
        """What a node must have for one trial."""
        wanted = {"CPU": float(self.cpus_per_trial), "GPU": float(self.gpus_per_trial or 0), **self.resources}
        return {name: amount for name, amount in wanted.items() if amount}


class RayExecutor(Executor):
    """Runs each trial in a new worker of Ray, which gives every GPU to one trial at a time."""

    ends_trials = True

    def __init__(self, config: RayConfig | None = None):
        self.config = config or RayConfig()
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("ray", "ray", "executor 'ray'") from error
        self._ray: Any = ray
        self._tasks: dict[int, Any] = {}
        self._watch: JobWatch | None = None
        self._joined_here = False

    def start(self, work: TrialWork) -> None:
        """Join Ray, or start it, and see how many trials it holds."""
        super().start(work)
        self._reference = reference_from_afar(work.experiment)
        self._join()
        self.slots = self._count_slots()
        options: Settings = {
            "num_cpus": self.config.cpus_per_trial,
            "num_gpus": self.config.gpus_per_trial or 0,
            "max_retries": 0,  # the sweep retries, and writes it down
            "max_calls": 1,  # no trial inherits a worker's memory or CUDA state
        }
        if self.config.resources:
            options["resources"] = dict(self.config.resources)
        if self.config.runtime_env:
            options["runtime_env"] = dict(self.config.runtime_env)
        self._remote = self._ray.remote(**options)(_run)
        several = len(self._nodes()) > 1
        self._watch = JobWatch(work, patience=SHARED_DISK_SECONDS if several else 0.0)

    def submit(self, trial: Trial) -> "Future[TrialOutcome]":
        """Submit a trial to Ray."""
        assert self._watch is not None
        job = make_job(self.work, self._reference, trial)
        self._tasks[trial.index] = self._remote.options(name=f"trial {trial.index}").remote(job)
        return self._watch.follow(
            trial, lambda: self._ended(trial), lambda: self._ray.cancel(self._tasks[trial.index], force=True)
        )

    def close(self) -> None:
        """Interrupt the trials that still run, kill those that go on, and end the Ray that was started here."""
        if self._watch is not None:
            self._watch.close()
        tasks = list(self._tasks.values())
        for force in (False, True):
            for task in tasks:
                self._ray.cancel(task, force=force)
            if tasks:
                _, tasks = self._ray.wait(tasks, num_returns=len(tasks), timeout=END_SECONDS)
        self._tasks.clear()
        if self._joined_here:
            self._leave()

    def _ended(self, trial: Trial) -> str | None:
        """Return how the task of a trial ended; None while it runs."""
        task = self._tasks[trial.index]
        if not self._ray.wait([task], timeout=0)[0]:
            return None
        try:
            self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return "the task ended before the trial did"

    def _join(self) -> None:
        self._can_grow = True
        if self._ray.is_initialized():
            for name in ("address", "num_cpus"):
                if getattr(self.config, name) is not None:
                    logger.warning("RayConfig.%s has no effect: this process is already connected to Ray.", name)
            return
        options: Settings = {"address": self.config.address, "logging_level": "warning"}
        if self.config.address is None and "RAY_ADDRESS" not in os.environ:
            self._can_grow = False
            options |= {"num_cpus": self.config.num_cpus, "include_dashboard": False}
        self._handler = signal.getsignal(signal.SIGTERM)  # Ray takes SIGTERM for itself, and does not give it back
        self._joined_here = True
        self._ray.init(**options)

    def _leave(self) -> None:
        self._ray.shutdown()
        self._joined_here = False
        if threading.current_thread() is threading.main_thread() and self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _count_slots(self) -> int:
        """Return how many trials run at a time; a trial that no node can hold would wait for ever."""
        needs, nodes = self.config.needs, self._nodes()
        room = sum(int(min((node.get(name, 0) / needs[name] for name in needs), default=1)) for node in nodes)
        if room == 0:
            have = "; ".join(str({name: node.get(name, 0) for name in needs}) for node in nodes)
            lack = f"a trial needs {needs}, but no Ray node has that much (available: {have})."
            if self.config.num_processes is None or not self._can_grow:
                raise ConfigError(
                    f"{lack} Request less per trial; for an autoscaling cluster set num_processes, the number of parallel trials."
                )
            logger.warning("%s Trials wait until such a node joins.", lack)
        return self.config.num_processes or room


def _run(job: TrialJob) -> None:
    """Be the task of one trial."""
    job()
