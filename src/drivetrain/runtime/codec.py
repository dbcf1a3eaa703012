"""Values as plain data and back, without pickle and without importing a class: one table of kinds for two forms.

The *state form* is what `torch.load(weights_only=True)` accepts: dicts, lists, tuples, numbers, strings and tensors stay as they are.
Everything else that people keep in a training session (paths, enums, arrays, generators, sets, dataclasses) becomes a dict with a
tag, `{"__drivetrain__": "path", "value": "data/train"}`.

The *JSON form* holds a value in state form, for files. What JSON lacks is an object with a key that begins with `$`, such as
`{"$tuple": [...]}`. A dict with such keys of its own, or with keys that are not text, becomes a `$dict` of pairs, so that nothing can be
mistaken for a tag. Tensors are left to the caller, who stores them under a name.

A tag never names code to run. Enums, namedtuples and dataclasses are built only with a class the program itself has
at hand: one found in the `live` value, or declared with `torch.serialization.add_safe_globals`.
"""

import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.containers import field_values, is_dataclass, is_namedtuple, join_path
from drivetrain.core.errors import CheckpointError, DrivetrainError, StateError
from drivetrain.core.event import Event
from drivetrain.core.time import Time, Timestamp, TimeUnit
from drivetrain.core.types import Item, StateDict
from drivetrain.runtime import coders
from drivetrain.runtime.coders import NOT_STATE, PLAIN, TAG, Content, class_name, tag_of, tagged

DEPTH_LIMIT = 100
"""Levels of nesting."""

_OWN_CLASSES: tuple[type, ...] = (Time, TimeUnit, Timestamp, Event)
_LONGEST_DECIMAL = 2**10_000  # Python does not read decimals of more than 4,300 digits
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)

Special = Callable[[Any, str], Any]
"""Packs what has its own way of being saved, given the value and its path; NotImplemented leaves it to the codec."""
T = TypeVar("T")


def pack(
    value: object, *, path: str = "", special: Special | None = None, tensor: Callable[[Tensor], object] | None = None
) -> Any:
    """Return `value` as plain tagged containers and tensors; tensors are detached, not copied.

    >>> pack({"root": Path("data"), "sizes": (1, 2)})
    {'root': {'__drivetrain__': 'path', 'value': 'data'}, 'sizes': (1, 2)}
    """
    return Packer(special, tensor or Tensor.detach).pack(value, path)


def unpack(packed: object, live: object = None) -> Any:
    """Return the value that was packed; enums, namedtuples and dataclasses take their class from `live`.

    >>> unpack(pack({"root": Path("data"), "sizes": {3, 4}}))
    {'root': PosixPath('data'), 'sizes': {3, 4}}
    """
    return Unpacker(classes_in(live)).unpack(packed)


def is_packed_generator(packed: object) -> bool:
    """Return whether a packed value is the state of a random generator, which differs from rank to rank."""
    return tag_of(packed) in coders.GENERATORS


