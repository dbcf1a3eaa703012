"""What Linux allows this process: the limits of its control group and of the groups around it.

A container, a batch system or systemd sets them. `/proc` and the counts of CPUs describe the whole machine all the same. Both versions of
the interface are read. In a container the files of its own group may be at the root, and the path that the kernel names may not exist.
"""

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
