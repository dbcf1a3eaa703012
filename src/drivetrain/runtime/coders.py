"""The table of kinds: how each kind of value becomes plain data and comes back. `codec.py` walks containers and uses it.

Paths, enums, dates and torch's own descriptive types become text; arrays and the states of random generators become
tensors. Each row is a tag, a test and two small functions.
"""

import base64
import dataclasses
import math
import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from enum import Enum, Flag
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.containers import field_values, is_dataclass, is_namedtuple
from drivetrain.core.errors import StateError, unknown_name
from drivetrain.core.types import StateDict
from drivetrain.runtime.seeds import random_state, set_random_state

if TYPE_CHECKING:
    from drivetrain.runtime.codec import Packer, Unpacker

TAG = "__drivetrain__"
"""The key that marks a dict as the packed form of some other value."""
NOT_STATE = "not state"
"""The tag of a value without state, so that positions and names stay as they were."""
PLAIN = frozenset({type(None), bool, int, float, complex, str})
"""Types that the state form keeps as they are."""

Content = Any
"""What follows a tag: untrusted data from a file."""


def tagged(tag: str, value: object) -> StateDict:
    """Return the packed form of a value: a dict of two entries."""
    return {TAG: tag, "value": value}


def tag_of(packed: object) -> str | None:
    """Return the tag of a packed value, or None for a plain one."""
    return packed.get(TAG) if type(packed) is dict else None


def class_name(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


class Coder(NamedTuple):
    """How values of one kind become plain data and come back."""

    tag: str
    holds: Callable[[Any], bool]
    pack: "Callable[[Any, Packer, str], Content]"
    unpack: "Callable[[Content, Unpacker, str], Any]"


def value_coder(value: object) -> Coder | None:
    """Return the row for a value that is not a container, or None when it has none."""
    return next((coder for coder in VALUE_CODERS if coder.holds(value)), None)


def _simple(tag: str, cls: type, write: Callable[[Any], object], read: Callable[[Any], object]) -> Coder:
    """Return the row of a class whose values become plain data by one function and come back by another."""
    return Coder(
        tag,
        lambda value: isinstance(value, cls),
        lambda value, packer, path: write(value),
        lambda content, unpacker, path: read(content),
    )


def enum_member(cls: type[Enum], content: Content) -> Enum:
    """Return the member of an Enum that was saved."""
    if "value" in content:
        return cls(content["value"])
    if content["name"] not in cls.__members__:
        raise StateError(unknown_name(f"member of {class_name(cls)}", content["name"], cls.__members__))
    return cls[content["name"]]


def _pack_enum(value: Enum, packer: "Packer", path: str) -> dict[str, object]:
    # Members are known by name, combinations of flags only by value.
    stored = {"value": packer.pack(value.value, path)} if isinstance(value, Flag) else {"name": value.name}
    return {"class": class_name(type(value)), **stored}


def _unpack_enum(content: Content, unpacker: "Unpacker", path: str) -> Enum:
    cls = unpacker.find_class(content["class"], "Enum")
    if not issubclass(cls, Enum):
        raise StateError(f"a saved Enum names {content['class']}, which is not an Enum.")
    return enum_member(cls, unpacker.unpack(content, path))


def _is_array(value: object) -> bool:
    # A mask would be lost, and objects need pickle.
    return isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray) and not value.dtype.hasobject


def _pack_array(value: np.ndarray, packer: "Packer", path: str) -> object:
    try:
        owned = value.flags.writeable and min(value.strides, default=0) >= 0
        return packer.pack(torch.from_numpy(value if owned else value.copy()), path)
    # Text, dates, records, foreign byte order: torch has no such type, so bytes are kept.
    except (TypeError, ValueError):
        raw = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8))
        described = {"bytes": raw, "dtype": np.lib.format.dtype_to_descr(value.dtype), "shape": list(value.shape)}
        return packer.pack(described, path)


def _unpack_array(content: Content, unpacker: "Unpacker", path: str) -> np.ndarray:
    content = unpacker.unpack(content, path)
    if isinstance(content, Tensor):
        return content.detach().cpu().numpy().copy()
    raw = content["bytes"].cpu().numpy().tobytes()
    return np.frombuffer(raw, dtype=np.lib.format.descr_to_dtype(content["dtype"])).reshape(content["shape"]).copy()


def is_made_of_tensors(value: object) -> bool:
    """Return whether this is a tensor of a class that holds other tensors, such as a quantized one. One that is split over ranks is not."""
    if not isinstance(value, Tensor) or not hasattr(value, "__tensor_flatten__"):
        return False
    return not hasattr(value, "full_tensor") and not value.is_nested


def inner_tensors(value: Tensor) -> dict[str, Tensor]:
    """Return the tensors by which a tensor is held, by name."""
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}  # type: ignore[attr-defined]


