"""The memory of machine and process, on this system and as other systems report it."""

import ctypes
import os
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest

from drivetrain.runtime import limits, workers
from drivetrain.runtime.device import device_memory

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              100000.
Pages active:                            300000.
Pages inactive:                          200000.
Pages speculative:                         5000.
Pages throttled:                              0.
Pages wired down:                         90000.
Pages purgeable:                           1000.
"Translation faults":                  12345678.
"""


def test_this_machine_has_memory_and_this_process_uses_less():
    available, total = device_memory("cpu")
    assert 0 < available <= total and 0 < limits.peak_process_bytes() < total


def on(monkeypatch, platform, **names):
    """Let the module see another system."""
    monkeypatch.setattr(limits, "sys", types.SimpleNamespace(platform=platform))
    for name, value in names.items():
        monkeypatch.setattr(limits, name, value)


def no_file(*args, **kwargs):
    raise FileNotFoundError("/proc/meminfo")


class MacOS:
    """The module `os` of macOS, which does not know how many pages are available."""

    def sysconf(self, name):
        if name not in ("SC_PAGE_SIZE", "SC_PHYS_PAGES"):
            raise ValueError("unrecognized configuration name")
        return {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 2**20}[name]


def test_macos_reports_what_it_can_give_without_swapping(monkeypatch):
    on(monkeypatch, "darwin", os=MacOS())
    monkeypatch.setattr(Path, "read_text", no_file)
    answer = types.SimpleNamespace(stdout=VM_STAT)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    assert limits.host_memory() == (305000 * 16384, 2**34)
    answer.stdout = "something else"
    assert limits.host_memory() == (2**34, 2**34)
    monkeypatch.setattr(subprocess, "run", no_file)
    assert limits.host_memory() == (2**34, 2**34)


def test_the_peak_is_in_bytes_on_macos_and_in_kibibytes_on_linux(monkeypatch):
    resource = types.SimpleNamespace(getrusage=lambda who: types.SimpleNamespace(ru_maxrss=4096), RUSAGE_SELF=0)
    monkeypatch.setitem(sys.modules, "resource", resource)
    for platform, expected in (("linux", 4096 * 1024), ("darwin", 4096)):
        on(monkeypatch, platform)
        assert limits.peak_process_bytes() == expected


def test_windows_fills_structures_of_its_own_layout(monkeypatch):
    class Kernel32:
        """Writes where the documented structures of 64-bit Windows have these fields."""

        def GlobalMemoryStatusEx(self, status):
            raw = status._obj
            assert ctypes.sizeof(raw) == 64 and raw.size == 64
            ctypes.memmove(ctypes.byref(raw, 8), struct.pack("<QQ", 2**34, 2**33), 16)
            return 1

        def K32GetProcessMemoryInfo(self, process, counters, size):
            raw = counters._obj
            assert process.value == 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1 and size == ctypes.sizeof(raw) == 72
            ctypes.memmove(ctypes.byref(raw, 8), struct.pack("<QQ", 3 * 2**20, 2**20), 16)
            return 1

    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=Kernel32()), raising=False)
    monkeypatch.setitem(sys.modules, "resource", None)
    on(monkeypatch, "win32", os=types.SimpleNamespace())
    assert limits.host_memory() == (2**33, 2**34) and limits.peak_process_bytes() == 3 * 2**20


def test_a_worker_that_has_ended_is_seen_without_waitid(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        monkeypatch.delattr(os, "waitid", raising=False)  # as on macOS before Python 3.13
        try:
            assert workers._runs(child.pid)
        except FileNotFoundError:
            pytest.skip("this machine has no ps")
        child.stdin.close()
        while workers._runs(child.pid):  # a zombie until its parent asks
            pass
    finally:
        child.kill()
        child.wait()
    assert not workers._runs(child.pid)
