"""Find out what this machine can do: measured once in child processes, cached on disk, refined by every trial.

Without time to measure, the figures of an earlier run are used, or those of the data sheet at an assumed efficiency. Free memory
is always read again. An accelerator's context takes hundreds of megabytes and some seconds, and a process that has one cannot
fork. So names, drivers and free memory come from the driver's command-line tool, and from the device only if this process already
uses it.

Each measured machine is one small JSON file, named by device, driver, torch and topology, in `$DRIVETRAIN_CACHE`, else
`$XDG_CACHE_HOME/drivetrain`, else `~/.cache/drivetrain`. Files are replaced atomically. A file that cannot be read is ignored.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from drivetrain.core.files import home_cache, load_json, read_limited, replace_bytes
from drivetrain.runtime.device import device_memory, usable_cpus
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.strategy.device_spec import DeviceSpec, preset_named_like
from drivetrain.strategy.profile.values import Grid, Link, MachineProfile, Timetable
from drivetrain.strategy.trial.report import TrialResult

Figures = dict[str, Any]
"""What a child has measured, as JSON holds it."""
EFFICIENCY = 0.55
"""What a program reaches of a data sheet's figures, until it is measured."""
COMPILATION = "compilation"
"""The key of the correction of compile times."""
_LEAST_SECONDS = 3.0  # what a child needs to start and measure anything
_CHILD_SECONDS = 6.0  # of these, what a child on an accelerator does not measure in
_CPU_SECONDS = 2.0  # for all measurements on a CPU
_MOST_RANKS = 8
_LAUNCHER = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GROUP_RANK TORCHELASTIC_RUN_ID".split()
_LATENCY = {"cuda": 10e-6, "cpu": 100e-6}
_INTER_LATENCY = 20e-6
_LAUNCH = {"cuda": 6e-6, "cpu": 3e-6}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What was predicted for a plan that was then tried."""

    kind: str
    """Plans of one kind are wrong in the same way: "bfloat16/compile", say."""
    step_seconds: float
    peak_bytes: float
    """Without any reserve."""
    compile_seconds: float = 0.0
    """Of the compiler, before the first step; 0 where nothing is compiled."""


def profile_machine(device: torch.device, *, time_limit: float = 10.0) -> MachineProfile:
    """Return what this machine can do, from the cache if it was measured before. This process does not initialize a device.

    `time_limit` is in seconds; too little for a child process means the cache, else a data sheet.
    """
    ranks = _local_ranks()
    path = _cache_file(device, ranks)
    known = read_machine(path)
    before = None if known is None else known.times
    if (known is None or (before is not None and not before.is_complete)) and time_limit >= _LEAST_SECONDS:
        found = _measured(device, time_limit, ranks, () if before is None else tuple(before.grids))
        if found is not None:
            measured = _as_machine(device, found, ranks)
            known = measured if known is None else replace(known, times=_joined(known.times, measured.times))
            write_machine(path, known)
    machine = known or _nearest_preset_profile(device)
    memory = memory_bytes(device)
    return replace(machine, memory=memory[0], free=memory[1]) if memory is not None else machine


def _joined(first: Timetable | None, more: Timetable | None) -> Timetable | None:
    """Return a table with what a later start measured in addition."""
    if first is None or more is None:
        return first or more
    return Timetable({**first.grids, **more.grids}, {**more.host, **first.host}, more.is_complete)


def machine_from_spec(spec: DeviceSpec) -> MachineProfile:
    """Return the machine described by a data sheet, at an assumed efficiency."""
    kind = "cuda" if spec.capability is not None else "cpu"
    intra = spec.intra_bw or 10e9
    return MachineProfile(
        device=spec.name,
        kind=kind,
        memory=spec.memory,
        free=spec.memory,
        flops={name: EFFICIENCY * rate for name, rate in spec.rates.items()},
        bandwidth=0.8 * spec.bandwidth,  # streaming comes closer to the data sheet than arithmetic does
        launch=_LAUNCH[kind],
        intra=Link(latency=_LATENCY[kind], bandwidth=EFFICIENCY * intra),
        inter=Link(latency=_INTER_LATENCY, bandwidth=EFFICIENCY * (spec.inter_bw or min(intra, 10e9))),
        per_node=spec.per_node,
    )


def learnt(machine: MachineProfile, prediction: Prediction, result: TrialResult) -> MachineProfile:
    """Return the machine corrected by the error of a prediction.

    Fragmentation is believed at once when it grows and forgotten slowly; times are averaged as ratios.
    """
    if result.outcome != "ok":
        return machine
    if result.reserved_bytes and prediction.peak_bytes > 0:
        seen = min(max(result.reserved_bytes / prediction.peak_bytes - 1, 0.0), 0.5)
        weight = 0.7 if seen > machine.reserve_share else 0.2
        machine = replace(machine, reserve_share=(1 - weight) * machine.reserve_share + weight * seen)
    ratios = {}
    if result.step_seconds and prediction.step_seconds > 0:
        ratios[prediction.kind] = result.step_seconds / prediction.step_seconds
    if result.startup_seconds and prediction.compile_seconds > 0:
        ratios[COMPILATION] = result.startup_seconds / prediction.compile_seconds
    for kind, ratio in ratios.items():
        before = machine.corrections.get(kind)
        after = ratio if before is None else math.sqrt(before * ratio)
        machine = replace(machine, corrections={**machine.corrections, kind: min(max(after, 0.1), 10.0)})
    return machine


def learn(machine: MachineProfile, prediction: Prediction, result: TrialResult) -> MachineProfile:
    """Return the machine corrected by the error of a prediction, and save it for the next search. One rank calls this."""
    machine = learnt(machine, prediction, result)
    if machine.evidence == "measured" and result.outcome == "ok":
        path = _cache_file(torch.device(machine.kind), _local_ranks())
        if (kept := read_machine(path)) is not None and kept.device == machine.device:
            corrections = dict(machine.corrections)
            write_machine(path, replace(kept, reserve_share=machine.reserve_share, corrections=corrections))
    return machine


def link_of(points: Sequence[Sequence[float]], ranks: int) -> Link:
    """Return the link fitted to all-reduces of several sizes: seconds = 2 (n - 1) (latency + bytes / (n bandwidth)), by least
    squares.

    >>> link = link_of([(s, 2 * (1e-5 + s / (2 * 1e9))) for s in (1e4, 1e6, 1e8)], 2)
    >>> round(link.latency, 7), round(link.bandwidth)
    (1e-05, 1000000000)
    """
    weights = [1 / max(seconds, 1e-9) ** 2 for _, seconds in points]  # relative errors count
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points)) / total
    mean_time = sum(w * seconds for w, (_, seconds) in zip(weights, points)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points))
    slope = sum(w * (s - mean_size) * (t - mean_time) for w, (s, t) in zip(weights, points)) / max(spread, 1e-30)
    largest, longest = max(points, key=lambda point: point[0])
    slope = slope if slope > 0 else longest / largest
    start = max(mean_time - slope * mean_size, 1e-7)
    return Link(latency=start / (2 * (ranks - 1)), bandwidth=2 * (ranks - 1) / (ranks * slope))


def _local_ranks() -> int:
    """Return how many processes of this job run on this machine."""
    world = launched_world()
    if world is not None and world.local_world_size is not None:
        return world.local_world_size
    # A launcher that does not say, or none: processes that only share a group are taken to be here.
    return min(get_num_processes(), _MOST_RANKS)


def _cache_file(device: torch.device, ranks: int) -> Path:
    name, driver, cpus = device_name(device), driver_version(device), usable_cpus()
    return cache_file(device=name, kind=device.type, driver=driver, torch=torch.__version__, ranks=ranks, cpus=cpus)


def _measured(device: torch.device, limit: float, ranks: int, known: Sequence[str] = ()) -> Figures | None:
    """Run the measuring program, once per rank, and return its answer; None when it failed or took too long."""
    count = _group_size(device, ranks)
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        children = []
        environment = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
        environment["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
        asked: Figures = {
            "seconds": _CPU_SECONDS if device.type == "cpu" else max(1.0, limit - _CHILD_SECONDS),
            "world": count,
            "store": f"{folder}/store",
            "known": list(known),
            "threads": max(1, torch.get_num_threads() // count) if device.type == "cpu" else 0,
        }
        for rank in range(count):
            place = f"cuda:{(device.index or 0) if count == 1 else rank}" if device.type == "cuda" else device.type
            text = json.dumps({"device": place, "rank": rank, **asked})
            command = [sys.executable, "-m", "drivetrain.strategy.profile.measure_machine", text]
            out, none = subprocess.PIPE if rank == 0 else subprocess.DEVNULL, subprocess.DEVNULL
            children.append(subprocess.Popen(command, stdout=out, stderr=none, stdin=none, env=environment, text=True))
        end = time.monotonic() + limit
        try:
            try:
                answer, _ = children[0].communicate(timeout=limit)
            except subprocess.TimeoutExpired:  # what it has printed counts
                children[0].kill()
                answer, _ = children[0].communicate()
            for child in children[1:]:
                child.wait(timeout=max(0.1, end - time.monotonic()))
            return _last_line(answer)
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            return None
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
                if child.stdout is not None:
                    child.stdout.close()


def _last_line(answer: str) -> Figures | None:
    """Return the last complete object that a child has printed."""
    for line in reversed(answer.strip().splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    return None


def _group_size(device: torch.device, ranks: int) -> int:
    """Return how many processes take part: on a CPU two, which share nothing but the link; on devices one each."""
    if device.type == "cpu":
        return min(ranks, 2)
    return max(1, min(ranks, _MOST_RANKS, torch.cuda.device_count() if device.type == "cuda" else 1))


def _as_machine(device: torch.device, found: Figures, ranks: int) -> MachineProfile:
    presumed = _nearest_preset_profile(device)
    link = link_of(found["link"], _group_size(device, ranks)) if found.get("link") else presumed.intra
    return replace(
        presumed,
        device=found.get("name") or presumed.device,
        memory=found.get("memory", presumed.memory),
        free=found.get("free", presumed.free),
        flops=found["flops"],
        bandwidth=found["bandwidth"],
        launch=found["launch"],
        intra=link,
        per_node=max(ranks, torch.cuda.device_count() if device.type == "cuda" else ranks),
        host_bandwidth=found.get("host_bandwidth", presumed.host_bandwidth),
        threads=found["threads"],
        times=timetable_from_plain(found["times"]),
        evidence="measured",
    )


def _nearest_preset_profile(device: torch.device) -> MachineProfile:
    """Return the machine of the nearest data sheet."""
    name, memory = device_name(device), memory_bytes(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        spec = replace(DeviceSpec.preset("cpu"), flops=6e10 * threads, fp32_flops=6e10 * threads, bandwidth=2e10)
        machine = replace(machine_from_spec(spec), threads=threads, reserve_bytes=float(2**28))
    else:
        found = preset_named_like(name, memory[0] if memory is not None else None)
        machine = machine_from_spec(found or DeviceSpec.preset("l4"))
    machine = replace(machine, device=name, kind=device.type)
    return replace(machine, memory=memory[0], free=memory[1]) if memory is not None else machine


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    if device.type == "cuda":
        return _smi(device, "name") or "cuda"
    return _processor() if device.type == "cpu" else device.type


def driver_version(device: torch.device) -> str:
    """Return the version of a device's driver, empty if there is none."""
    return _smi(device, "driver_version") if device.type == "cuda" else ""


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return total and free bytes of a device, or None if reading them would initialize it."""
    if device.type != "cuda":
        return device_memory("cpu")[::-1] if device.type == "cpu" else None
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    total_and_free = re.fullmatch(r"(\d+), *(\d+)", _smi(device, "memory.total,memory.free"))
    return None if total_and_free is None else (int(total_and_free[1]) * 2**20, int(total_and_free[2]) * 2**20)


def _smi(device: torch.device, what: str) -> str:
    """Ask nvidia-smi about one device; empty when it cannot answer. What does not change is asked once."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    number = device.index or 0
    names = [name.strip() for name in visible.split(",") if name.strip()]
    identity = names[number] if number < len(names) else str(number)
    return _query_nvidia_smi(identity, what) if "memory" in what else _ask_smi_once(identity, what)


