"""How single values become plain data: one entry per kind of value, each a tag, a test and two small functions.

Paths, enums, dates and torch's own descriptive types become text; arrays and the states of random generators become
tensors. Containers are in `codec.py`, which walks them and uses this table for what is inside.
"""

import base64
import random
import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from enum import Enum, Flag
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from drivetrain.core.errors import StateError, unknown_name

TAG = "__drivetrain__"
"""The key that marks a dict as the packed form of some other value."""

Inner = Callable[[Any], Any]
FindClass = Callable[[str, str], type]
"""Returns a class the program has at hand, given the name in the file and what it is needed for."""


class Coder(NamedTuple):
    """How values of one kind become plain data and come back."""

    tag: str
    holds: Callable[[Any], bool]
    pack: Callable[[Any], Any]
    """Returns the content of the tagged dict, to be packed further."""
    unpack: Callable[[Any, FindClass], Any]
    """Takes that content, unpacked."""


def tagged(tag: str, value: Any) -> dict[str, Any]:
    """Return the packed form of a value: a dict of two entries."""
    return {TAG: tag, "value": value}


def tag_of(packed: Any) -> str | None:
    """Return the tag of a packed value, or None for a plain one."""
    return packed.get(TAG) if type(packed) is dict else None


def class_name(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def enum_member(cls: type[Enum], content: dict[str, Any]) -> Enum:
    """Return the member of an Enum that was saved."""
    if "value" in content:
        return cls(content["value"])
    if content["name"] not in cls.__members__:
        raise StateError(unknown_name(f"member of {class_name(cls)}", content["name"], cls.__members__))
    return cls[content["name"]]


def _pack_enum(value: Enum) -> dict[str, Any]:
    # Members are known by name, combinations of flags only by value.
    stored = {"value": value.value} if isinstance(value, Flag) else {"name": value.name}
    return {"class": class_name(type(value)), **stored}


def _unpack_enum(content: dict[str, Any], find_class: FindClass) -> Enum:
    cls = find_class(content["class"], "Enum")
    if not issubclass(cls, Enum):
        raise StateError(f"a saved Enum names {content['class']}, which is none.")
    return enum_member(cls, content)


def _pack_array(value: np.ndarray) -> Any:
    try:
        owned = value.flags.writeable and min(value.strides, default=0) >= 0
        return torch.from_numpy(value if owned else value.copy())
    except (
        TypeError,
        ValueError,
    ):  # text, dates, records, foreign byte order: torch has no such type, so the bytes are kept
        raw = (
            torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            if value.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        return {"bytes": raw, "dtype": np.lib.format.dtype_to_descr(value.dtype), "shape": list(value.shape)}


def _unpack_array(content: Any, find_class: FindClass) -> np.ndarray:
    if isinstance(content, torch.Tensor):
        return content.detach().cpu().numpy().copy()
    raw = content["bytes"].cpu().numpy().tobytes()
    return np.frombuffer(raw, dtype=np.lib.format.descr_to_dtype(content["dtype"])).reshape(content["shape"]).copy()


def _unpack_generator(content: dict[str, Any], find_class: FindClass) -> torch.Generator:
    generator = torch.Generator(device=content["device"])
    generator.manual_seed(content["seed"])
    generator.set_state(content["state"].cpu())
    return generator


def _is_numpy_generator(value: Any) -> bool:
    # numpy loads its random part lazily; a value of its types cannot exist before that.
    module = sys.modules.get("numpy.random")
    return module is not None and isinstance(value, module.Generator)


def _is_numpy_random_state(value: Any) -> bool:
    module = sys.modules.get("numpy.random")
    return module is not None and isinstance(value, module.RandomState)


def _numpy_bits(kind: str) -> Any:
    kinds = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    if kind not in kinds:
        raise StateError(unknown_name("numpy bit generator", kind, kinds))
    return getattr(np.random, kind)()


def _unpack_numpy_generator(content: dict[str, Any], find_class: FindClass) -> Any:
    bits = _numpy_bits(content["bit_generator"])
    bits.state = content
    return np.random.Generator(bits)


def _unpack_numpy_random_state(content: dict[str, Any], find_class: FindClass) -> Any:
    state = np.random.RandomState(_numpy_bits(content["bit_generator"]))
    state.set_state(content)
    return state


def _pack_random(value: random.Random) -> dict[str, Any]:
    version, words, gauss = value.getstate()
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def random_state(content: dict[str, Any]) -> tuple[Any, ...]:
    """Return what `random.Random.setstate` takes."""
    return content["version"], tuple(content["words"].tolist()), content["gauss"]


def _unpack_random(content: dict[str, Any], find_class: FindClass) -> random.Random:
    generator = random.Random()
    generator.setstate(random_state(content))
    return generator


def _unpack_dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{text!r} is not a torch dtype.")
    return dtype


def _to_text(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def _simple(tag: str, cls: type, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> Coder:
    return Coder(tag, lambda value: isinstance(value, cls), write, lambda content, find_class: read(content))


VALUE_CODERS: tuple[Coder, ...] = (
    Coder("enum", lambda value: isinstance(value, Enum), _pack_enum, _unpack_enum),
    Coder(
        "ndarray", lambda value: isinstance(value, np.ndarray) and not value.dtype.hasobject, _pack_array, _unpack_array
    ),
    _simple("bytes", bytes, _to_text, base64.b64decode),  # torch's restricted reader stumbles over empty bytes
    _simple("bytearray", bytearray, _to_text, lambda text: bytearray(base64.b64decode(text))),
    _simple("path", PurePath, str, Path),
    _simple("datetime", datetime, datetime.isoformat, datetime.fromisoformat),  # a datetime is a date: it comes first
    _simple("date", date, date.isoformat, date.fromisoformat),
    _simple("time", time, time.isoformat, time.fromisoformat),
    _simple(
        "timedelta",
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
    ),
    _simple("dtype", torch.dtype, lambda value: str(value).removeprefix("torch."), _unpack_dtype),
    _simple("device", torch.device, str, torch.device),
    _simple("size", torch.Size, list, torch.Size),
    _simple("range", range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    Coder(
        "generator",
        lambda value: isinstance(value, torch.Generator),
        lambda value: {"device": str(value.device), "seed": value.initial_seed(), "state": value.get_state()},
        _unpack_generator,
    ),
    Coder("numpy_generator", _is_numpy_generator, lambda value: value.bit_generator.state, _unpack_numpy_generator),
    Coder(
        "numpy_random_state",
        _is_numpy_random_state,
        lambda value: value.get_state(legacy=False),
        _unpack_numpy_random_state,
    ),
    Coder(
        "random",
        lambda value: isinstance(value, random.Random) and not isinstance(value, random.SystemRandom),
        _pack_random,
        _unpack_random,
    ),
)
"""In the order they are asked: subclasses come before their bases."""

GENERATOR_TAGS = frozenset({"generator", "numpy_generator", "numpy_random_state", "random"})


def value_coder(value: Any) -> Coder | None:
    """Return the entry for a value, or None when it is of no kind listed here."""
    return next((coder for coder in VALUE_CODERS if coder.holds(value)), None)
