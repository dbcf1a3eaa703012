"""What can be asked about this machine without starting a device: names, drivers, free memory.

An accelerator's context takes hundreds of megabytes and some seconds, and a process that has one cannot fork; so the driver's own
command line is asked, and the device only where this process uses it already.
"""

import functools
import os
import shutil
import subprocess
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Return what a device is called."""
    if device.type == "cuda":
        return _smi(device, "name") or "cuda"
    return _processor() if device.type == "cpu" else device.type


def driver_version(device: torch.device) -> str:
    """Return the version of a device's driver, empty where there is none."""
    return _smi(device, "driver_version") if device.type == "cuda" else ""


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return total and free bytes of a device, or None when they cannot be had without starting it."""
    if device.type == "cuda":
        if torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info(device)
            return total, free
        answer = _smi(device, "memory.total,memory.free")
        parts = [part.strip() for part in answer.split(",")]
        if len(parts) == 2 and all(part.isdigit() for part in parts):
            return int(parts[0]) * 2**20, int(parts[1]) * 2**20
        return None
    return host_memory() if device.type == "cpu" else None


def host_memory() -> tuple[int, int]:
    """Return total and available bytes of this host, or of the container that limits this process."""
    total = free = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key == "MemTotal":
                total = int(rest.split()[0]) * 1024
            elif key == "MemAvailable":
                free = int(rest.split()[0]) * 1024
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit.isdigit():
            total, free = min(total, int(limit)), min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no such limit here
    return total, free


def _smi(device: torch.device, what: str) -> str:
    """Ask nvidia-smi about one device; empty when it cannot answer. What does not change is asked once."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    number = device.index or 0
    names = [name.strip() for name in visible.split(",") if name.strip()]
    identity = names[number] if number < len(names) else str(number)
    return _ask_smi(identity, what) if "memory" in what else _ask_smi_once(identity, what)


def _ask_smi(identity: str, what: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    question = [command, f"--query-gpu={what}", "--format=csv,noheader,nounits", "-i", identity]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


_ask_smi_once = functools.cache(_ask_smi)


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
