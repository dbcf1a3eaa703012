"""Where measured machines are kept between runs: one small JSON file each, by device, driver, torch and topology.

The folder is `$DRIVETRAIN_CACHE`, else `$XDG_CACHE_HOME/drivetrain`, else `~/.cache/drivetrain`. Files are replaced in one step; one that
cannot be read or understood is as good as none.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.files import replace_bytes
from drivetrain.strategy.profile.values import Link, MachineProfile

_VERSION = 2
"""Of the measurement and of the formulas that corrections belong to; a change of either begins anew."""


def cache_folder() -> Path:
    """Return the folder of this user's cache; it need not exist."""
    if own := os.environ.get("DRIVETRAIN_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "drivetrain"


def cache_file(**identity: Any) -> Path:
    """Return the file of a machine that is identified by plain values."""
    text = json.dumps(identity, sort_keys=True, default=str)
    return cache_folder() / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_machine(path: Path) -> MachineProfile | None:
    """Return the machine that a file holds, or None for a file that is missing, damaged or of another version."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(held, dict) or held.get("version") != _VERSION:
            return None
        return machine_from_plain(held["machine"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_machine(path: Path, machine: MachineProfile) -> bool:
    """Replace a file; a folder that cannot be written to costs the next run a measurement, and nothing else."""
    text = json.dumps({"version": _VERSION, "machine": dataclasses.asdict(machine)}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, text.encode(), durable=False)
    except OSError:
        return False
    return True


def machine_from_plain(held: Mapping[str, Any]) -> MachineProfile:
    """Return a machine from its fields as JSON gives them; wrong ones are a TypeError or ValueError."""
    values = dict(held)
    for name in ("intra", "inter"):
        values[name] = Link(latency=float(values[name]["latency"]), bandwidth=float(values[name]["bandwidth"]))
    if values.get("capability") is not None:
        first, second = values["capability"]
        values["capability"] = (int(first), int(second))
    values["flops"] = {str(name): float(rate) for name, rate in dict(values["flops"]).items()}
    values["corrections"] = {str(name): float(rate) for name, rate in dict(values["corrections"]).items()}
    machine = MachineProfile(**values)
    if not (machine.flops.get("float32", 0) > 0 and machine.bandwidth > 0 and machine.memory > 0):
        raise ValueError("a machine without a rate")
    return machine
