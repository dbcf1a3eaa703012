"""Trials as jobs of a cluster: SLURM's, submitted with submitit, and tasks of Ray (Moritz et al., 2018).

A job that SLURM stops (time limit, preemption) is warned first: the trial saves, ends, and is submitted again from its
checkpoint, which is no failure and costs no retry. Jobs outlive a sweep that is killed; the resumed sweep finds them again.
submitit's local executor tries the same out on one machine. A Ray that is started here ends with the sweep.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from drivetrain.core.arguments import check_count, check_number
from drivetrain.core.errors import ConfigError, first_line, needs_package, unknown_name
from drivetrain.core.files import read_limited, replace_bytes
from drivetrain.core.types import Settings
from drivetrain.experiment.processes import END_SECONDS
from drivetrain.experiment.sweeps.executors import VISIBLE, Executor, TrialWork
from drivetrain.experiment.sweeps.jobs import (
    POLL_SECONDS,
    SHARED_DISK_SECONDS,
    JobWatch,
    TrialJob,
    importable_reference,
    job_note,
    make_job,
    state_of,
)
from drivetrain.experiment.sweeps.trial import Trial, TrialOutcome

logger = logging.getLogger("drivetrain")

CLUSTERS = ("slurm", "local")


@dataclass(frozen=True, kw_only=True)
class SubmititConfig:
    """The resources of each trial on the cluster, and how many are submitted at a time."""

    num_processes: int = 8
    """Number of trials that are queued or running at once."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local` runs the jobs on this machine, for testing. For real work on one machine use the pool."""
    folder: str | Path | None = None
    """Where submitit writes scripts and output, on a disk that all nodes see. None: `submitit` in the sweep's folder."""
    timeout_minutes: int = 60
    """Time limit of one job; a trial may need several."""
    warning_seconds: int = 90
    """How long before its time limit a job gets a signal, so that the trial can save."""
    requeues: int = 3
    """How many times to resubmit a trial that was stopped after saving a checkpoint. These do not count as failures."""
    gpus_per_trial: int | None = None
    """GPUs for each job (SLURM's gres); None requests none."""
    cpus_per_trial: int | None = None
    """CPUs for each job; None: the cluster's default."""
    memory_gigabytes: float | None = None
    """Memory for each job; None: the cluster's default."""
    partition: str | None = None
    """SLURM's partition; None: the cluster's default."""
    slurm: Mapping[str, object] = field(default_factory=dict)
    """Further settings of submitit's SLURM executor by name: account, qos, gres, constraint, setup and so on."""

    def __post_init__(self) -> None:
        if self.cluster not in CLUSTERS:
            raise ConfigError(unknown_name("cluster", self.cluster, CLUSTERS, where="SubmititConfig"))
        for name in ("num_processes", "timeout_minutes", "warning_seconds", "requeues"):
            least = 1 if name in ("num_processes", "timeout_minutes") else 0
            check_count(name, getattr(self, name), at_least=least, owner="SubmititConfig")
        for name in ("gpus_per_trial", "cpus_per_trial"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), owner="SubmititConfig")
        for name in ("gpus_per_trial", "cpus_per_trial", "memory_gigabytes", "partition", "slurm"):
            if self.cluster == "local" and getattr(self, name):
                raise ConfigError(
                    f"SubmititConfig.{name}: {getattr(self, name)!r} has no effect with cluster='local'. Remove it, "
                    "use cluster='slurm', or executor='pool' for GPUs of this machine."
                )