def _pack_tensors(value: Tensor, packer: "Packer", path: str) -> dict[str, object]:
    context = value.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    content = {
        "inner": inner_tensors(value),
        "context": context,
        "size": list(value.size()),
        "stride": list(value.stride()),
    }
    return {"class": class_name(type(value)), **packer.entries(content, path)}


def _unpack_tensors(content: Content, unpacker: "Unpacker", path: str) -> Tensor:
    cls = unpacker.find_class(content["class"], "tensor")
    if not issubclass(cls, Tensor) or not hasattr(cls, "__tensor_unflatten__"):
        raise StateError(f"a saved tensor names {content['class']}, which is not a tensor made of tensors.")
    whole = unpacker.entries(content, path)
    made: Tensor = cls.__tensor_unflatten__(whole["inner"], whole["context"], whole["size"], whole["stride"])
    return made


def _unpack_dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{text!r} is not a torch dtype.")
    return dtype


def _pairs(tag: str, holds: Callable[[Any], bool], make: Callable[[list[Any]], object]) -> Coder:
    """Return the row of a mapping that is saved as pairs."""
    return Coder(
        tag,
        holds,
        lambda value, packer, path: packer.pairs(value, path),
        lambda content, unpacker, path: make(unpacker.pairs(content, path)),
    )


def _items(tag: str, cls: type, ordered: Callable[[Any], list[Any]] = list) -> Coder:
    """Return the row of a collection that is saved as a list."""
    return Coder(
        tag,
        lambda value: isinstance(value, cls),
        lambda value, packer, path: packer.items(ordered(value), path),
        lambda content, unpacker, path: cls(unpacker.items(content, path)),
    )


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def _read_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class Generators(NamedTuple):
    """One kind of random generator."""

    holds: Callable[[Any], bool]
    state: Callable[[Any], Any]
    make: Callable[[Content], Any]
    """Returns a generator that a saved state fits."""
    restore: Callable[[Any, Content], None]
    reseed: Callable[[Any, int], object]
    """Makes a generator start again from a seed."""


def _restore_torch(generator: torch.Generator, content: Content) -> None:
    # A CPU generator's state does not hold the number that initial_seed() returns.
    generator.manual_seed(content["seed"]).set_state(content["state"].cpu())


def _is_numpy_random(name: str) -> Callable[[object], bool]:
    def holds(value: object) -> bool:
        # numpy loads its random part lazily; a value of its types cannot exist before that.
        module = sys.modules.get("numpy.random")
        return module is not None and isinstance(value, getattr(module, name))

    return holds


def _numpy_bits(content: Content) -> np.random.BitGenerator:
    kind, kinds = content["bit_generator"], ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    if kind not in kinds:
        raise StateError(unknown_name("numpy bit generator", kind, kinds))
    made: np.random.BitGenerator = getattr(np.random, kind)()
    return made


GENERATORS: dict[str, Generators] = {
    "generator": Generators(
        lambda value: isinstance(value, torch.Generator),
        lambda value: {"device": str(value.device), "seed": value.initial_seed(), "state": value.get_state()},
        lambda content: torch.Generator(torch.device(content["device"]).type),  # this process may have another device
        _restore_torch,
        torch.Generator.manual_seed,
    ),
    "numpy_generator": Generators(
        _is_numpy_random("Generator"),
        lambda value: value.bit_generator.state,
        lambda content: np.random.Generator(_numpy_bits(content)),
        lambda generator, content: setattr(generator.bit_generator, "state", content),
        lambda generator, seed: setattr(generator.bit_generator, "state", type(generator.bit_generator)(seed).state),
    ),
    "numpy_random_state": Generators(
        _is_numpy_random("RandomState"),
        lambda value: value.get_state(legacy=False),
        lambda content: np.random.RandomState(_numpy_bits(content)),
        lambda generator, content: generator.set_state(content),
        lambda generator, seed: generator.set_state(np.random.RandomState(seed % 2**32).get_state(legacy=False)),
    ),
    "random": Generators(
        lambda value: isinstance(value, random.Random) and not isinstance(value, random.SystemRandom),
        random_state,
        lambda content: random.Random(),
        set_random_state,
        random.Random.seed,
    ),
}


def generator_kind(value: object) -> Generators | None:
    """Return the row of a random generator, None for any other value."""
    return next((kind for kind in GENERATORS.values() if kind.holds(value)), None)


def _generator_coder(tag: str, kind: Generators) -> Coder:
    def unpack_generator(content: Content, unpacker: "Unpacker", path: str) -> object:
        content = unpacker.unpack(content, path)
        generator = kind.make(content)
        kind.restore(generator, content)
        return generator

    return Coder(tag, kind.holds, lambda value, packer, path: packer.pack(kind.state(value), path), unpack_generator)


def _pack_fields(value: Any, packer: "Packer", path: str) -> StateDict:
    fields = value._asdict() if is_namedtuple(value) else field_values(value)
    return {"class": class_name(type(value)), "fields": packer.entries(fields, path)}


