"""Which device this process uses, and what the machine has.

A device given by name must exist; only `auto` falls back to the CPU. Under a launcher a device without a number means the device
of this process's local rank.
"""

import functools
import math
import os
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import DeviceError, UnknownDeviceError, unknown_name
from drivetrain.core.plain import plain_text
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.limits import cpu_limit, host_memory, limited_memory

ALIASES = {"gpu": "cuda"}
KNOWN = ("auto", "cpu", "cuda", "gpu", "mps", "xpu", "meta")
PINNED = ("cuda", "xpu")
"""Devices that copy to and from the host while the host goes on. On MPS such a copy may read memory that is already released."""


def choose_device(spec: str | torch.device | None = "auto") -> torch.device:
    """Return the device to use: `auto` (or None) is this process's accelerator, else the CPU.

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
            f"device {str(device)!r} was requested, but {_visible(device.type)}. Use {device.type}:0 to "
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
    # srun --gpus-per-task=1 shows every task its own device, as number 0.
    if count == 1 and world.launcher in ("slurm", "mpi"):
        return torch.device(kind, 0)
    raise DeviceError(
        f"local rank {world.local_rank} has no {kind} device: {_visible(kind)}. Start at most one process "
        f"per device (torchrun --nproc-per-node {count}), or use device 'cpu'."
    )


def _visible(kind: str) -> str:
    count = torch.get_device_module(kind).device_count()
    restriction = os.environ.get("CUDA_VISIBLE_DEVICES") if kind == "cuda" else None
    among = f" (CUDA_VISIBLE_DEVICES={restriction!r})" if restriction is not None else ""
    return f"this process sees {count} {kind} device{'' if count == 1 else 's'}{among}"


def _absent(kind: str) -> str:
    if kind == "cuda" and not torch.backends.cuda.is_built():
        reason = f"this build of torch ({torch.__version__}) has no CUDA; install a build with CUDA"
    elif kind == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        reason = "CUDA_VISIBLE_DEVICES hides all devices; unset it or list one"
    elif kind == "cuda":
        reason = "torch finds no usable CUDA device; check the driver with nvidia-smi"
    else:
        reason = "torch finds none on this machine"
    return f"device {kind!r} was requested, but {reason}. Or use 'auto' or 'cpu'."


def usable_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    limit = cpu_limit()
    return max(1, count if limit is None else min(count, math.ceil(limit)))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out. Libraries run out as well as torch's allocator: cuBLAS, NCCL, that of the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    phrases = ("out of memory", "_alloc_failed", "defaultcpuallocator: can't allocate")
    return isinstance(error, RuntimeError) and any(phrase in plain_text(error).lower() for phrase in phrases)


def copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a tensor of the host to a device. The host waits only where the copy would not be safe otherwise."""
    return tensor.to(device, non_blocking=device.type in PINNED)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type for sums on a device: float64, but float32 on those of Apple and some of Intel."""
    return torch.float64 if device.type in ("cpu", "cuda", "meta") or _has_float64(device.type) else torch.float32


@functools.cache
def _has_float64(kind: str) -> bool:
    try:
        torch.ones((), dtype=torch.float64, device=kind).add_(1)
    except (RuntimeError, TypeError):
        return False
    return True


def as_current(device: torch.device | str | None) -> AbstractContextManager[None]:
    """Make a device the current one in a block: random states, events and kernels that name no device belong to that one."""
    device = torch.device("cpu" if device is None else device)
    return torch.accelerator.device_index(None if device.type in ("cpu", "meta", "mps") else device.index)


@contextmanager
def waiting_allowed() -> Iterator[None]:
    """Let the host wait for the device in this block, which `Trainer(strict=True)` forbids within a step."""
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0
    if mode:
        torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


def device_memory(device: str | torch.device | None = "auto") -> tuple[int, int]:
    """Return the free and the total bytes of a device. Free memory includes what torch's cache can release.

    The CPU's memory is that of the machine, or less where a container limits it.
    """
    chosen = choose_device(device)
    if chosen.type == "cpu":
        return limited_memory(*host_memory())
    if chosen.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    module = torch.get_device_module(chosen)
    if not hasattr(module, "mem_get_info"):
        raise DeviceError(f"torch does not report the memory of {str(chosen)!r}. Use a cpu, cuda, xpu or mps device.")
    free, total = module.mem_get_info(chosen)
    return free + module.memory_reserved(chosen) - module.memory_allocated(chosen), total


# ---------------------------------------------------------------------- numbers that leave the device
# A value is copied to pinned memory behind the kernels that compute it, and an event says when it is there. The host looks at finished
# copies only. A third push waits for the first copy, so that a value is at most two pushes old: by then the device has two steps of work
# in its queue and is not idle. On a CPU the number is known at once.

_MAX_LAG = 2
Tag = Any
"""What a caller gives with a number, and gets back with it."""
_Places = list[tuple[Tensor, torch.cuda.Event]]
"""Pinned numbers of one type, each with the event of its last copy, to use again."""


class AsyncReadback:
    """Copies scalars from the device to the host, in order, without waiting.

    >>> readback = AsyncReadback()
    >>> readback.push(torch.tensor(0.5), tag="step 1")
    >>> readback.poll()
    [('step 1', 0.5)]
    """

    def __init__(self, max_lag: int = _MAX_LAG):
        self.max_lag = max_lag
        self._arrived: list[tuple[Tag, float]] = []
        self._pending: deque[tuple[Tag, Tensor | float, torch.cuda.Event | None, _Places]] = deque()
        self._free: dict[tuple[torch.device, torch.dtype], _Places] = {}

    def push(self, tensor: Tensor | float, tag: Tag = None) -> None:
        """Send a scalar to the host. `tag` is returned with it."""
        number = tensor if not isinstance(tensor, Tensor) else tensor.item() if tensor.is_cpu else None
        if number is not None and not self._pending:
            self._arrived.append((tag, float(number)))
            return
        if len(self._pending) >= self.max_lag:
            self._take(wait=True)
        if number is not None:  # it comes after what was pushed before
            self._pending.append((tag, float(number), None, []))
            return
        assert isinstance(tensor, Tensor)
        value = tensor.detach().reshape(1)
        if not value.is_cuda:
            self._pending.append((tag, value.clone(), None, []))  # read when it is old, which costs little
            return
        free = self._free.setdefault((value.device, value.dtype), [])
        if free:
            place, event = free.pop()
        else:
            place, event = torch.empty(1, dtype=value.dtype, device="cpu", pin_memory=True), torch.cuda.Event()
        place.copy_(value, non_blocking=True)
        event.record(torch.cuda.current_stream(value.device))
        self._pending.append((tag, place, event, free))

    @property
    def is_idle(self) -> bool:
        """Whether no scalar is pending."""
        return not self._pending

    def poll(self) -> list[tuple[Tag, float]]:
        """Return what has arrived since the last call, oldest first, without waiting."""
        while self._pending and self._take(wait=False):
            pass
        return self.overdue()

    def overdue(self) -> list[tuple[Tag, float]]:
        """Return what `push` had to wait for since the last call. The lag is fixed, so all ranks get the same at the same step."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def drain(self) -> list[tuple[Tag, float]]:
        """Wait for everything that was pushed and return it, for the end of an epoch."""
        while self._pending:
            self._take(wait=True)
        return self.poll()

    def _take(self, wait: bool) -> bool:
        """Move the oldest scalar to those that have arrived; without `wait`, only if it is there."""
        tag, place, event, free = self._pending[0]
        if isinstance(place, Tensor) and not wait and (event is None or not event.query()):
            return False
        if isinstance(place, Tensor) and event is not None:
            event.synchronize()
            free.append((place, event))
        self._pending.popleft()
        self._arrived.append((tag, float(place)))
        return True
