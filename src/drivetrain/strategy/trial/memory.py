"""How much memory a trial uses, and whether the system killed its process because memory ran out.

On a device the allocator reports it; on the CPU it is the growth of the process. The system kills with SIGKILL, which others may send
too. Linux counts its own kills by control group. If no group can be read, there is one count for the whole machine, which also rises
when another process is killed; then only a process that held much of the memory counts.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from drivetrain.core.display import format_bytes
from drivetrain.core.errors import warn
from drivetrain.runtime.limits import memory_kills, number_after, peak_process_bytes

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.value import Strategy

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryMeter:
    """The memory of this process from now on."""

    def __init__(self, device: torch.device):
        self.device = device
        self._base = self.held()

    def held(self) -> int:
        """Return the bytes in use now: tensors on the device, or the resident memory of a process on the CPU."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return resident_bytes("VmRSS")

    def growth(self) -> int:
        """Return the growth since the beginning."""
        return self.held() - self._base

    def reset(self) -> None:
        """Reset the peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with suppress(OSError):  # another system, or not allowed: the peak is then that of the process's whole life
            _CLEAR.write_text("5", encoding="utf-8")  # Linux: the peak of resident memory becomes the present value

    def peak(self) -> tuple[int, int | None]:
        """Return the peak and the memory reserved by the allocator. On the CPU return the growth of the process and None."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return max(0, resident_bytes("VmHWM") - self._base), None


def resident_bytes(field: str) -> int:
    """Return a process's resident memory, now (`VmRSS`) or at its peak (`VmHWM`)."""
    if (kibibytes := number_after(_STATUS, f"{field}:")) is not None:
        return kibibytes * 1024
    return peak_process_bytes()  # not Linux: the peak of the whole life is all that can be had


_MACHINE, _MEMORY = Path("/proc/vmstat"), Path("/proc/meminfo")
LARGE_SHARE = 0.1
"""The share of the machine's memory from which on a process may be the one that the system ends."""


class MemoryKills:
    """The number of kills from now on."""

    def __init__(self) -> None:
        self._before = memory_kills()
        self._machine_before = number_after(_MACHINE, "oom_kill") or 0

    def explain(self, resident: int) -> bool:
        """Return whether a process that ended with SIGKILL and held this many bytes was killed because memory ran out."""
        if self._before is not None:
            return (memory_kills() or 0) > self._before
        total = (number_after(_MEMORY, "MemTotal:") or 0) * 1024
        is_large = total > 0 and resident >= LARGE_SHARE * total
        return is_large and (number_after(_MACHINE, "oom_kill") or 0) > self._machine_before


def resident_bytes_of(pid: int) -> int:
    """Return the memory of another process, 0 if the system does not report it."""
    return (number_after(Path(f"/proc/{pid}/status"), "VmRSS:") or 0) * 1024


SURPRISE = 0.15
"""By which share the real peak of a run may be above the prediction."""


def watch_memory(app: "Application", plan: "Strategy") -> None:
    """After the second update, compare the real peak with the prediction once, and warn if it is far above."""
    memory = (plan.predicted or {}).get("memory")
    inner = getattr(app.optimizer, "inner", None)
    if memory is None or app.device.type != "cuda" or not isinstance(inner, torch.optim.Optimizer):
        return
    predicted = sum(value for name, value in memory.items() if name != "reserve")
    if torch.cuda.max_memory_allocated(app.device) >= predicted:
        return  # an earlier peak would hide this one
    updates = 0

    def look(*_: object) -> None:  # reading the allocator's counters costs nothing and waits for nothing
        nonlocal updates
        updates += 1
        if updates < 2:
            return
        handle.remove()
        real = torch.cuda.max_memory_allocated(app.device)
        if real > predicted * (1 + SURPRISE):
            warn(
                f"the plan was predicted to need {format_bytes(predicted)} for tensors, and two updates took {format_bytes(real)}. "
                "Inputs that are larger than the samples of the search would explain it."
            )

    handle = inner.register_step_post_hook(look)
