"""A nested state as JSON and named tensors, and back.

`flatten` walks what `torch.load(weights_only=True)` would accept (dicts, lists, tuples, plain values, tensors), puts
every tensor under a name made from its path (`model.encoder.weight`) and leaves a reference in its place; `unflatten`
is the inverse. What JSON lacks is an object whose key begins with `$` (`{"$tuple": [...]}`); a dict with such keys of
its own, or with keys that are not text, becomes a `$dict` of pairs, so nothing can be mistaken for a tag. Reading
makes builtin containers, numbers and tensors and can make nothing else: there is no tag that names a class. Richer
values (paths, arrays, generators) come here already packed into such containers by `context.codec`.

A tensor that appears twice (tied weights) is stored once, and is one tensor again after reading.
"""

import base64
import binascii
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import CheckpointError
from drivetrain.module.distributed_tensors import is_dtensor, local_part

DEPTH_LIMIT = 100
STATE_LIMIT = 256 * 2**20
"""Bytes of `state.json`. Long series belong into tensors, which have no limit."""

_LONGEST_DECIMAL = 2**10_000  # Python refuses to read decimals of more than 4,300 digits

SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Types a safetensors file can name. Others are stored as a view of one of these, and the reference says which."""

_VIEWED_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
_VIEW_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _VIEWED_DTYPES}

Path = tuple[object, ...]
IsLocal = Callable[[Path, object], bool]


@dataclass
class FlatState:
    """A state taken apart: JSON structure, whole tensors, tensors split over ranks, values of this rank alone."""

    structure: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sharded: dict[str, Tensor] = field(default_factory=dict)
    """DTensors by name; stored as views of storable types like the whole ones."""
    local: dict[str, Any] = field(default_factory=dict)
    """Values that differ between ranks, by name, as they were given."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tensors that were met again, and the name each is stored under."""
    viewed: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of tensors that are stored as a view of another type."""

    def to_json(self) -> bytes:
        """Return the text of `state.json`."""
        data = json.dumps(self.structure, allow_nan=False, separators=(",", ":")).encode()
        if len(data) > STATE_LIMIT:
            raise CheckpointError(
                f"the plain values of this state make {len(data):,} bytes of JSON; at most {STATE_LIMIT:,} are "
                "allowed. Keep long series of numbers in tensors."
            )
        return data


def dotted(path: Path) -> str:
    """Write a path the way users write it: `optimizer.state.0.exp_avg`."""
    return ".".join(str(part) for part in path)


def flatten(state: object, *, is_local: IsLocal | None = None) -> FlatState:
    """Take a state apart; a value `is_local` claims is kept aside under its name for the file of this rank."""
    flattener = _Flattener(is_local)
    flattener.flat.structure = flattener.encode(state, ())
    return flattener.flat


def tensor_names(structure: object) -> set[str]:
    """Return the names of all tensors a structure refers to."""
    names: set[str] = set()
    waiting = [structure]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            if isinstance(name := value.get("$tensor"), str):
                names.add(name)
    return names


def unflatten(structure: object, tensors: Mapping[str, Tensor], local: Mapping[str, Any] | None = None) -> Any:
    """Build the state again; `local` gives the values of this rank by name."""
    return _Builder(tensors, local or {}).decode(structure, ())


def parse_structure(data: bytes, where: str) -> Any:
    """Read JSON that a stranger may have written: only size, depth and syntax can be wrong with it."""
    if len(data) > STATE_LIMIT:
        raise CheckpointError(f"{where} is larger than {STATE_LIMIT:,} bytes")
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not readable JSON ({error})") from None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


class _Flattener:
    def __init__(self, is_local: IsLocal | None):
        self.flat = FlatState()
        self._is_local = is_local
        self._seen: dict[tuple[object, ...], dict[str, str]] = {}
        self._alive: list[Tensor] = []  # a freed tensor's address may be given out again during the walk
        self._names: set[str] = set()
        self._encoders: dict[type, Callable[[Any, Path], Any]] = {
            float: self._float,
            int: self._int,
            complex: lambda value, path: {"$complex": [self._float(value.real, path), self._float(value.imag, path)]},
            bytes: lambda value, path: {"$bytes": base64.b64encode(value).decode()},
            dict: self._dict,
            OrderedDict: self._ordered,
            list: self._sequence,
            tuple: lambda value, path: {"$tuple": self._sequence(value, path)},
        }

    def encode(self, value: Any, path: Path) -> Any:
        if value is None or value is True or value is False or type(value) is str:
            return value
        if len(path) > DEPTH_LIMIT:
            raise CheckpointError(
                f"{dotted(path[:6])}...: nested more than {DEPTH_LIMIT} levels deep, or containing itself."
            )
        if self._is_local is not None and self._is_local(path, value):
            name = self._unique(path)
            self.flat.local[name] = value
            return {"$local": name}
        encoder = self._encoders.get(type(value))
        if encoder is not None:
            return encoder(value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        raise CheckpointError(
            f"{dotted(path) or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which a "
            "checkpoint cannot hold. Expected numbers, text, bytes, tensors, and dicts, lists and tuples of them; "
            "give an object a state_dict() and load_state_dict(), or leave it out."
        )

    def _float(self, value: float, path: Path) -> Any:
        return value if math.isfinite(value) else {"$float": repr(value)}

    def _int(self, value: int, path: Path) -> Any:
        return value if -_LONGEST_DECIMAL < value < _LONGEST_DECIMAL else {"$int": hex(value)}

    def _sequence(self, value: Any, path: Path) -> list[Any]:
        return [self.encode(item, (*path, index)) for index, item in enumerate(value)]

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _ordered(self, value: "OrderedDict[Any, Any]", path: Path) -> Any:
        encoded: dict[str, Any] = {"$ordered": self._pairs(value, path)}
        metadata = getattr(value, "_metadata", None)  # a module's state: version numbers of its parts
        if metadata is not None:
            encoded["metadata"] = self.encode(metadata, (*path, "_metadata"))
        return encoded

    def _pairs(self, value: Mapping[Any, Any], path: Path) -> list[list[Any]]:
        for key in value:
            if isinstance(key, Tensor):
                raise CheckpointError(
                    f"{dotted(path)}: a tensor is a key of this dict. Use a name or a number as the key."
                )
        return [[self.encode(key, (*path, "key")), self.encode(item, (*path, key))] for key, item in value.items()]

    def _tensor(self, tensor: Tensor, path: Path) -> dict[str, str]:
        sharded = is_dtensor(tensor)
        _check_storable(tensor, path, sharded)
        plain = tensor.detach()
        key = _identity(plain)
        if key is not None and key in self._seen:
            self.flat.aliases[dotted(path)] = self._seen[key]["$tensor"]
            return self._seen[key]
        name = self._unique(path)
        reference = {"$tensor": name}
        if plain.dtype in _VIEWED_DTYPES:
            if sharded:
                raise CheckpointError(f"{dotted(path)}: a sharded tensor of type {plain.dtype} cannot be stored.")
            reference["view"] = str(plain.dtype).removeprefix("torch.")
            self.flat.viewed[name] = plain.dtype
            plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain.view(torch.uint8)
        (self.flat.sharded if sharded else self.flat.tensors)[name] = plain
        if key is not None:
            self._seen[key] = reference
            self._alive.append(tensor)
        return reference

    def _unique(self, path: Path) -> str:
        name = base = dotted(path) or "value"
        count = 1
        while name in self._names:
            count += 1
            name = f"{base}#{count}"
        self._names.add(name)
        return name


def _check_storable(tensor: Tensor, path: Path, sharded: bool) -> None:
    reason = None
    if tensor.is_meta:
        reason = "has no values (it is on the meta device)"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        reason = f"is not dense ({tensor.layout})"
    elif tensor.is_quantized or (tensor.dtype not in SAFETENSORS_DTYPES and tensor.dtype not in _VIEWED_DTYPES):
        reason = f"has type {tensor.dtype}, which safetensors does not know"
    elif not sharded and hasattr(tensor, "__tensor_flatten__"):
        reason = f"is a {type(tensor).__name__}, a tensor made of tensors"
    if reason is not None:
        raise CheckpointError(f"{dotted(path)} {reason}. Convert it before saving, or leave it out.")


def _identity(tensor: Tensor) -> tuple[object, ...] | None:
    """Two tensors with equal keys show the same memory in the same way; an empty one is like no other."""
    local = local_part(tensor)
    if local.numel() == 0:
        return None
    return (
        local.device,
        local.data_ptr(),
        local.dtype,
        tuple(tensor.shape),
        local.stride(),
        local.is_conj(),
        local.is_neg(),
    )


class _Builder:
    def __init__(self, tensors: Mapping[str, Tensor], local: Mapping[str, Any]):
        self._tensors, self._local = tensors, local
        self._views: dict[tuple[str, str], Tensor] = {}
        self._tags: dict[str, Callable[[Any, Path], Any]] = {
            "$tuple": lambda content, path: tuple(self._list(content, path)),
            "$dict": lambda content, path: dict(self._pairs(content, path)),
            "$float": lambda content, path: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content],
            "$int": lambda content, path: int(content, 16),
            "$complex": lambda content, path: complex(*(float(self.decode(part, path)) for part in content)),
            "$bytes": lambda content, path: base64.b64decode(content, validate=True),
            "$local": lambda content, path: self._local[content],
        }

    def decode(self, value: Any, path: Path) -> Any:
        if len(path) > DEPTH_LIMIT:
            raise CheckpointError(f"{dotted(path[:6])}...: nested more than {DEPTH_LIMIT} levels deep")
        if isinstance(value, list):
            return self._list(value, path)
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item, (*path, key)) for key, item in value.items()}
        try:
            if tag == "$tensor":
                return self._tensor(value)
            if tag == "$ordered":
                return self._ordered(value, path)
            if len(value) != 1:
                raise ValueError(f"unexpected entries beside {tag}")
            return self._tags[tag](value[tag], path)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError, binascii.Error) as error:
            raise CheckpointError(f"{dotted(path)}: malformed {tag} ({type(error).__name__}: {error})") from None

    def _list(self, value: Any, path: Path) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError("expected a list")
        return [self.decode(item, (*path, index)) for index, item in enumerate(value)]

    def _pairs(self, value: Any, path: Path) -> list[tuple[Any, Any]]:
        if not isinstance(value, list):
            raise TypeError("expected a list")
        pairs = []
        for key, item in value:
            name = self.decode(key, (*path, "key"))
            pairs.append((name, self.decode(item, (*path, name))))
        return pairs

    def _ordered(self, value: dict[str, Any], path: Path) -> "OrderedDict[Any, Any]":
        ordered = OrderedDict(self._pairs(value["$ordered"], path))
        if "metadata" in value:
            ordered._metadata = self.decode(value["metadata"], (*path, "_metadata"))  # type: ignore[attr-defined]
        return ordered

    def _tensor(self, reference: dict[str, Any]) -> Tensor:
        name, view = reference["$tensor"], reference.get("view")
        if view is None:
            return self._tensors[name]
        if (name, view) not in self._views:
            dtype, stored = _VIEW_NAMES[view], self._tensors[name]
            if stored.dtype is not _VIEWED_DTYPES[dtype]:
                raise ValueError(f"{name} is stored as {stored.dtype}")
            viewed = torch.view_as_complex(stored.contiguous()) if dtype.is_complex else stored.view(dtype)
            self._views[name, view] = viewed
        return self._views[name, view]
