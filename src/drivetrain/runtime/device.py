"""Which device this process computes on, and what the machine has.

A device asked for by name must be there; only `auto` falls back to the CPU. Under a launcher a device without a number
means this process's own one, by its local rank.
"""

import math
import os
from pathlib import Path

import torch

from drivetrain.core.errors import DeviceError, UnknownDeviceError, unknown_name
from drivetrain.runtime.environment import LaunchedWorld, launched_world

ALIASES = {"gpu": "cuda"}
KNOWN = ("auto", "cpu", "cuda", "gpu", "mps", "xpu", "meta")


def choose_device(spec: str | torch.device | None = "auto") -> torch.device:
    """Return the device to compute on: `auto` (or None) is this process's accelerator, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if spec is None or spec == "auto":
        return _automatic_device()
    device = _parse(spec)
    if device.type in ("cpu", "meta"):
        return device
    module = torch.get_device_module(device)
    if not module.is_available():
        raise DeviceError(_absent(device.type))
    if device.type == "mps":
        return device
    if device.index is None:
        return _local_device(device.type)
    if device.index >= module.device_count():
        raise DeviceError(
            f"device {str(device)!r} was asked for, but {_visible(device.type)}. Use {device.type}:0 to "
            f"{device.type}:{module.device_count() - 1}, or 'auto'."
        )
    return device


def _automatic_device() -> torch.device:
    # accelerate launch --cpu and its configuration reach the program through these two variables.
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t"):
        return torch.device("cpu")
    if named := os.environ.get("ACCELERATE_TORCH_DEVICE"):
        return choose_device(named)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device("mps") if accelerator.type == "mps" else _local_device(accelerator.type)


def _parse(spec: str | torch.device) -> torch.device:
    if isinstance(spec, torch.device):
        return spec
    kind, separator, index = str(spec).strip().partition(":")
    try:
        device = torch.device(ALIASES.get(kind, kind) + separator + index)
        torch.get_device_module(device)
    except (RuntimeError, ValueError):
        raise UnknownDeviceError(unknown_name("device", spec, KNOWN) + " A number may follow, as in cuda:0.") from None
    return device


def _local_device(kind: str) -> torch.device:
    """Return this process's own device of a kind that is known to be present."""
    module = torch.get_device_module(kind)
    world = launched_world()
    if world is None:
        return torch.device(kind, module.current_device())
    count = module.device_count()
    if world.local_rank < count:
        return torch.device(kind, world.local_rank)
    if count == 1 and world.launcher == "slurm":  # srun --gpus-per-task=1 shows every task its own device, as number 0
        return torch.device(kind, 0)
    raise DeviceError(_too_few(kind, world))


def _too_few(kind: str, world: LaunchedWorld) -> str:
    count = torch.get_device_module(kind).device_count()
    return (
        f"local rank {world.local_rank} has no {kind} device of its own: {_visible(kind)}. Start at most one process "
        f"per device (torchrun --nproc-per-node {count}), or ask for device 'cpu'."
    )


def _visible(kind: str) -> str:
    count = torch.get_device_module(kind).device_count()
    restriction = os.environ.get("CUDA_VISIBLE_DEVICES") if kind == "cuda" else None
    among = f" (CUDA_VISIBLE_DEVICES={restriction!r})" if restriction is not None else ""
    return f"this process sees {count} {kind} device{'' if count == 1 else 's'}{among}"


def _absent(kind: str) -> str:
    if kind == "cuda" and not torch.backends.cuda.is_built():
        reason = f"this build of torch ({torch.__version__}) has no CUDA; install one that has"
    elif kind == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        reason = "CUDA_VISIBLE_DEVICES hides every device; unset it or name one"
    elif kind == "cuda":
        reason = "torch finds no usable CUDA device; check the driver with nvidia-smi"
    else:
        reason = "torch finds none on this machine"
    return f"device {kind!r} was asked for, but {reason}. Or ask for 'auto' or 'cpu'."


def usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(count, _cpu_quota() or count))


def _cpu_quota() -> int | None:
    """Return the CPU limit of the control group this process runs in, rounded up; None without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # not Linux, an older control group, or the word "max"
        return None


def device_memory(device: str | torch.device | None = "auto") -> tuple[int, int]:
    """Return the free and the total bytes of a device; free includes what torch's cache can give back."""
    chosen = choose_device(device)
    if chosen.type == "cpu":
        return _host_memory()
    if chosen.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    module = torch.get_device_module(chosen)
    if not hasattr(module, "mem_get_info"):
        raise DeviceError(
            f"torch does not report how much memory {str(chosen)!r} has. Ask for a cpu, cuda, xpu or mps device."
        )
    free, total = module.mem_get_info(chosen)
    return free + module.memory_reserved(chosen) - module.memory_allocated(chosen), total


def _host_memory() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_AVPHYS_PAGES") * page
    return available, total
