"""Turning values into plain containers and tensors, and back, without pickle and without importing a class.

`torch.load(weights_only=True)` accepts dicts, lists, tuples, numbers, strings and tensors; those stay as they
are. Everything else that people keep in a training session (paths, enums, arrays, generators, sets, dataclasses)
becomes a dict with a tag, `{"__drivetrain__": "path", "value": "data/train"}`. `unpack` gives back the value that was
packed.

A tag never names code to run. Enums, namedtuples and dataclasses are rebuilt only with a class the program itself has
at hand: one found in the `live` value, or declared with `torch.serialization.add_safe_globals`.
"""

import copy
import dataclasses
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain.context.coders import GENERATOR_TAGS, TAG, VALUE_CODERS, class_name, tag_of, tagged, value_coder
from drivetrain.core.errors import StateError
from drivetrain.core.event import Event
from drivetrain.core.time import Time, Timestamp, TimeUnit

PLAIN = frozenset({type(None), bool, int, float, complex, str})
"""Types that are kept as they are."""
NOT_STATE = "not state"
"""The tag of a value without state, so that positions and names stay as they were."""

_OWN_CLASSES: tuple[type, ...] = (Time, TimeUnit, Timestamp, Event)
_CODERS_BY_TAG = {coder.tag: coder for coder in VALUE_CODERS}

Special = Callable[[Any, str], Any]
"""Packs what has its own way of being saved, given the value and its path; NotImplemented leaves it to the codec."""


def pack(
    value: Any, *, path: str = "", special: Special | None = None, tensor: Callable[[torch.Tensor], Any] | None = None
) -> Any:
    """Return `value` as plain tagged containers and tensors; tensors are detached, not copied.

    >>> pack({"root": Path("data"), "sizes": (1, 2)})
    {'root': {'__drivetrain__': 'path', 'value': 'data'}, 'sizes': (1, 2)}
    """
    return Packer(special, tensor or torch.Tensor.detach).pack(value, path)


def unpack(packed: Any, live: Any = None) -> Any:
    """Return the value that was packed; enums, namedtuples and dataclasses take their class from `live`.

    >>> unpack(pack({"root": Path("data"), "sizes": {3, 4}}))
    {'root': PosixPath('data'), 'sizes': {3, 4}}
    """
    return Unpacker(classes_in(live)).unpack(packed)


def is_packed_generator(packed: Any) -> bool:
    """Return whether a packed value is the state of a random generator, which differs from rank to rank."""
    return tag_of(packed) in GENERATOR_TAGS


def join_path(path: str, name: object) -> str:
    """Return the path of a part: `join_path("history", 0)` is `"history.0"`."""
    return f"{path}.{name}" if path else str(name)