class Packer:
    """One packing into the state form. It remembers which containers it is inside of, so that a cycle is an error and not a hang."""

    plain: ClassVar[frozenset[type]] = PLAIN
    error: ClassVar[type[DrivetrainError]] = StateError

    def __init__(self, special: Special | None, tensor: Callable[..., object]):
        self.special, self.tensor = special, tensor
        self._inside: set[int] = set()

    def pack(self, value: object, path: str) -> Any:
        """Return one value, at one path, as plain data and tensors."""
        if type(value) in self.plain:
            return value
        if id(value) in self._inside or len(self._inside) > DEPTH_LIMIT:
            name = f"{path[:60] or 'the value'}: a {type(value).__name__}"
            raise self.error(
                f"{name} contains itself, or is nested more than {DEPTH_LIMIT} levels deep, and cannot be saved."
            )
        self._inside.add(id(value))
        try:
            if (result := self.pack_special(value, path)) is not NotImplemented:
                return result
            if isinstance(value, Tensor) and not coders.is_made_of_tensors(value):
                return self._pack_tensor(value, path)
            return self._pack_known(value, path)
        finally:
            self._inside.discard(id(value))

    def pack_special(self, value: object, path: str) -> Any:
        """Return a value packed in a way of its own, `NotImplemented` where it has none."""
        return NotImplemented if self.special is None else self.special(value, path)

    def items(self, values: Iterable[object], path: str) -> list[object]:
        """Return the items of a sequence, packed."""
        return [
            value if type(value) in self.plain else self.pack(value, join_path(path, index))
            for index, value in enumerate(values)
        ]

    def entries(self, value: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        """Return the entries of a mapping whose keys are kept as they are, packed."""
        return {key: self.pack(item, join_path(path, key)) for key, item in value.items()}

    def pairs(self, value: Mapping[object, object], path: str) -> list[object]:
        """Return the entries of a mapping as pairs, keys and values packed."""
        return [(self.pack(key, path), self.pack(item, join_path(path, key))) for key, item in value.items()]

    def _pack_tensor(self, tensor: Tensor, path: str) -> object:
        return self.tensor(tensor)

    def _pack_known(self, value: object, path: str) -> object:
        if type(value) is list:
            return self.items(value, path)
        if coder := next((coder for coder in coders.CODERS if coder.holds(value)), None):
            return tagged(coder.tag, coder.pack(value, self, path))
        if isinstance(value, OrderedDict):
            return with_metadata(OrderedDict(self.entries(value, path)), value)
        if isinstance(value, dict):
            return self.entries(value, path)
        if isinstance(value, list):
            return self.items(value, path)
        if isinstance(value, tuple):
            return tuple(self.items(value, path))
        if isinstance(value, np.generic) and type(value.item()) in PLAIN:
            return value.item()
        if isinstance(value, str):  # a subclass of a plain type is saved as that type
            return str.__str__(value)
        for number in (int, float, complex):
            if isinstance(value, number):
                return number(value)  # type: ignore[arg-type]
        raise StateError(
            f"{path or 'the value'}: a {type(value).__name__} cannot be saved as plain data. Use numbers, strings, tensors, arrays "
            "and containers of them, or an object with state_dict() and load_state_dict()."
        )


class JsonPacker(Packer):
    """One packing of a value in state form into the JSON form. `tensor` stores a tensor, given its path too."""

    plain = frozenset({type(None), bool, str})
    error = CheckpointError

    def items(self, values: Iterable[object], path: str) -> list[object]:
        """Return the items of a sequence, packed; whole numbers, such as the order of an epoch, are only tested together."""
        found: list[Any] = list(values)
        if set(map(type, found)) == {int} and min(found) > -_LONGEST_DECIMAL and max(found) < _LONGEST_DECIMAL:
            return found
        return super().items(found, path)

    def pairs(self, value: Mapping[object, object], path: str) -> list[object]:
        """Return the entries of a mapping as lists of two."""
        if any(isinstance(key, Tensor) for key in value):
            raise CheckpointError(f"{path}: a tensor is a key of this dict. Use a name or a number as the key.")
        return [
            [self.pack(key, join_path(path, "key")), self.pack(item, join_path(path, key))]
            for key, item in value.items()
        ]

    def _pack_tensor(self, tensor: Tensor, path: str) -> object:
        return self.tensor(tensor, path)

    def _pack_known(self, value: Any, path: str) -> object:
        kind = type(value)
        if kind is float and math.isfinite(value):
            return value
        if kind is int and -_LONGEST_DECIMAL < value < _LONGEST_DECIMAL:
            return value
        if kind is list:
            return self.items(value, path)
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return self.entries(value, path)
        if kind is OrderedDict:
            packed: StateDict = {"$ordered": self.pairs(value, path)}
            # A module's state: version numbers of its parts.
            if (metadata := getattr(value, "_metadata", None)) is not None:
                packed["metadata"] = self.pack(metadata, join_path(path, "_metadata"))
            return packed
        if coder := coders.JSON_CODERS.get(kind):
            return {f"${coder.tag}": coder.pack(value, self, path)}
        raise CheckpointError(
            f"{path or 'the state'} is a {class_name(kind)}, which a checkpoint cannot hold. Expected numbers, text, bytes, tensors, "
            "and dicts, lists and tuples of them; give an object a state_dict() and load_state_dict(), or remove it."
        )


class Unpacker:
    """One unpacking of the state form, with the classes the program has at hand."""

    error: ClassVar[type[DrivetrainError]] = StateError

    def __init__(self, classes: Iterable[type] = (), tensor: Callable[[Tensor], Tensor] | None = None):
        self._tensor = tensor
        self._classes = {class_name(cls): cls for cls in (*_OWN_CLASSES, *classes)}
        self._depth = 0

    def unpack(self, packed: Any, path: str = "") -> Any:
        """Return the value behind a packed one; a part that was not state is left out of a dict, and None elsewhere."""
        kind = type(packed)
        if kind in PLAIN or kind is bytes:  # other programs' files hold bytes as they are
            return packed
        if self._depth > DEPTH_LIMIT:
            raise self.error(f"{path[:60]}...: nested more than {DEPTH_LIMIT} levels deep")
        self._depth += 1
        try:
            if kind is list:
                return self.items(packed, path)
            if kind is not dict:
                return self._unpack_other(packed, path)
            key = self._tag_key(packed)
            return self.entries(packed, path) if key is None else self._open(key, packed, path)
        finally:
            self._depth -= 1

    def _open(self, key: str, packed: StateDict, path: str) -> object:
        try:
            return self._unpack_tagged(key, packed, path)
        except _DAMAGE as error:
            if isinstance(error, self.error):
                raise
            name = f"{path}: a saved {packed[TAG] if key == TAG else key}".removeprefix(": ")
            raise self.error(f"{name} is damaged ({type(error).__name__}: {error}).") from error

    def items(self, packed: Content, path: str) -> list[Item]:
        """Return the items of a packed list."""
        return [
            item if type(item) in PLAIN else self.unpack(item, join_path(path, index))
            for index, item in enumerate(packed)
        ]

    def entries(self, packed: Mapping[object, object], path: str) -> dict[Any, Any]:
        """Return the entries of a packed dict."""
        kept = [(key, item) for key, item in packed.items() if not self._leaves_out(item)]
        return {key: self.unpack(item, join_path(path, key)) for key, item in kept}

    def pairs(self, content: Content, path: str) -> list[tuple[object, object]]:
        """Return the entries of a mapping that is packed as pairs."""
        entries = [(self.unpack(key, path), item) for key, item in content if not self._leaves_out(item)]
        return [(key, self.unpack(item, join_path(path, key))) for key, item in entries]

    def find_class(self, name: str, purpose: str) -> type:
        """Return the class of that name among those at hand; the file only names it, it is never imported."""
        if found := self._classes.get(name):
            return found
        declared = [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]
        for cls in (*self._classes.values(), *declared):
            if isinstance(cls, type) and name in names_in_scripts(cls):
                return cls
        raise StateError(
            f"a saved {purpose} needs its class {name}, and classes are never imported by name from a file. Assign a value of that "
            f"class before loading, or declare the class: torch.serialization.add_safe_globals([{name.rpartition('.')[2]}])."
        )

    def _leaves_out(self, packed: object) -> bool:
        return tag_of(packed) == NOT_STATE

    def _tag_key(self, packed: dict[Any, Any]) -> str | None:
        """Return the key that marks a dict as the packed form of another value, or None."""
        return TAG if TAG in packed else None

    def _unpack_other(self, packed: object, path: str) -> object:
        if isinstance(packed, Tensor):
            return packed if self._tensor is None else self._tensor(packed)
        if type(packed) is tuple:
            return tuple(self.items(packed, path))
        if type(packed) is OrderedDict:
            return with_metadata(OrderedDict(self.entries(packed, path)), packed)
        raise StateError(f"a {type(packed).__name__} is not a packed value: a plain container, tensor or tagged dict.")

    def _unpack_tagged(self, key: str, packed: StateDict, path: str) -> object:
        tag = packed[key]
        if tag == NOT_STATE:
            return None
        if coder := coders.CODERS_BY_TAG.get(tag):
            return coder.unpack(packed.get("value"), self, path)
        raise StateError(f"unknown tag {tag!r} in a saved value: it was written by a newer version, or is damaged.")


class JsonUnpacker(Unpacker):
    """One unpacking of the JSON form into the state form: builtin containers and numbers, and what the caller has for further tags."""

    error = CheckpointError

    def __init__(self, given: Mapping[str, Callable[[StateDict], object]]):
        super().__init__()
        self._given = given
        """For each further tag, what makes the value of a dict with that tag."""

    def items(self, packed: Content, path: str) -> list[Item]:
        """Return the items of a JSON array."""
        return super().items(_checked_list(packed), path)

    def pairs(self, content: Content, path: str) -> list[tuple[object, object]]:
        """Return the entries of a mapping from its lists of two."""
        return super().pairs(_checked_list(content), path)

    def _leaves_out(self, packed: object) -> bool:
        return False

    def _tag_key(self, packed: StateDict) -> str | None:
        return next((key for key in packed if key.startswith("$")), None)

    def _unpack_tagged(self, key: str, packed: StateDict, path: str) -> object:
        if key in self._given:
            return self._given[key](packed)
        if key == "$ordered":
            ordered = OrderedDict(self.pairs(packed[key], path))
            if "metadata" in packed:
                ordered._metadata = self.unpack(packed["metadata"], path)  # type: ignore[attr-defined]
            return ordered
        if len(packed) != 1:
            raise ValueError(f"unexpected entries next to {key}")
        return coders.JSON_CODERS_BY_TAG[key].unpack(packed[key], self, path)


def _checked_list(content: Content) -> Content:
    if not isinstance(content, list):
        raise TypeError("expected a list")
    return content


def with_metadata(target: T, source: object) -> T:
    """Carry over the `_metadata` that torch hangs on a module's state."""
    if (metadata := getattr(source, "_metadata", None)) is not None:
        target._metadata = metadata  # type: ignore[attr-defined]
    return target


def needs_class(value: object) -> bool:
    """Return whether a value can only be rebuilt with its class."""
    return isinstance(value, Enum) or is_namedtuple(value) or is_dataclass(value)


def classes_in(live: object) -> list[type]:
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


def names_in_scripts(cls: type) -> set[str]:
    """Return the names of a class: a script's are `__main__.X` when it runs and `script.X` when it is imported."""
    names = {class_name(cls)}
    main = sys.modules.get("__main__")
    script = getattr(getattr(main, "__spec__", None), "name", None) or Path(getattr(main, "__file__", None) or "").stem
    if cls.__module__ in ("__main__", "__mp_main__", script):  # the second in a process that was spawned
        names |= {f"__main__.{cls.__qualname__}", f"{script}.{cls.__qualname__}"}
    return names
