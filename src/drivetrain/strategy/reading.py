"""Plans as JSON: one schema with a number, and every form in which a plan can be given.

Unknown keys and newer schemas are rejected by name, so that an old program never misreads a new plan. Nothing in a file is
executed or imported: classes are written as their full names and compared with those of the model.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigTypeError, DrivetrainError, StrategyFormatError, unknown_name
from drivetrain.core.files import load_json
from drivetrain.core.lazy import Slot
from drivetrain.core.types import Settings
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy

SCHEMA = 1
MARK = "drivetrain_strategy"
_PLAIN = ("predicted", "measured", "evidence", "reasons", "rejected", "fingerprint")
_KEYS = (MARK, "methods", "mesh", "batch", *_PLAIN, "dropped", "search")
_PICKLE_OPCODE = b"\x80"
LEGACY_PLAN: Slot[Callable[[bytes], list[Any]]] = Slot("strategy.legacy_plan")
"""Reads the methods of a pickled plan without executing anything."""


def as_plain(plan: "Strategy") -> Settings:
    """Return a plan as JSON values."""
    methods = []
    for name, config, tunable in plan:
        entry: Settings = {"name": name, "config": find_method(name).plain(config)}
        methods.append({**entry, "tunable": True} if tunable else entry)
    result: Settings = {MARK: SCHEMA, "methods": methods}
    result["mesh"] = None if plan.mesh is None else [list(pair) for pair in plan.mesh]
    result["batch"] = None if plan.batch is None else asdict(plan.batch)
    for name in _PLAIN:
        value = getattr(plan, name)
        result[name] = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
    result["dropped"] = [list(pair) for pair in plan.dropped]
    if plan.search is not None:
        result["search"] = dict(plan.search)
    return result


def dump(plan: "Strategy") -> str:
    """Return a plan as JSON text."""
    try:
        return json.dumps(as_plain(plan), indent=2)
    except TypeError as error:
        raise StrategyFormatError(
            f"the plan cannot be written as JSON: {error}. Functions in a configuration are not saved; pass them again when you load "
            "the plan."
        ) from error


def reject_pickle_name(path: str | os.PathLike[str]) -> None:
    """Reject a file name that promises a pickle."""
    if Path(path).suffix.lower() in (".pkl", ".pickle"):
        raise StrategyFormatError(
            f"{os.fspath(path)!r}: plans are JSON, not pickles. Choose a name that ends in .json."
        )


def _builtin(value: object) -> object:
    """Return a value whose containers are lists and dicts, for those of configuration libraries."""
    if isinstance(value, Mapping):
        return {key: _builtin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_builtin, value)) if type(value) in (list, tuple) else value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return list(map(_builtin, value))
    return value


def load(plan: "type[Strategy]", source: object, allow_pickle: bool = False) -> "Strategy":
    """Return the plan, as an instance of the given class, from any of the forms that `Strategy.load` names."""
    if isinstance(source, plan):
        return source
    source = _builtin(source)
    if isinstance(source, list | tuple):
        return plan(source)
    if isinstance(source, Mapping):
        return _from_plain(plan, source)
    if isinstance(source, str) and source.lstrip()[:1] in ("{", "["):
        return parse_json(plan, source)
    if isinstance(source, str | os.PathLike):
        if not os.path.isfile(source):
            raise FileNotFoundError(
                f"{os.fspath(source)!r} is not a plan file. A plan is a path, JSON text, or a list such as "
                "['parallel_mode', ('amp_native', 'bf16')]. Trainer(strategy='auto') searches for one; DDP needs none."
            )
        data, where = Path(source).read_bytes(), repr(os.fspath(source))
    elif isinstance(source, bytes | bytearray):
        data, where = bytes(source), "the bytes given"
    else:
        raise ConfigTypeError(
            f"a plan cannot be read from {type(source).__name__}. Expected a Strategy, a list, a dict, JSON text or bytes, or a path."
        )
    if not data.startswith(_PICKLE_OPCODE):
        return parse_json(plan, data, where)
    if not allow_pickle:
        raise StrategyFormatError(
            f"{where}: this is a legacy pickle; pass allow_pickle=True to read it with a loader that executes nothing, then save "
            "the plan as JSON."
        )
    return plan(LEGACY_PLAN.load()(data))


def parse_json(plan: "type[Strategy]", text: str | bytes, where: str = "the plan") -> "Strategy":
    """Return the plan from a JSON text."""
    try:
        value = load_json(text)
    except ValueError as error:
        raise StrategyFormatError(f"{where} is not JSON: {error}.") from error
    if isinstance(value, list):
        return _made(plan, value, {})
    if isinstance(value, dict):
        return _from_plain(plan, value)
    raise StrategyFormatError(f"{where} is JSON of the type {type(value).__name__}; expected an object or a list.")


def _from_plain(plan: "type[Strategy]", value: Mapping[str, object]) -> "Strategy":
    schema = value.get(MARK)
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise StrategyFormatError(
            f"this is not a plan: the key {MARK!r} with a schema number is missing. Keys given: {', '.join(map(str, value)) or 'none'}."
        )
    if schema > SCHEMA:
        raise StrategyFormatError(
            f"the plan has schema {schema}, and this version of Drivetrain reads schema {SCHEMA}. Update Drivetrain, or save the plan "
            "with the version that will read it."
        )
    if schema < SCHEMA:
        raise StrategyFormatError(f"the plan has schema {schema}, which is not valid; the oldest is {SCHEMA}.")
    for key in value:
        if key not in _KEYS:
            raise StrategyFormatError(unknown_name("key", key, _KEYS, where="plan"))
    given = {name: value[name] for name in _KEYS if value.get(name) is not None and name not in (MARK, "methods")}
    return _made(plan, value.get("methods"), given)


def _made(plan: "type[Strategy]", methods: Any, given: Mapping[str, Any]) -> "Strategy":
    """Return the plan of values from a file, which may be of any type."""
    try:
        return plan(methods, **given)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        if isinstance(error, DrivetrainError) and not isinstance(error, TypeError):
            raise
        raise StrategyFormatError(f"the plan is malformed: {error}") from error
