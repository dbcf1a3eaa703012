"""How much memory a trial takes: what the device's allocator says, or how far a process on the CPU grew."""

import sys
from pathlib import Path

import torch

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
        """Return how much more is in use than at the beginning."""
        return self.held() - self._base

    def reset(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            _CLEAR.write_text("5")  # Linux: the peak of resident memory becomes the present value
        except OSError:  # another system, or not allowed: the peak is then that of the process's whole life
            return

    def peak(self) -> tuple[int, int | None]:
        """Return the peak, and what the allocator held for it; on the CPU the growth of the process, and None."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return max(0, resident_bytes("VmHWM") - self._base), None


def resident_bytes(field: str) -> int:
    """Return a process's resident memory, now (`VmRSS`) or at its peak (`VmHWM`)."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:  # not Linux: the peak of the whole life is all that can be had
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
