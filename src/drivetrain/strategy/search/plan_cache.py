"""Found plans in the user's cache folder, so that the second start of the same script does not search again.

A cached plan is used if everything that it depends on is equal: the model and the code of its classes, the shape of the samples,
the batch, loss and optimizer, the constraints, the machine, and the versions. It must also fit into the memory that is free now.

Files are plain JSON that only their owner can read. A file that another user could have written, or that cannot be read, is
ignored. `DRIVETRAIN_PLAN_CACHE=0` turns the cache off.
"""

import functools
import hashlib
import inspect
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain.core.errors import DrivetrainError
from drivetrain.core.files import load_json, read_limited, replace_bytes
from drivetrain.runtime.collectives import all_gather_values, broadcast_from_master
from drivetrain.runtime.device import usable_cpus
from drivetrain.runtime.ranks import is_master
from drivetrain.strategy.profile.machine import cache_folder, device_name, driver_version, memory_bytes
from drivetrain.strategy.registry import method_names
from drivetrain.strategy.search.constraints import SearchConstraints, budget_bytes
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.value import Strategy

SWITCH = "DRIVETRAIN_PLAN_CACHE"
_FORMAT = 1
_FILE_LIMIT = 4 * 2**20
_DEPTH = 6
"""How deep a description goes into what a function or an object holds."""


@dataclass(frozen=True, kw_only=True)
class KeptPlan:
    """One file of the cache."""

    path: Path
    made: str
    """When, in local time."""
    model: str
    device: str
    world: int
    batch: int
    plan: str
    """Its JSON text."""


def find_kept_plan(
    task: TrainingTask, device: torch.device, world: int, constraints: SearchConstraints
) -> Strategy | None:
    """Return the plan of an earlier search if it can be used now. Every rank calls it and gets the same result."""
    if not _is_on(constraints):
        return None
    found = _read(_path(task, device, world, constraints)) if is_master() else None
    kept: KeptPlan | None = broadcast_from_master(found)
    if kept is None:
        return None
    try:
        plan = Strategy.from_json(kept.plan)
        plan.validate(task.model, device, world)
        is_usable = _fits(plan, device, world, constraints)
    except DrivetrainError:
        is_usable = False
    if not all(all_gather_values(is_usable)):
        return None
    text = f"search: cached plan of an earlier run ({kept.made}); `drivetrain plan --clear` removes it"
    return replace(plan, reasons=(*plan.reasons, text))


def keep_plan(
    plan: Strategy, task: TrainingTask, device: torch.device, world: int, constraints: SearchConstraints
) -> None:
    """Save a plan for the next start. If the folder cannot be written, the next start searches again."""
    if not _is_on(constraints) or not is_master():
        return
    path = _path(task, device, world, constraints)
    with suppress(OSError, DrivetrainError):  # a configuration may hold a function, which JSON cannot
        held = {
            "format": _FORMAT,
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
            "model": type(task.model).__qualname__,
            "device": device_name(device),
            "world": world,
            "batch": task.global_batch_size,
            "plan": plan.to_json(),
        }
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_bytes(path, json.dumps(held).encode(), mode=0o600, durable=False)


def kept_plans() -> list[KeptPlan]:
    """Return the cached plans, newest first."""
    read = map(_read, _files())
    return sorted((kept for kept in read if kept is not None), key=lambda kept: kept.made, reverse=True)


def clear_plans() -> int:
    """Remove all cached plans and return their number."""
    files = _files()
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _files() -> list[Path]:
    return sorted(cache_folder().glob("plan-*.json"))


def _is_on(constraints: SearchConstraints) -> bool:
    is_elsewhere = constraints.plan_only or constraints.spec is not None or constraints.start is not None
    return os.environ.get(SWITCH, "1") != "0" and not is_elsewhere


