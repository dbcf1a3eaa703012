"""What a process may use of its machine: the CPUs and the memory that there are, less what the system allows it.

Linux, macOS and Windows report memory in ways of their own. On Linux a container, a batch system or systemd sets limits on the control
group of a process and on the groups around it, while `/proc` and the counts of CPUs describe the whole machine all the same. Both versions
of that interface are read. In a container the files of its own group may be at the root, and the path that the kernel names may not exist.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_limit() -> float | None:
    """Return how many CPUs the groups of this process may use together, None without a limit."""
    limits = []
    for folder in _folders("cpu"):
        with suppress(OSError, ValueError):  # not there, or the word "max"
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()[:2]
            limits.append(int(quota) / int(period))
        quota_1, period_1 = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_1 and period_1 and quota_1 > 0:
            limits.append(quota_1 / period_1)
    return min(limits, default=None)


def limited_memory(free: int, total: int) -> tuple[int, int]:
    """Return the free and total bytes of a machine, less what the groups of this process may not use.

    What files were read or written is kept in memory until it is needed, so it counts as free.
    """
    for folder in _folders("memory"):
        for limit_file, used_file, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None:
                used -= number_after(folder / "memory.stat", cached) or 0
                free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def memory_kills() -> int | None:
    """Return how many processes of this process's group were ended because memory ran out, None where that cannot be read."""
    for folder in _folders("memory"):
        for file in ("memory.events", "memory.oom_control"):
            if (count := number_after(folder / file, "oom_kill")) is not None:
                return count
    return None


def number_after(path: Path, name: str) -> int | None:
    """Return the number after a name in a file of lines, None where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those around it, the innermost first."""
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(",") or not controllers:  # version 1, or version 2
            root = GROUPS / controller if controllers else GROUPS
            inner = root / group.lstrip("/")
            yield inner
            yield from (folder for folder in inner.parents if folder.is_relative_to(root))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or the word "max"
        return None


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
