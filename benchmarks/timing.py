"""How benchmarks here measure: two loops in turn, many short blocks, low percentiles.

A busy machine only ever adds time, and it adds it in bursts. So the loops that are compared take turns in short blocks,
each burst hits all of them alike, and the low percentile of the blocks is what the code itself costs. The same loop
entered twice (A/A) shows how much of a difference is noise.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Block = Callable[[int], float | None]
"""Runs so many steps; it may return the seconds they took, when it also does something that should not count."""


def alternate(
    loops: Mapping[str, Block],
    blocks: int = 120,
    steps: int = 100,
    warm_up: bool = True,
    after_turn: Callable[[dict[str, list[float]]], None] | None = None,
) -> dict[str, list[float]]:
    """Return for each loop the seconds per step of every block; the loops take turns, after one block to warm up.

    `after_turn` gets what is known so far, outside the clock: a long benchmark can write it down.
    """
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values() if warm_up else ():
        loop(steps)
    for turn in range(blocks):
        # Every second turn goes backwards, so that no loop always runs in the cache another one left.
        for name in list(loops) if turn % 2 == 0 else reversed(list(loops)):
            start = time.perf_counter()
            own = loops[name](steps)
            elapsed = time.perf_counter() - start
            seconds[name].append((own if isinstance(own, float) else elapsed) / steps)
        if after_turn is not None:
            after_turn(seconds)
    return seconds


def low(values: Sequence[float], share: float = 0.1) -> float:
    """Return a low percentile: what the code costs when nothing else gets in the way."""
    return sorted(values)[int(share * (len(values) - 1))]


def compare(loops: Mapping[str, Block], blocks: int = 120, steps: int = 100, share: float = 0.1) -> dict[str, float]:
    """Return the seconds per step of each loop, measured in turns."""
    return {name: low(values, share) for name, values in alternate(loops, blocks, steps).items()}


def environment(runs: int = 1) -> dict[str, Any]:
    """Return what a number must carry to mean anything: hardware, versions, date, number of runs."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "runs": runs,
    }
    for package in ("torch", "drivetrain"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    torch = sys.modules.get("torch")  # a benchmark that uses no torch does not load it for its device's name
    if torch is not None and torch.cuda.is_available():
        found["gpu"], found["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
    return found


def write_result(name: str, result: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write a result as JSON, in `benchmarks/results` unless another folder is given, and return its path."""
    folder = RESULTS if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, default=str) + "\n")
    return path


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