def _unpack_namedtuple(content: Content, unpacker: "Unpacker", path: str) -> object:
    cls: Any = unpacker.find_class(content["class"], "namedtuple")
    values = {name: unpacker.unpack(item, path) for name, item in content["fields"].items()}
    return cls._make(values[name] for name in cls._fields)  # its own __new__ may take other arguments


def _unpack_dataclass(content: Content, unpacker: "Unpacker", path: str) -> object:
    cls: Any = unpacker.find_class(content["class"], "dataclass")
    names = {field.name for field in dataclasses.fields(cls)}
    if names != set(content["fields"]):
        saved = sorted(content["fields"])
        raise StateError(f"a saved {class_name(cls)} has the fields {saved}, the class has {sorted(names)}.")
    value: Any = object.__new__(cls)
    for name, item in content["fields"].items():
        object.__setattr__(value, name, unpacker.unpack(item, path))
    return value


def _sorted(value: "set[Any] | frozenset[Any]") -> list[Any]:
    """Return the items of a set in an order that is the same in every process, so that equal states give equal files."""
    return sorted(value, key=repr)


def _is_plain_key(key: object) -> bool:
    return all(map(_is_plain_key, key)) if type(key) is tuple else type(key) in PLAIN


def _needs_pairs(value: object) -> bool:
    """Return whether a dict cannot be a dict of the state form: it has other keys, or the tag's."""
    if not isinstance(value, dict):
        return False
    return not all(map(_is_plain_key, value)) or (TAG in value and not isinstance(value, OrderedDict))


VALUE_CODERS: tuple[Coder, ...] = (
    Coder("enum", lambda value: isinstance(value, Enum), _pack_enum, _unpack_enum),
    Coder("ndarray", _is_array, _pack_array, _unpack_array),
    Coder(  # item() of one is a bare number, or a date of less precision
        "numpy_time",
        lambda value: isinstance(value, np.datetime64 | np.timedelta64),
        lambda value, packer, path: _pack_array(np.asarray(value), packer, path),
        lambda content, unpacker, path: _unpack_array(content, unpacker, path)[()],
    ),
    # In text, because torch's restricted reader cannot read empty bytes.
    _simple("bytes", bytes, _base64, _read_base64),
    _simple("bytearray", bytearray, _base64, lambda text: bytearray(_read_base64(text))),
    _simple("path", PurePath, str, Path),
    _simple("datetime", datetime, datetime.isoformat, datetime.fromisoformat),  # a datetime is a date: it comes first
    _simple("date", date, date.isoformat, date.fromisoformat),
    _simple("time", time, time.isoformat, time.fromisoformat),
    _simple(
        "timedelta", timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda x: timedelta(*x)
    ),
    _simple("dtype", torch.dtype, lambda value: str(value).removeprefix("torch."), _unpack_dtype),
    _simple("device", torch.device, str, torch.device),
    _simple("size", torch.Size, list, torch.Size),
    _simple("range", range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    *(_generator_coder(tag, kind) for tag, kind in GENERATORS.items()),
)
"""Kinds of single values. In the order they are asked, here and below: subclasses come before their bases."""

CODERS: tuple[Coder, ...] = (
    *VALUE_CODERS,
    Coder("tensors", is_made_of_tensors, _pack_tensors, _unpack_tensors),
    Coder("namedtuple", is_namedtuple, _pack_fields, _unpack_namedtuple),
    Coder("dataclass", is_dataclass, _pack_fields, _unpack_dataclass),
    _pairs("counter", lambda value: isinstance(value, Counter), lambda pairs: Counter(dict(pairs))),
    _pairs("ordered_dict", lambda value: isinstance(value, OrderedDict) and _needs_pairs(value), OrderedDict),
    _pairs("dict", _needs_pairs, dict),
    _items("frozenset", frozenset, _sorted),
    _items("set", set, _sorted),
    Coder(
        "deque",
        lambda value: isinstance(value, deque),
        lambda value, packer, path: {"items": packer.items(value, path), "maxlen": value.maxlen},
        lambda content, unpacker, path: deque(unpacker.items(content["items"], path), maxlen=content["maxlen"]),
    ),
)
"""What the state form does not keep as it is."""

CODERS_BY_TAG = {coder.tag: coder for coder in CODERS}

JSON_CODERS: dict[type, Coder] = {
    float: _simple("float", float, repr, lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]),
    int: _simple("int", int, hex, lambda text: int(text, 16)),
    complex: Coder(
        "complex",
        lambda value: isinstance(value, complex),
        lambda value, packer, path: packer.items([value.real, value.imag], path),
        lambda content, unpacker, path: complex(*map(float, unpacker.items(content, path))),
    ),
    bytes: CODERS_BY_TAG["bytes"],
    tuple: _items("tuple", tuple),
    dict: CODERS_BY_TAG["dict"],
}
"""What the state form keeps and JSON does not, by type."""

JSON_CODERS_BY_TAG = {f"${coder.tag}": coder for coder in JSON_CODERS.values()}
