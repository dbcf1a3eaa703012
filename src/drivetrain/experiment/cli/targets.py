"""Finding what a TARGET names: `file.py`, `file.py:name` or `package.module:name`."""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.core.errors import ExperimentError, did_you_mean, nearest_name
from drivetrain.core.types import Settings
from drivetrain.experiment.command_line import importing
from drivetrain.experiment.experiments import Experiment, ExperimentGroup

TARGET_HELP = "file.py, file.py:name or package.module:name"


def find_target(target: str) -> Any:
    """Return what a target names: an experiment, a group, or another attribute of the module."""
    place, _, name = target.rpartition(":")
    if not place or name.endswith(".py"):
        place, name = target, ""
    if not name and place.endswith(".py"):
        _reject_plain_script(Path(place))
    if place.endswith(".py"):
        module = _load_file(Path(place))
    else:
        _look_in(Path.cwd())
        try:
            found = importlib.util.find_spec(place)
        except (ImportError, ValueError, AttributeError):
            found = None
        if found is None:
            raise ExperimentError(f"there is no module {place!r}. Expected {TARGET_HELP}; a file's path ends in .py.")
        with importing():
            module = importlib.import_module(place)
    return _attribute(module, name, target) if name else _only_experiment(module, target)


def find_in_file(path: Path, name: str, function: str | None) -> Experiment:
    """Return the experiment of this name that a file defines; of several, such as those of two groups, that of the function."""
    module = _load_file(path)
    named = [one for one in _experiments(module).values() if isinstance(one, Experiment) and one.name == name]
    named.sort(key=lambda one: one.function_name != function)
    found = named[0] if named else _attribute(module, name, f"{path}:{name}")
    if not isinstance(found, Experiment):
        raise ExperimentError(f"{path}: {name!r} is a {type(found).__name__}, not an experiment.")
    return found


def find_experiment(target: str, words: list[str]) -> tuple[Any, list[str]]:
    """Return the experiment a target names and the remaining words; in a group the first word names the experiment."""
    found, rest = find_target(target), list(words)
    while isinstance(found, ExperimentGroup):
        if rest[:1] in (["-h"], ["--help"]):
            return found, rest
        found = found._find(rest[0] if rest else None)
        rest = rest[1:]
    if not isinstance(found, Experiment):
        raise ExperimentError(
            f"{target} is a {type(found).__name__}, not an experiment. Put @experiment above its function, or name another one."
        )
    return found, rest


def _load_file(path: Path) -> ModuleType:
    """Load a file as Python would when it imports it: its folder is where further imports are looked for."""
    if not path.is_file():
        near = nearest_name(path.name, [entry.name for entry in path.parent.glob("*.py")])
        hint = f" Did you mean {path.parent / near}?" if near else f" Expected {TARGET_HELP}."
        raise ExperimentError(f"there is no file {path}.{hint}")
    path = path.resolve()
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():  # up to where its outermost package lies
        parts.insert(0, root.name)
        root = root.parent
    name = ".".join(parts)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) and Path(str(loaded.__file__)).resolve() == path:
        return loaded
    _look_in(root)
    spec = importlib.util.find_spec(name) if loaded is None and name.replace(".", "_").isidentifier() else None
    with importing():
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
            return importlib.import_module(name)
        from drivetrain.experiment.processes import load_file

        return load_file(str(path), f"target_{path.stem}")  # its own name is taken by another module


def _reject_plain_script(path: Path) -> None:
    """Raise for a file that names no experiment anywhere: importing it would run it, and only then find nothing."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # loading the file says what is wrong with it
    nodes = (node for node in ast.walk(tree) if not isinstance(node, ast.Constant))
    names = (value for node in nodes for value in vars(node).values() if isinstance(value, str))
    if not any(word in name.lower() for name in names for word in ("experiment", "pystematic")):
        raise ExperimentError(
            f"{path} defines no experiment, so it was not run. Start a plain script with `python {path}`, or put @experiment above "
            f"a function. If it imports an experiment from elsewhere, name that: {path}:name."
        )


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _experiments(module: ModuleType) -> Settings:
    """Return the experiments and groups in a module, by attribute."""
    # type() rather than isinstance(): a live name such as `params` answers isinstance() for its present value.
    kinds = (Experiment, ExperimentGroup)
    return {name: value for name, value in vars(module).items() if issubclass(type(value), kinds)}


def _only_experiment(module: ModuleType, target: str) -> object:
    """Return the one experiment or group that a module defines by itself; members of its groups are left to those."""
    every = _experiments(module)
    own = {name: value for name, value in every.items() if value.main_function.__module__ == module.__name__} or every
    members = {id(entry) for value in own.values() for entry in getattr(value, "experiments", ())}
    found = {name: value for name, value in own.items() if id(value) not in members}
    different = {id(value): value for value in found.values()}
    if len(different) == 1:
        return next(iter(different.values()))
    if not found:
        raise ExperimentError(
            f"{target} defines no experiment. Put @experiment above a function, or name an attribute: {target}:name."
        )
    raise ExperimentError(
        f"{target} defines several experiments: {', '.join(found)}. Name one: {target}:{next(iter(found))}."
    )


def _attribute(module: ModuleType, name: str, target: str) -> object:
    if hasattr(module, name):
        return getattr(module, name)
    every = _experiments(module).values()
    found = next((value for value in every if value.name == name), None)
    if found is not None:
        return found
    valid = [value.name for value in every] or [entry for entry in vars(module) if not entry.startswith("_")]
    hint = did_you_mean(name, valid) or f" It has: {', '.join(valid) or 'nothing'}."
    raise ExperimentError(f"{target} has no attribute {name!r}.{hint}")