def _query_nvidia_smi(identity: str, what: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    question = [command, f"--query-gpu={what}", "--format=csv,noheader,nounits", "-i", identity]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


_ask_smi_once = functools.cache(_query_nvidia_smi)


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


_FILE_LIMIT = 2**20
_VERSION = 4
"""Of the measurement and of the formulas that corrections belong to; a change of either starts again."""


def cache_folder() -> Path:
    """Return the folder of this user's cache. It may not exist."""
    if own := os.environ.get("DRIVETRAIN_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "drivetrain") if base else home_cache()


def cache_file(**identity: object) -> Path:
    """Return the cache file of a machine that plain values identify."""
    text = json.dumps(identity, sort_keys=True, default=str)
    return cache_folder() / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_machine(path: Path) -> MachineProfile | None:
    """Return the machine in a file, or None for a file that is missing, damaged or of another version."""
    try:
        held = load_json(read_limited(path, _FILE_LIMIT))
        if not isinstance(held, dict) or held.get("version") != _VERSION:
            return None
        return machine_from_plain(held["machine"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def write_machine(path: Path, machine: MachineProfile) -> bool:
    """Replace a file. If the folder cannot be written, the next run measures again."""
    text = json.dumps({"version": _VERSION, "machine": dataclasses.asdict(machine)}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, text.encode(), durable=False)
    except OSError:
        return False
    return True


def timetable_from_plain(held: Figures) -> Timetable:
    """Return a table of times from JSON values. Invalid ones raise TypeError or ValueError."""
    grids = {}
    for name, grid in dict(held["grids"]).items():
        axes = tuple(tuple(map(float, axis)) for axis in grid["axes"])
        values = tuple(map(float, grid["values"]))
        is_rising = all(axis and axis[0] > 0 and all(a < b for a, b in pairwise(axis)) for axis in axes)
        is_positive = all(0 < value < math.inf for value in values)
        if len(values) != math.prod(map(len, axes)) or not is_rising or not is_positive:
            raise ValueError(f"the times of {name} are not a grid")
        grids[str(name)] = Grid(axes, values)
    host = {str(name): float(value) for name, value in dict(held["host"]).items()}
    return Timetable(grids, host, bool(held.get("is_complete", True)))


def machine_from_plain(held: Figures) -> MachineProfile:
    """Return a machine from JSON values. Invalid ones raise TypeError or ValueError."""
    values = dict(held)
    for name in ("intra", "inter"):
        values[name] = Link(latency=float(values[name]["latency"]), bandwidth=float(values[name]["bandwidth"]))
    values.pop("capability", None)  # of earlier versions
    values["flops"] = {str(name): float(rate) for name, rate in dict(values["flops"]).items()}
    values["corrections"] = {str(name): float(rate) for name, rate in dict(values["corrections"]).items()}
    values["times"] = None if values.get("times") is None else timetable_from_plain(values["times"])
    machine = MachineProfile(**values)
    if not (machine.flops.get("float32", 0) > 0 and machine.bandwidth > 0 and machine.memory > 0):
        raise ValueError("a machine without a rate")
    return machine