class SubmititExecutor(Executor):
    """Submits each trial as a job of its own."""

    ends_trials = True

    def __init__(self, config: SubmititConfig | None = None):
        self.config = config or SubmititConfig()
        self.slots = self.config.num_processes
        self._jobs: dict[int, Any] = {}
        self._requeued: dict[int, int] = {}
        self._submitter: Any = None
        self._watch: JobWatch | None = None
        if self.config.cluster == "slurm":
            self._make_submitter(Path())  # which checks the settings while nothing has begun
        else:
            _import_submitit()

    def start(self, work: TrialWork) -> None:
        """Check that a job will find the experiment."""
        super().start(work)
        self._reference = importable_reference(work.experiment)
        self._submitter = None
        self._watch = JobWatch(work, patience=SHARED_DISK_SECONDS if self.config.cluster == "slurm" else 0.0)

    def submit(self, trial: Trial) -> "Future[TrialOutcome]":
        """Submit the job of a trial, or find the one that an earlier sweep process has left."""
        assert self._watch is not None and trial.run_dir is not None
        if self._submitter is None:
            self._submitter = self._make_submitter(Path(self.config.folder or trial.run_dir.parent / "submitit"))
        self._requeued[trial.index] = 0
        job = self._find_orphaned_job(trial)
        if job is None:
            self._send(trial)
        else:
            self._jobs[trial.index] = job
        return self._watch.follow(
            trial, lambda: self._ended(trial), lambda: self._jobs[trial.index].cancel(check=False)
        )

    def close(self) -> None:
        """Cancel the jobs that still wait or run."""
        if self._watch is not None:
            self._watch.close()
        running = [job for job in self._jobs.values() if not job.done()]
        for job in running:
            job.cancel(check=False)
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and not all(job.done() for job in running):
            time.sleep(POLL_SECONDS)
        self._jobs.clear()

    def _send(self, trial: Trial) -> None:
        # submitit hides the GPUs from local jobs, which here see what the sweep's process sees.
        environment = {VISIBLE: os.environ.get(VISIBLE)} if self.config.cluster == "local" else {}
        job = self._submitter.submit(_run_warned, make_job(self.work, self._reference, trial, environment))
        self._jobs[trial.index] = job
        replace_bytes(job_note(trial, "job"), str(job.job_id).encode())

    def _ended(self, trial: Trial) -> str | None:
        """Return how the job of a trial ended; None while it runs, or runs again after a stop."""
        job = self._jobs[trial.index]
        if not job.done():
            return None
        if state_of(trial) == "interrupted" and self._requeued[trial.index] < self.config.requeues:
            self._requeued[trial.index] += 1
            self._send(trial)
            return None
        return f"job {job.job_id} ended ({job.state}) before the trial did. Its output: {job.paths.stderr}"

    def _find_orphaned_job(self, trial: Trial) -> object:
        """Return the job that an earlier process of this sweep submitted, if SLURM still has it."""
        note = job_note(trial, "job")
        if self.config.cluster != "slurm" or not note.is_file():
            return None
        import submitit

        job: Any = submitit.SlurmJob(folder=self._submitter.folder, job_id=read_limited(note, 4096).decode())
        return None if job.done(force_check=True) else job

    def _make_submitter(self, folder: Path) -> object:
        submitit, config = _import_submitit(), self.config
        settings = {"timeout_min": config.timeout_minutes, "name": "trial"}
        if config.cluster == "slurm":
            settings |= {
                "gpus_per_node": config.gpus_per_trial,
                "cpus_per_task": config.cpus_per_trial,
                "mem_gb": config.memory_gigabytes,
                "slurm_partition": config.partition,
                "slurm_signal_delay_s": config.warning_seconds,
                **{f"slurm_{name}": value for name, value in config.slurm.items()},
            }
        try:
            submitter = submitit.AutoExecutor(folder=folder, cluster=config.cluster)
            submitter.update_parameters(**settings)
        except (NameError, ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"SubmititConfig: submitit does not accept these settings. {error}") from error
        except RuntimeError as error:
            raise ConfigError(
                f"executor 'submitit' found no SLURM on this machine ({error}). Start the sweep on a login node, or give "
                "executor=SubmititExecutor(SubmititConfig(cluster='local')) to try it out, or executor='pool'."
            ) from error
        return submitter


def _import_submitit() -> ModuleType:
    with needs_package("submitit", "submitit", "executor 'submitit'"):
        import submitit
    return submitit


def _run_warned(job: TrialJob) -> None:
    """Be the job of one trial: SLURM's warning becomes the signal at which a trial saves and ends."""
    # submitit's own answer would end the process at once, with nothing saved.
    signal.signal(signal.SIGUSR2, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    job()


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
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), owner="RayConfig", hint=", or None")
        check_number("cpus_per_trial", self.cpus_per_trial, at_least=0, owner="RayConfig")
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
        with needs_package("ray", "ray", "executor 'ray'"):
            import ray
        self._ray: Any = ray
        self._tasks: dict[int, Any] = {}
        self._watch: JobWatch | None = None
        self._joined_here = False

    def start(self, work: TrialWork) -> None:
        """Join Ray, or start it, and see how many trials it holds."""
        super().start(work)
        self._reference = importable_reference(work.experiment)
        self._join()
        self.slots = self._count_slots()
        options: Settings = {"resources": dict(self.config.resources), "runtime_env": dict(self.config.runtime_env)}
        remote = self._ray.remote(
            num_cpus=self.config.cpus_per_trial,
            num_gpus=self.config.gpus_per_trial or 0,
            max_retries=0,  # the sweep retries, and writes it down
            max_calls=1,  # no trial inherits a worker's memory or CUDA state
            **{name: value for name, value in options.items() if value},
        )
        self._remote = remote(_run)
        self._watch = JobWatch(work, patience=SHARED_DISK_SECONDS if len(self._nodes()) > 1 else 0.0)

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
            self._ray.shutdown()
            self._joined_here = False
            if threading.current_thread() is threading.main_thread() and self._handler is not None:
                signal.signal(signal.SIGTERM, self._handler)

    def _ended(self, trial: Trial) -> str | None:
        """Return how the task of a trial ended; None while it runs."""
        task = self._tasks[trial.index]
        if not self._ray.wait([task], timeout=0)[0]:
            return None
        try:
            self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {first_line(error)}"
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

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _count_slots(self) -> int:
        """Return how many trials run at a time; a trial that no node can hold would wait forever."""
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
