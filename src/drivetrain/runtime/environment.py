"""What a launcher set for this process about its world, read from the environment and checked.

torchrun, accelerate launch and our own `launch` set `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and
`MASTER_PORT`; `srun` sets `SLURM_PROCID`, `SLURM_NTASKS` and friends; `mpirun` sets variables of its kind of MPI. A world that
contradicts itself would hang in the first collective, so it is rejected here, with the names of the variables, before any work is done.
"""

import multiprocessing
import os
import re
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait

from drivetrain.core.errors import ConfigError, DistributedError

INTERACTIVE_SLURM_JOBS = {"bash", "sh", "zsh", "interactive"}
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
"""Rank, number of ranks, and both on this node: Open MPI, MVAPICH, MPICH with Intel's, Cray's."""


@dataclass(frozen=True, kw_only=True)
class LaunchedWorld:
    """The position of this process among the processes that were started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    """Processes on this node; None when the launcher does not set it."""

    master_addr: str | None
    master_port: int | None
    launcher: str
    """`torchrun` (anything that sets RANK and WORLD_SIZE), `slurm` or `mpi`."""

    @property
    def is_one_machine(self) -> bool:
        """Whether all processes are known to be on this machine, so that nothing needs to listen on other interfaces."""
        return self.master_addr in LOOPBACK or self.local_world_size == self.world_size


def launched_world(environment: Mapping[str, str] | None = None) -> LaunchedWorld | None:
    """Return the world that a launcher describes, None if this process was started alone.

    >>> launched_world({"RANK": "1", "WORLD_SIZE": "2"}).rank
    1
    """
    env = os.environ if environment is None else environment
    if "RANK" not in env:  # job scripts often export WORLD_SIZE, but only torchrun sets RANK
        mpi = next((names for names in MPI_VARIABLES if all(name in env for name in names[:3])), None)
        # Inside a job of SLURM mpirun starts its daemons with srun, so their tasks are not the ranks, unless srun started the ranks.
        if _in_slurm_step(env) and (mpi is None or env[mpi[1]] == env[_slurm_tasks(env)]):
            return _from_slurm(env)
        if mpi is not None:
            return _from_mpi(env, *mpi)
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    return None


def in_launched_process() -> bool:
    """Return whether a launcher started this process. It then joins that world and starts no further processes."""
    return launched_world() is not None


def _from_torchrun(env: Mapping[str, str]) -> LaunchedWorld:
    for given, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if missing not in env:
            raise DistributedError(
                f"the environment has {given}={env[given]!r} but no {missing}; set both or neither. Start the program "
                f"with torchrun, accelerate launch or srun, which set both, or unset {given} to run on one process."
            )
    rank, world_size = _position(env, "RANK", "WORLD_SIZE", "Give each process its own RANK, or let torchrun set both.")
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in env else None
    if env.get("LOCAL_RANK", "-1") == "-1":  # some launchers set -1 for "not given"
        local_rank = rank % (local_world_size or world_size)
    else:
        size_name = "LOCAL_WORLD_SIZE" if local_world_size else "WORLD_SIZE"
        local_rank, _ = _position(env, "LOCAL_RANK", size_name, "Let the launcher set both.")
    return LaunchedWorld(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=env.get("MASTER_ADDR") or None,
        master_port=_integer(env, "MASTER_PORT") if env.get("MASTER_PORT") else None,
        launcher="torchrun",
    )


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task; a batch script or an interactive shell is not a task."""
    if "SLURM_PROCID" not in env or not ("SLURM_NTASKS" in env or "SLURM_STEP_NUM_TASKS" in env):
        return False
    if env.get("SLURM_JOB_NAME") in INTERACTIVE_SLURM_JOBS or "SLURM_PTY_PORT" in env:
        return False
    # Inside a job only srun sets the step; the batch script too has PROCID=0, and would wait for tasks that were never started.
    return "SLURM_JOB_ID" not in env or "SLURM_STEP_ID" in env


