"""The memory of this machine and of this process, as Linux, macOS and Windows report it."""

import ctypes
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from drivetrain.runtime.limits import number_after


def host_memory() -> tuple[int, int]:
    """Return the available and the total bytes of this machine. Where the available ones are unknown, all count."""
    if sys.platform == "win32":
        return _windows_memory()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = number_after(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        return available * 1024, total
    with suppress(OSError, subprocess.SubprocessError, TypeError):
        return _free_by_vm_stat(), total
    return total, total


def peak_process_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    if sys.platform == "win32":
        return _windows_peak()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _free_by_vm_stat() -> int:
    """Return what macOS can give a process without swapping."""
    text = subprocess.run(["vm_stat"], capture_output=True, encoding="utf-8", timeout=10, check=True).stdout
    page = int(re.search(r"page size of (\d+) bytes", text)[1])  # type: ignore[index]
    return page * sum(map(int, re.findall(r"^Pages (?:free|inactive|speculative): +(\d+)\.", text, re.MULTILINE)))


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows; the fields after these two are about the page file."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
    ]
    _fields_ += [(f"other_{number}", ctypes.c_uint64) for number in range(5)]


class _ProcessMemory(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of Windows; the working set is the resident memory."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        ("peak", ctypes.c_size_t),
        ("resident", ctypes.c_size_t),
    ]
    _fields_ += [(f"other_{number}", ctypes.c_size_t) for number in range(6)]


def _windows_memory() -> tuple[int, int]:
    status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
    _kernel32().GlobalMemoryStatusEx(ctypes.byref(status))
    return status.available, status.total


def _windows_peak() -> int:
    counters, own = _ProcessMemory(size=ctypes.sizeof(_ProcessMemory)), ctypes.c_void_p(-1)
    _kernel32().K32GetProcessMemoryInfo(own, ctypes.byref(counters), counters.size)
    return counters.peak


def _kernel32() -> "ctypes.CDLL":
    return ctypes.windll.kernel32  # type: ignore[attr-defined]  # of Windows only