class Packer:
    """One packing: remembers which containers it is inside of, so that a cycle is an error and not a hang."""

    def __init__(self, special: Special | None, tensor: Callable[[torch.Tensor], Any]):
        self.special, self.tensor = special, tensor
        self._inside: set[int] = set()

    def pack(self, value: Any, path: str) -> Any:
        """Return one value, at one path, as plain data and tensors."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if id(value) in self._inside:
            raise StateError(f"{path or 'the value'}: a {type(value).__name__} contains itself and cannot be saved.")
        self._inside.add(id(value))
        try:
            if self.special is not None and (result := self.special(value, path)) is not NotImplemented:
                return result
            return self._pack_known(value, path)
        finally:
            self._inside.discard(id(value))

    def _pack_known(self, value: Any, path: str) -> Any:
        if coder := value_coder(value):
            return tagged(coder.tag, self.pack(coder.pack(value), path))
        if isinstance(value, np.generic) and type(value.item()) in PLAIN:
            return value.item()
        if is_namedtuple(value):
            return tagged("namedtuple", self._fields(value, value._asdict(), path))
        if is_dataclass(value):
            return tagged("dataclass", self._fields(value, field_values(value), path))
        for kind, pack_container in self._CONTAINERS.items():
            if isinstance(value, kind):
                return pack_container(self, value, path)
        if isinstance(value, str):  # a subclass of a plain type is saved as that type
            return str.__str__(value)
        for number in (int, float, complex):
            if isinstance(value, number):
                return number(value)  # type: ignore[arg-type]
        raise StateError(
            f"{path or 'the value'}: a {type(value).__name__} cannot be saved as plain data. Use numbers, strings, tensors, arrays "
            "and containers of them, or an object with state_dict() and load_state_dict()."
        )

    def _many(self, values: Iterable[Any], path: str) -> list[Any]:
        return [
            value if type(value) in PLAIN else self.pack(value, join_path(path, index))
            for index, value in enumerate(values)
        ]

    def _fields(self, value: Any, fields: Mapping[str, Any], path: str) -> dict[str, Any]:
        packed = {name: self.pack(item, join_path(path, name)) for name, item in fields.items()}
        return {"class": class_name(type(value)), "fields": packed}

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[tuple[Any, Any]]:
        return [(self.pack(key, path), self.pack(item, join_path(path, key))) for key, item in value.items()]

    def _counter(self, value: "Counter[Any]", path: str) -> dict[str, Any]:
        return tagged("counter", self._pairs(value, path))

    def _ordered(self, value: "OrderedDict[Any, Any]", path: str) -> Any:
        if not all(map(_is_plain_key, value)):
            return tagged("ordered_dict", self._pairs(value, path))
        return with_metadata(
            OrderedDict((key, self.pack(item, join_path(path, key))) for key, item in value.items()), value
        )

    def _dict(self, value: dict[Any, Any], path: str) -> dict[Any, Any]:
        if TAG in value or not all(map(_is_plain_key, value)):
            return tagged("dict", self._pairs(value, path))
        return {key: self.pack(item, join_path(path, key)) for key, item in value.items()}

    def _list(self, value: list[Any], path: str) -> list[Any]:
        return self._many(value, path)

    def _tuple(self, value: tuple[Any, ...], path: str) -> tuple[Any, ...]:
        return tuple(self._many(value, path))

    def _set(self, value: Any, path: str) -> dict[str, Any]:
        # Sorted, because the order of a set differs from process to process and equal states should give equal files.
        return tagged("frozenset" if isinstance(value, frozenset) else "set", self._many(sorted(value, key=repr), path))

    def _deque(self, value: "deque[Any]", path: str) -> dict[str, Any]:
        return tagged("deque", {"items": self._many(value, path), "maxlen": value.maxlen})

    _CONTAINERS: dict[Any, Callable[..., Any]] = {
        Counter: _counter,
        OrderedDict: _ordered,
        dict: _dict,
        list: _list,
        tuple: _tuple,
        (set, frozenset): _set,
        deque: _deque,
    }


class Unpacker:
    """One unpacking, with the classes the program has at hand."""

    def __init__(self, classes: Iterable[type] = (), tensor: Callable[[torch.Tensor], torch.Tensor] | None = None):
        self._tensor = tensor
        self._classes = {class_name(cls): cls for cls in (*_OWN_CLASSES, *classes)}

    def unpack(self, packed: Any) -> Any:
        """Return the value behind a packed one; a part that was not state is left out of a dict, and None elsewhere."""
        kind = type(packed)
        if kind in PLAIN or kind is bytes:  # other programs' files hold bytes as they are
            return packed
        if isinstance(packed, torch.Tensor):
            return packed if self._tensor is None else self._tensor(packed)
        if kind is list:
            return [self.unpack(item) for item in packed]
        if kind is tuple:
            return tuple([self.unpack(item) for item in packed])
        if kind is OrderedDict:
            return with_metadata(OrderedDict(self._entries(packed)), packed)
        if kind is not dict:
            raise StateError(
                f"a {kind.__name__} is not a packed value; expected plain containers, tensors and tagged dicts."
            )
        if TAG not in packed:
            return dict(self._entries(packed))
        try:
            return self._unpack_tagged(packed[TAG], packed.get("value"))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"a saved {packed[TAG]} is damaged ({type(error).__name__}: {error}).") from error

    def _entries(self, packed: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        return [(key, self.unpack(item)) for key, item in packed.items() if tag_of(item) != NOT_STATE]

    def _unpack_tagged(self, tag: Any, content: Any) -> Any:
        if tag == NOT_STATE:
            return None
        if coder := _CODERS_BY_TAG.get(tag):
            return coder.unpack(self.unpack(content), self.find_class)
        if build := self._CONTAINERS.get(tag):
            return build(self, content)
        raise StateError(f"unknown tag {tag!r} in a saved value: it was written by a newer version, or is damaged.")

    def find_class(self, name: str, purpose: str) -> type:
        """Return the class of that name among those at hand; the file only names it, it is never imported."""
        if found := self._classes.get(name):
            return found
        declared = [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]
        for cls in (*self._classes.values(), *declared):
            if isinstance(cls, type) and name in _names_in_scripts(cls):
                return cls
        raise StateError(
            f"a saved {purpose} needs its class {name}, and classes are never imported by name from a file. Put a value of that "
            f"class in place before loading, or declare it: torch.serialization.add_safe_globals([{name.rpartition('.')[2]}])."
        )

    def _pairs(self, content: Any) -> list[tuple[Any, Any]]:
        return [(self.unpack(key), self.unpack(item)) for key, item in content if tag_of(item) != NOT_STATE]

    def _namedtuple(self, content: dict[str, Any]) -> Any:
        cls = self.find_class(content["class"], "namedtuple")
        return cls(**{name: self.unpack(item) for name, item in content["fields"].items()})

    def _dataclass(self, content: dict[str, Any]) -> Any:
        cls = self.find_class(content["class"], "dataclass")
        names = {field.name for field in dataclasses.fields(cls)}
        if names != set(content["fields"]):
            raise StateError(
                f"a saved {class_name(cls)} has the fields {sorted(content['fields'])}, the class has {sorted(names)}."
            )
        value: Any = object.__new__(cls)
        for name, item in content["fields"].items():
            object.__setattr__(value, name, self.unpack(item))
        return value

    _CONTAINERS: dict[str, Callable[..., Any]] = {
        "counter": lambda self, content: Counter(dict(self._pairs(content))),
        "ordered_dict": lambda self, content: OrderedDict(self._pairs(content)),
        "dict": lambda self, content: dict(self._pairs(content)),
        "set": lambda self, content: {self.unpack(item) for item in content},
        "frozenset": lambda self, content: frozenset(self.unpack(item) for item in content),
        "deque": lambda self, content: deque(map(self.unpack, content["items"]), maxlen=content["maxlen"]),
        "namedtuple": _namedtuple,
        "dataclass": _dataclass,
    }


def with_metadata(target: Any, source: Any) -> Any:
    """Carry over the `_metadata` that torch hangs on a module's state."""
    if (metadata := getattr(source, "_metadata", None)) is not None:
        target._metadata = metadata
    return target


