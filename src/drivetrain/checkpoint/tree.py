"""A nested state as JSON and named tensors, and back.

`flatten` takes a value in the state form of `runtime.codec` to its JSON form, puts every tensor under a name made from its path
(`model.encoder.weight`) and leaves a reference in its place; `unflatten` is the inverse. Reading makes builtin containers, numbers
and tensors and can make nothing else: there is no tag that names a class.

A tensor that appears twice (tied weights) is stored once, and is one tensor again after reading.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import is_dtensor, local_part
from drivetrain.runtime.codec import JsonPacker, JsonUnpacker

STATE_LIMIT = 256 * 2**20
"""Bytes of `state.json`. Store long series in tensors, which have no limit."""

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
"""Types a safetensors file can name. Others are stored as a view of one of these, which the reference names."""

_VIEWED_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
_VIEW_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _VIEWED_DTYPES}

IsLocal = Callable[[str, object], bool]
"""Returns whether the value at a path belongs to one rank alone."""


@dataclass
class FlatState:
    """A state split into JSON structure, full tensors, tensors split over ranks, and this rank's own values."""

    structure: object = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sharded: dict[str, Tensor] = field(default_factory=dict)
    """DTensors by name; stored as views of storable types like the whole ones."""
    local: StateDict = field(default_factory=dict)
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


def flatten(state: object, *, is_local: IsLocal | None = None) -> FlatState:
    """Split a state into its parts. Values that `is_local` selects go to the file of this rank."""
    flattener = _Flattener(is_local)
    flattener.flat.structure = JsonPacker(flattener.local if is_local else None, flattener.tensor).pack(state, "")
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


def unflatten(structure: object, tensors: Mapping[str, Tensor], local: Mapping[str, object] | None = None) -> Any:
    """Rebuild the state. `local` gives the values of this rank by name."""
    views: dict[tuple[str, str], Tensor] = {}

    def own(reference: StateDict) -> object:
        if len(reference) != 1:
            raise ValueError("unexpected entries next to $local")
        return (local or {})[reference["$local"]]

    def tensor(reference: StateDict) -> Tensor:
        name, view, order = reference["$tensor"], reference.get("view"), reference.get("order")
        if order is not None:
            if (name, "") not in views:
                views[name, ""] = _laid_out(tensors[name], order)
            return views[name, ""]
        if view is None:
            return tensors[name]
        if (name, view) not in views:
            dtype, stored = _VIEW_NAMES[view], tensors[name]
            if stored.dtype is not _VIEWED_DTYPES[dtype]:
                raise ValueError(f"{name} is stored as {stored.dtype}")
            views[name, view] = torch.view_as_complex(stored.contiguous()) if dtype.is_complex else stored.view(dtype)
        return views[name, view]

    return JsonUnpacker({"$tensor": tensor, "$local": own}).unpack(structure)


def parse_structure(data: bytes, where: str) -> Any:
    """Read JSON from an untrusted file. Only its size, depth and syntax can be wrong."""
    if len(data) > STATE_LIMIT:
        raise CheckpointError(f"{where} is larger than {STATE_LIMIT:,} bytes")
    try:
        return json.loads(data, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not readable JSON ({error})") from None


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


class _Flattener:
    """Gives every tensor and every value of one rank alone a name, and leaves a reference in its place."""

    def __init__(self, is_local: IsLocal | None):
        self.flat, self._is_local = FlatState(), is_local
        self._seen: dict[tuple[object, ...], StateDict] = {}
        self._alive: list[Tensor] = []  # a freed tensor's address may be given out again during the walk
        self._names = {"__metadata__"}  # the header of a safetensors file uses this name itself

    def local(self, value: object, path: str) -> object:
        """Take a value of one rank alone out of the state."""
        assert self._is_local is not None
        if not self._is_local(path, value):
            return NotImplemented
        name = self._unique(path)
        self.flat.local[name] = value
        return {"$local": name}

    def tensor(self, tensor: Tensor, path: str) -> StateDict:
        """Take a tensor out of the state; one that was met before is stored once."""
        sharded = is_dtensor(tensor)
        _check_storable(tensor, path, sharded)
        plain = tensor.detach()
        key = _identity(plain)
        if key is not None and key in self._seen:
            self.flat.aliases[path] = self._seen[key]["$tensor"]
            return self._seen[key]
        name = self._unique(path)
        reference: StateDict = {"$tensor": name}
        if plain.dtype in _VIEWED_DTYPES:
            if sharded:
                raise CheckpointError(f"{path}: a sharded tensor of type {plain.dtype} cannot be stored.")
            reference["view"] = str(plain.dtype).removeprefix("torch.")
            self.flat.viewed[name] = plain.dtype
            plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain.view(torch.uint8)
        elif order := None if sharded else _memory_order(plain):
            reference["order"] = order
        (self.flat.sharded if sharded else self.flat.tensors)[name] = plain
        if key is not None:
            self._seen[key] = reference
            self._alive.append(tensor)
        return reference

    def _unique(self, path: str) -> str:
        name = base = (path or "value").encode(errors="backslashreplace").decode()
        count = 1
        while name in self._names:
            count += 1
            name = f"{base}#{count}"
        self._names.add(name)
        return name


def _check_storable(tensor: Tensor, path: str, sharded: bool) -> None:
    reason = None
    if tensor.is_meta:
        reason = "has no values (it is on the meta device)"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        reason = f"is not dense ({tensor.layout})"
    elif tensor.is_quantized or (tensor.dtype not in SAFETENSORS_DTYPES and tensor.dtype not in _VIEWED_DTYPES):
        reason = f"has type {tensor.dtype}, which safetensors does not support"
    elif not sharded and hasattr(tensor, "__tensor_flatten__"):
        reason = f"is a {type(tensor).__name__}, a tensor made of tensors"
    if reason is not None:
        raise CheckpointError(f"{path} {reason}. Convert it before saving, or exclude it.")


def _memory_order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions of a dense tensor from the outermost in memory to the innermost; None where they are in order already.

    Products of matrices are rounded differently in another order, so that a run that continues with it would differ.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else None


def _laid_out(tensor: Tensor, order: list[int]) -> Tensor:
    """Return a tensor whose dimensions are in this order in memory."""
    back = [order.index(dim) for dim in range(len(order))]  # a ValueError for a damaged file
    return tensor.permute(order).contiguous().permute(back)


def _identity(tensor: Tensor) -> tuple[object, ...] | None:
    """Two tensors with equal keys show the same memory in the same way; an empty one is like no other."""
    local = local_part(tensor)
    if local.numel() == 0:
        return None
    memory = (local.device, local.data_ptr(), local.dtype, local.stride())
    return (*memory, tuple(tensor.shape), local.is_conj(), local.is_neg())
