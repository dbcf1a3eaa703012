"""The rank of this process, the number of processes, and which data it reads.

Rank and world come from the process group; without one this is process 0 of 1. Data ranks differ from ranks if a mesh has tensor,
pipe or sequence axes: ranks along those axes work on the same samples. Code that builds such a mesh calls `set_data_ranks`, and
the loader calls `data_rank()` and `num_data_ranks()`.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from drivetrain.core.errors import DistributedError
from drivetrain.runtime.environment import launched_world

if not dist.is_available():  # torch then lacks names that many modules use, also with one process
    raise ImportError(
        f"this build of torch ({torch.__version__}) has no torch.distributed, which Drivetrain needs even for one process. Install a build "
        "that has it, such as those of PyPI and download.pytorch.org."
    )


class _DataRanks(NamedTuple):
    rank: int
    size: int
    group: "dist.ProcessGroup | None"
    of_trainer: bool = False


_data_ranks: _DataRanks | None = None


def is_distributed() -> bool:
    """Return whether a process group of any size has been initialized."""
    return dist.is_initialized()


def require_group(what: str) -> None:
    """Raise unless there is a process group."""
    if not is_distributed():
        raise DistributedError(
            f"{what} needs a process group, and none is initialized. Start the program with `torchrun --nproc-per-node=N program.py` and "
            "call drivetrain.init_distributed() first, or start an experiment with --distributed."
        )


def is_master() -> bool:
    """Return whether this is rank 0, or the only process."""
    return get_rank() == 0


def get_rank() -> int:
    """Return the rank of this process, 0 without a group."""
    return dist.get_rank() if is_distributed() else 0


def get_num_processes() -> int:
    """Return the number of processes in the group, 1 without one."""
    return dist.get_world_size() if is_distributed() else 1


def get_local_rank() -> int:
    """Return the rank of this process on its node, 0 without a group."""
    if not is_distributed():
        return 0
    world = launched_world()
    return world.local_rank if world is not None else dist.get_rank()


def data_rank() -> int:
    """Return which share of each global batch this process reads."""
    return get_rank() if _data_ranks is None else _data_ranks.rank


def num_data_ranks() -> int:
    """Return into how many shares each global batch is split."""
    return get_num_processes() if _data_ranks is None else _data_ranks.size


def data_group() -> "dist.ProcessGroup | None":
    """Return the group of processes that read different data, None for the default group."""
    if _data_ranks is None:
        return None
    if _data_ranks.group is None and is_distributed() and _data_ranks.size != get_num_processes():
        raise DistributedError(
            f"the data is split over {_data_ranks.size} ranks of {get_num_processes()} processes, but no group of "
            "those ranks was given. Call set_data_ranks(rank, size, group=mesh.get_group('data'))."
        )
    return _data_ranks.group


def set_data_ranks(rank: int, size: int, group: "dist.ProcessGroup | None" = None, *, of_trainer: bool = False) -> None:
    """Make this process read share `rank` of `size`, together with the other members of `group`.

    `of_trainer`: this holds for the runs of one Trainer only.
    """
    global _data_ranks
    if not 0 <= rank < size:
        raise DistributedError(f"data rank {rank} of {size} is not valid: it must be between 0 and {size - 1}.")
    _data_ranks = _DataRanks(rank, size, group, of_trainer)


def data_ranks_belong_to_trainer() -> bool:
    """Return whether the current data ranks apply only to the runs of one Trainer."""
    return _data_ranks is not None and _data_ranks.of_trainer


def clear_data_ranks() -> None:
    """Restore the default: every process reads its own share."""
    global _data_ranks
    _data_ranks = None