def is_namedtuple(value: Any) -> bool:
    """Return whether a value is a namedtuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_dataclass(value: Any) -> bool:
    """Return whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def field_values(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance that have been set."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def replace_fields(value: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass instance with fields changed, frozen or not, without running its constructor."""
    clone = copy.copy(value)
    for name, change in changes.items():
        object.__setattr__(clone, name, change)
    return clone


def needs_class(value: Any) -> bool:
    """Return whether a value can only be rebuilt with its class."""
    return isinstance(value, Enum) or is_namedtuple(value) or is_dataclass(value)


def classes_in(live: Any) -> list[type]:
    """Return the enum, namedtuple and dataclass classes found in a value and its containers."""
    found: dict[type, None] = {}
    seen: set[int] = set()
    waiting = [live]
    while waiting:
        value = waiting.pop()
        if type(value) in PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if needs_class(value):
            found[type(value)] = None
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            waiting += value
        elif is_dataclass(value):
            waiting += field_values(value).values()
    return list(found)


def _is_plain_key(key: Any) -> bool:
    return all(map(_is_plain_key, key)) if type(key) is tuple else type(key) in PLAIN


def _names_in_scripts(cls: type) -> set[str]:
    """Return the names of a class: a script's are `__main__.X` when it runs and `script.X` when it is imported."""
    names = {class_name(cls)}
    main = sys.modules.get("__main__")
    script = getattr(getattr(main, "__spec__", None), "name", None) or Path(getattr(main, "__file__", None) or "").stem
    if cls.__module__ in ("__main__", script):
        names |= {f"__main__.{cls.__qualname__}", f"{script}.{cls.__qualname__}"}
    return names
