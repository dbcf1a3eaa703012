"""Join and leave the process group.

The environment describes the world. This file checks that it is complete, chooses the backend for the device, and starts torch's
process group once. Everything is checked before the first connection, because a wrong environment would otherwise hang.
"""

import atexit
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from drivetrain.core.arguments import check_number
from drivetrain.core.errors import DistributedError
from drivetrain.runtime.collectives import control_group, forget_groups
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.environment import LaunchedWorld, launched_world
from drivetrain.runtime.ranks import clear_data_ranks, is_distributed
from drivetrain.runtime.store import has_private_store, keep_to_loopback, keep_to_network, open_store


def init_distributed(backend: str | None = None, timeout: float | timedelta | None = None) -> None:
    """Join the process group that the launcher describes. A second call changes nothing.

    `backend` None means nccl for CUDA (with gloo for CPU tensors), gloo for the CPU, else torch's choice for the
    device; `timeout` is in seconds, None is torch's default.
    """
    if is_distributed():
        _check_same_backend(backend)
        return
    world = launched_world()
    if world is None:
        raise DistributedError(
            "cannot join a process group: RANK and WORLD_SIZE are not set. Start the program on several processes with "
            "torchrun --nproc-per-node N program.py, or from Python with drivetrain.runtime.launch.launch(function, N). "
            "One process needs no process group."
        )
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=check_number("timeout", timeout, above=0, hint=" of seconds, a timedelta, or None"))
    _check_address(world)
    device = choose_device("cpu" if backend == "gloo" else "auto")
    chosen = backend or _backend_for(device)
    _check_backend(chosen)
    if device.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(device.index)  # before the group starts, else every rank would open device 0
    store = open_store(world, timeout or dist.distributed_c10d.default_pg_timeout)
    if world.is_one_machine or has_private_store():
        keep_to_loopback()
    else:
        keep_to_network(world, store)
    dist.init_process_group(
        backend=chosen,
        store=store,
        world_size=world.world_size,
        rank=world.rank,
        timeout=timeout,
        device_id=device if device.type == "cuda" and "nccl" in chosen else None,
    )
    control_group()
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)


def join_launched_world(device: torch.device) -> None:
    """Join the group if a launcher started several processes, so that they do not train separate copies."""
    world = launched_world()
    if world is not None and world.world_size > 1:
        init_distributed("gloo" if device.type == "cpu" else None)


def destroy_group() -> None:
    """Leave the process group and clear what belonged to it. Without a group it does nothing."""
    if is_distributed():
        dist.destroy_process_group()
    forget_groups()
    clear_data_ranks()


def _leave_at_exit() -> None:
    """Leave the group at a normal end: its threads may abort the process if they outlive the interpreter.

    After an unhandled exception peers may never answer, and leaving could wait for them; then the process just ends.
    """
    if not hasattr(sys, "last_value"):
        destroy_group()


def _backend_for(device: torch.device) -> str:
    if device.type in ("cpu", "mps"):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _check_address(world: LaunchedWorld) -> None:
    if has_private_store():
        return
    given = {"MASTER_ADDR": world.master_addr, "MASTER_PORT": world.master_port}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise DistributedError(
            f"this is rank {world.rank} of {world.world_size} (launcher: {world.launcher}), but the environment has no "
            f"{' and no '.join(missing)}: the processes cannot find each other. Set the host and a free port of rank 0 (on one machine: "
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500; mpirun passes them on with -x NAME or -genv NAME VALUE), or start with torchrun, "
            "which sets both."
        )
    assert world.master_port is not None
    if not 0 < world.master_port < 65536:
        raise DistributedError(f"MASTER_PORT={world.master_port} is not a port: expected a number from 1 to 65535.")


def _check_backend(backend: str) -> None:
    """Reject a backend this build of torch lacks, or whose device is absent, before a process waits for it."""
    for entry in backend.split(","):
        name = entry.rpartition(":")[2].strip().lower()
        reason = None if dist.is_backend_available(name) else "this build of torch does not have it"
        if name == "nccl" and not torch.cuda.is_available():
            reason = "it needs a CUDA device, and torch finds none"
        if reason:
            raise DistributedError(
                f"backend {name!r} cannot be used: {reason}. Use 'gloo', or None to choose by device."
            )


def _check_same_backend(backend: str | None) -> None:
    active = dist.get_backend_config()
    wanted = {entry.rpartition(":")[2] for entry in backend.lower().split(",")} if backend else set()
    if not wanted <= {entry.rpartition(":")[2] for entry in active.split(",")}:
        raise DistributedError(
            f"the process group already uses {active!r}, but {backend!r} was requested. Request the backend at "
            "the first call, or call destroy_group() on every rank before joining again."
        )