def _fits(plan: Strategy, device: torch.device, world: int, constraints: SearchConstraints) -> bool:
    memory, needed = memory_bytes(device), (plan.predicted or {}).get("peak_bytes")
    if memory is None or not isinstance(needed, int | float):
        return needed is not None
    free = memory[1] // world if device.type == "cpu" else memory[1]
    return needed <= budget_bytes(constraints.memory_budget, free)


def _read(path: Path) -> KeptPlan | None:
    """Return what a file holds, or None for one that is missing, damaged, of another format, or not private."""
    try:
        status = path.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            return None
        held = load_json(read_limited(path, _FILE_LIMIT))
        if not isinstance(held, dict) or held.pop("format", None) != _FORMAT:
            return None
        kept = KeptPlan(path=path, **held)
        texts = (kept.made, kept.model, kept.device, kept.plan)
        is_right = all(isinstance(text, str) for text in texts) and type(kept.world) is type(kept.batch) is int
        return kept if is_right else None
    except (OSError, ValueError, TypeError):
        return None


# What a plan depends on.


def _path(task: TrainingTask, device: torch.device, world: int, constraints: SearchConstraints) -> Path:
    identity = {
        "task": [_described(getattr(task, item.name)) for item in fields(task)],
        "trained": "" if task.model is None else [p.requires_grad for p in task.model.parameters()],
        "constraints": [_described(getattr(constraints, item.name)) for item in fields(constraints)],
        "machine": [device_name(device), device.type, driver_version(device), usable_cpus(), torch.get_num_threads()],
        "world": world,
        "versions": [torch.__version__, platform.python_version(), _own_version(), sorted(method_names())],
    }
    text = json.dumps(identity, sort_keys=True)
    return cache_folder() / f"plan-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@functools.cache
def _own_version() -> str:
    """Return the version of this package, and when the code of its plans was changed last: a development tree keeps its number."""
    folder = Path(__file__).parents[1]
    newest = max(path.stat().st_mtime_ns for path in folder.rglob("*.py"))
    with suppress(PackageNotFoundError):
        return f"{version('drivetrain')} {newest}"
    return str(newest)


def _described(value: object, depth: int = _DEPTH) -> object:
    """Return what identifies a value in the next process too: no address, and the code of what somebody wrote."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, nn.Module):
        tensors = [[name, _described(tensor)] for name, tensor in value.state_dict(keep_vars=True).items()]
        classes = sorted({(type(m).__module__, type(m).__qualname__): type(m) for m in value.modules()}.items())
        return [repr(value), tensors, [_code(kind) for _, kind in classes]]
    if isinstance(value, Mapping):
        return [[str(name), _described(item, depth - 1)] for name, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [_described(item, depth - 1) for item in value]
    if isinstance(value, functools.partial):
        return [_described(part, depth - 1) for part in (value.func, value.args, value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        inner = {item.name: getattr(value, item.name) for item in fields(value)}
        return [type(value).__qualname__, _described(inner, depth - 1)]
    if inspect.ismethod(value):
        return [_described(value.__func__, depth - 1), _described(value.__self__, depth - 1)]
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [_code(value), _described(cells, depth - 1), _described(value.__defaults__, depth - 1)]
    if isinstance(value, type) or inspect.isbuiltin(value):
        return _code(value)
    return [_code(type(value)), _described(getattr(value, "__dict__", None), depth - 1)]


def _is_filled(cell: object) -> bool:
    try:
        return cell.cell_contents is not None  # type: ignore[attr-defined]
    except ValueError:
        return False


def _code(item: object) -> str:
    """Return the name of a class or function, with its source where it is not torch's: that has a version."""
    module, name = str(getattr(item, "__module__", "")), str(getattr(item, "__qualname__", ""))
    if module.partition(".")[0] in ("torch", "builtins"):
        return f"{module}.{name}"
    with suppress(OSError, TypeError):
        return f"{module}.{name}\n{inspect.getsource(item)}"  # type: ignore[arg-type]
    return f"{module}.{name}"
