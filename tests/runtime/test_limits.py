"""Limits of control groups, read from files like those of Linux."""

import pytest

from drivetrain.runtime import limits
from drivetrain.runtime.device import device_memory, usable_cpus
from drivetrain.runtime.limits import cpu_limit, limited_memory, memory_kills

GIB = 2**30


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Return a function that writes the files of a group, and one line of `/proc/self/cgroup` for it."""
    monkeypatch.setattr(limits, "GROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")

    def write(folder, **files):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(f"{text}\n")

    def belong(*lines):
        (tmp_path / "own").write_text("".join(f"{line}\n" for line in lines))

    write.belong = belong
    return write


def test_version_2_limits_of_outer_groups_hold_too(group):
    group.belong("0::/user/job/step")
    group("user/job/step", cpu__max="max 100000", memory__max="max", memory__current="5")
    group("user/job", cpu__max="250000 100000", memory__max=4 * GIB, memory__current=3 * GIB)
    group("user/job", memory__stat=f"anon 7\ninactive_file {GIB}")
    group("user", cpu__max="400000 100000", memory__max=64 * GIB, memory__current=3 * GIB)
    assert cpu_limit() == 2.5
    assert limited_memory(50 * GIB, 99 * GIB) == (2 * GIB, 4 * GIB)  # what files keep in memory can be used


def test_version_1_limits_are_read_at_the_root_of_a_container(group):
    group.belong("4:memory:/docker/0a1b", "2:cpu,cpuacct:/docker/0a1b", "0::/")
    group("cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    group("memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB, memory__stat="total_inactive_file 0")
    group("memory", memory__oom_control="oom_kill_disable 0\noom_kill 3")
    assert cpu_limit() == 1.5
    assert limited_memory(50 * GIB, 99 * GIB) == (GIB, 2 * GIB)
    assert memory_kills() == 3


def test_without_a_limit_the_machine_counts(group):
    group.belong("4:memory:/", "1:cpu:/")
    group("cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group("memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=9 * GIB)
    assert cpu_limit() is None and limited_memory(GIB, 4 * GIB) == (GIB, 4 * GIB)
    limits.OWN_GROUPS.unlink()
    assert cpu_limit() is None and memory_kills() is None and limited_memory(GIB, 4 * GIB) == (GIB, 4 * GIB)


def test_cpus_and_memory_of_the_process_follow_the_limits(group):
    group.belong("0::/")
    group(".", cpu__max="50000 100000", memory__max=2**20, memory__current=2**19)
    assert usable_cpus() == 1
    assert device_memory("cpu") == (2**19, 2**20)
