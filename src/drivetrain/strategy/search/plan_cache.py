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
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType

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
_FORMAT = 2
_FILE_LIMIT = 4 * 2**20
_DEPTH = 6
"""How deep a description goes into what a function or an object holds."""
_MOST_ITEMS = 1000


@dataclass(frozen=True, kw_only=True)
class CachedPlan:
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


def find_cached_plan(
    file: Path | None, task: TrainingTask, device: torch.device, world: int, constraints: SearchConstraints
) -> Strategy | None:
    """Return the plan of an earlier search if it can be used now. Every rank calls it and gets the same result."""
    if not all(all_gather_values(file is not None)):
        return None
    found = _read(file) if file is not None and is_master() else None
    kept: CachedPlan | None = broadcast_from_master(found)
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


def cache_plan(file: Path | None, plan: Strategy, task: TrainingTask, device: torch.device, world: int) -> None:
    """Save a plan for the next start. If the folder cannot be written, the next start searches again."""
    if file is None or not is_master():
        return
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
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps({**held, "digest": _digest(held)})
        replace_bytes(file, text.encode(), mode=0o600, durable=False)


def cached_plans() -> list[CachedPlan]:
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


def _fits(plan: Strategy, device: torch.device, world: int, constraints: SearchConstraints) -> bool:
    memory, needed = memory_bytes(device), (plan.predicted or {}).get("peak_bytes")
    if memory is None or not isinstance(needed, int | float):
        return needed is not None
    free = memory[1] // world if device.type == "cpu" else memory[1]
    return needed <= budget_bytes(constraints.memory_budget, free)


def _read(path: Path) -> CachedPlan | None:
    """Return what a file holds, or None for one that is missing, damaged, of another format, or not private."""
    try:
        status = path.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            return None
        held = load_json(read_limited(path, _FILE_LIMIT))
        if not isinstance(held, dict) or held.pop("digest", None) != _digest(held) or held.pop("format") != _FORMAT:
            return None
        return CachedPlan(path=path, **held)
    except (OSError, ValueError, TypeError):
        return None


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# What a plan depends on.


def plan_file(task: TrainingTask, device: torch.device, world: int, constraints: SearchConstraints) -> Path | None:
    """Return where the plan of a search is cached; None where the cache is off, or a user's object cannot be described."""
    is_elsewhere = constraints.plan_only or constraints.spec is not None or constraints.start is not None
    if os.environ.get(SWITCH, "1") == "0" or is_elsewhere:
        return None
    try:
        described = [[_described(getattr(one, item.name)) for item in fields(one)] for one in (task, constraints)]
    except Exception:  # such as a `__repr__` that fails
        return None
    identity = {
        "task": described[0],
        "constraints": described[1],
        "machine": [device_name(device), device.type, driver_version(device), usable_cpus(), torch.get_num_threads()],
        "world": world,
        "versions": [torch.__version__, platform.python_version(), _own_version(), sorted(method_names())],
    }
    return cache_folder() / f"plan-{_digest(identity)[:24]}.json"


@functools.cache
def _own_version() -> str:
    """Return the version of this package, and when the code of its plans was changed last: a development tree keeps its number."""
    folder = Path(__file__).parents[1]
    newest = max(path.stat().st_mtime_ns for path in folder.rglob("*.py"))
    with suppress(PackageNotFoundError):
        return f"{version('drivetrain')} {newest}"
    return str(newest)


def _described(value: object, depth: int = _DEPTH, seen: set[int] | None = None) -> object:
    """Return what identifies a value in the next process too: no address, and the code of what somebody wrote.

    What is met again is described once. Of long containers only the beginning counts.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype)]
    seen = set() if seen is None else seen
    if depth == 0 or id(value) in seen:
        return type(value).__qualname__
    describe = functools.partial(_described, depth=depth - 1, seen=seen)
    if isinstance(value, Mapping):
        return [len(value), [[str(name), describe(item)] for name, item in islice(value.items(), _MOST_ITEMS)]]
    if isinstance(value, set | frozenset):
        return sorted(map(_shown, value))
    if isinstance(value, list | tuple):
        return [len(value), [describe(item) for item in value[:_MOST_ITEMS]]]
    if isinstance(value, functools.partial):
        return [describe(part) for part in (value.func, value.args, value.keywords)]
    if inspect.ismethod(value):
        return [describe(value.__func__), describe(value.__self__)]
    if isinstance(value, type | ModuleType | FunctionType | BuiltinFunctionType):
        return _described_code(value, describe, seen)
    seen.add(id(value))
    if isinstance(value, nn.Module):
        return _described_module(value, describe, seen)
    held = object.__getstate__(value)  # attributes and slots
    return [describe(type(value)), _shown(value) if held is None else describe(held)]


def _described_module(module: nn.Module, describe: Callable[[object], object], seen: set[int]) -> object:
    """Return tensors and parts of a module, with attributes: one may say how often a layer runs."""
    numbers: dict[int, int] = {}  # of tensors: shared ones have one
    tensors = [
        [name, numbers.setdefault(id(tensor), len(numbers)), tensor.requires_grad, describe(tensor)]
        for found in (module.named_parameters, module.named_buffers)
        for name, tensor in found(remove_duplicate=False)
    ]
    parts = dict(module.named_modules())
    seen.update(map(id, parts.values()))
    rows = []
    for name, part in parts.items():
        own = {key: held for key, held in vars(part).items() if key not in _OF_EVERY_MODULE}
        rows.append([name, type(part).__qualname__, describe(type(part)), describe(own)])
    return [tensors, rows]


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _described_code(
    item: type | ModuleType | FunctionType | BuiltinFunctionType, describe: Callable[[object], object], seen: set[int]
) -> object:
    """Return the name of a class or function, with its instructions where it is not torch's: that has a version."""
    name = f"{getattr(item, '__module__', '')}.{getattr(item, '__qualname__', item.__name__)}"
    if name.partition(".")[0] in ("torch", "builtins") or not isinstance(item, type | FunctionType):
        return name
    if isinstance(item, FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if cell != CellType()]
        return [name, _instructions(item.__code__), *map(describe, (cells, item.__defaults__, item.__kwdefaults__))]
    seen.add(id(item))
    members = {key: _function_in(value) for key, value in vars(item).items()}
    written = {  # other names with underscores are the interpreter's: the line on which it begins, say
        key: one
        for key, one in members.items()
        if isinstance(one, FunctionType) or (isinstance(one, int | float | str | tuple) and not key.startswith("__"))
    }
    return [name, describe(written), [_described_code(kind, describe, seen) for kind in item.__bases__]]


def _function_in(member: object) -> object:
    """Return the function inside a method, a property or a decorated function of a class."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        member = getattr(member, name, member)
    return member


def _instructions(code: CodeType) -> list[object]:
    constants = [_instructions(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _shown(value: object) -> str:
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))