def _slurm_tasks(env: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _from_slurm(env: Mapping[str, str]) -> LaunchedWorld:
    tasks = _slurm_tasks(env)
    advice = "Start the program with srun, or unset SLURM_PROCID to run on one process."
    rank, world_size = _position(env, "SLURM_PROCID", tasks, advice)
    _check_world_size(env, tasks, world_size, "srun --ntasks")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    num_nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES")
    first_node = "127.0.0.1" if num_nodes == "1" or not nodes else first_slurm_host(nodes)
    job, step = (int(re.sub(r"\D", "", env.get(name, "")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = 15000 + (job * 7 + step) % 15000  # the same in every task; steps of one job, and jobs on one node, differ
    return LaunchedWorld(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else rank,
        local_world_size=world_size if num_nodes == "1" else None,
        master_addr=env.get("MASTER_ADDR") or first_node,
        master_port=_integer(env, "MASTER_PORT") if env.get("MASTER_PORT") else port,
        launcher="slurm",
    )


def _from_mpi(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> LaunchedWorld:
    """Return the world of an mpirun. Only Open MPI names the job, from which all ranks derive the same port."""
    number, world_size = _position(env, rank, size, "Start the program with mpirun, which sets both.")
    _check_world_size(env, size, world_size, "mpirun -n")
    local_world_size = _integer(env, local_size, least=1) if local_size in env else None
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    port = None if job is None else 15000 + zlib.crc32(job.encode()) % 15000
    return LaunchedWorld(
        rank=number,
        world_size=world_size,
        local_rank=_integer(env, local_rank),
        local_world_size=local_world_size,
        master_addr=env.get("MASTER_ADDR") or ("127.0.0.1" if local_world_size == world_size else None),
        master_port=_integer(env, "MASTER_PORT") if env.get("MASTER_PORT") else port,
        launcher="mpi",
    )


def _check_world_size(env: Mapping[str, str], name: str, world_size: int, way: str) -> None:
    if "WORLD_SIZE" in env and _integer(env, "WORLD_SIZE", least=1) != world_size:
        raise DistributedError(
            f"WORLD_SIZE={env['WORLD_SIZE']} and {name}={world_size} contradict each other. Unset WORLD_SIZE, or "
            f"start as many processes ({way})."
        )


def first_slurm_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    >>> first_slurm_host("gpu-[07-09,12],login1")
    'gpu-07'
    """
    first = re.match(r"[^\[,](?:[^\[,]|\[\w[^\]]*\])*", nodes.strip())
    if first is None:
        raise DistributedError(
            f"the SLURM node list {nodes!r} has no host, so the address of rank 0 is unknown. Set MASTER_ADDR "
            "to its host name."
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def seconds_from(variable: str, default: float | None) -> float | None:
    """Return the seconds that an environment variable sets; 0 means to wait forever."""
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{variable}={text!r}: expected a number of seconds, or 0 to wait forever.")
    return seconds


def _position(env: Mapping[str, str], rank_name: str, size_name: str, advice: str) -> tuple[int, int]:
    """Return a rank and the number of ranks, which must fit each other."""
    rank, size = _integer(env, rank_name), _integer(env, size_name, least=1)
    if rank >= size:
        raise DistributedError(
            f"{rank_name}={rank} does not fit {size_name}={size}: expected 0 to {size - 1}. {advice}"
        )
    return rank, size


def _integer(env: Mapping[str, str], name: str, least: int = 0) -> int:
    text = env[name]
    if not text.strip().isdecimal() or int(text) < least:
        raise DistributedError(
            f"the environment variable {name}={text!r} is not a whole number of at least {least}. Let the launcher set it, "
            "or unset it to run on one process."
        )
    return int(text)


POLL_SECONDS = 1.0


def end_with_parent(signal_number: int | None = None, grace: float = 30.0) -> None:
    """End this process when its parent has died: first by a signal, so that it can save, and `grace` seconds later by force.

    Without a signal it ends at once. A process that `multiprocessing` did not start has no parent to watch.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # Forked siblings may hold the other end of the sentinel, so it can stay silent. A fork server is not our parent.
    polls = os.getppid() == parent.pid

    def watch() -> None:
        while not wait([parent.sentinel], POLL_SECONDS) and not (polls and os.getppid() != parent.pid):
            pass
        if signal_number is not None:
            os.kill(os.getpid(), signal_number)
            time.sleep(grace)
        os._exit(1 if signal_number is None else 128 + signal_number)

    threading.Thread(target=watch, name="drivetrain-parent-watch", daemon=True).start()
