"""What processes exchange: values from rank 0, values of all ranks, rows of all ranks, a common decision.

Without a process group every function returns what a single process would see. Control messages use a gloo group on the CPU, so
that they neither wait for the device nor mix with its traffic. Tensors are sent on their own device if the group supports it.
Plain values are sent as text in the codec's JSON form. An object of another class (a dataclass of ours such as a cached plan, or
what a user's program sends) is pickled, because only its class can rebuild it; all ranks run the same program.
"""

import io
import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.core.errors import CheckpointError, DistributedError
from drivetrain.core.locking import owner_of
from drivetrain.core.types import StateDict
from drivetrain.runtime.codec import JsonPacker, JsonUnpacker
from drivetrain.runtime.ranks import data_group, data_rank, get_num_processes, get_rank, is_distributed

CPU_BACKENDS = {"gloo", "fake", "threaded", "mpi"}

_PLAIN, _PICKLED, _UNSENDABLE = b"jpx"
"""The first byte of a message. One that cannot be sent becomes a note, so that all ranks fail together instead of waiting."""

T = TypeVar("T")

_made: tuple[object, dict[Hashable, object]] | None = None
"""The default group and the groups and meshes that were made in it."""
_SLOT = "$slot"
"""The place of a tensor in a message."""


def control_group() -> dist.ProcessGroup | None:
    """Return the CPU group for control messages: the default group if that is gloo, None without a group.

    The first call on an accelerator's group makes the second group, which is a collective; `init_distributed` makes it.
    """
    if not is_distributed():
        return None
    if dist.get_backend() in CPU_BACKENDS:
        return dist.group.WORLD
    return create_once_per_group("control", lambda: dist.new_group(backend="gloo"))


def create_once_per_group(key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` returned for this key the first time in this process group. Every rank must call this in the same order.

    A group holds threads and connections, and neither a plan nor a trial can free those of its mesh: torch keeps equal meshes.
    """
    global _made
    world = dist.group.WORLD
    if _made is None or _made[0] is not world:
        _made = (world, {})
    if key not in _made[1]:
        _made[1][key] = make()
    return _made[1][key]  # type: ignore[return-value]


def forget_groups() -> None:
    """Drop what was made in a process group that is being destroyed."""
    global _made
    _made = None


def distributed_barrier() -> None:
    """Wait until every process has reached this call. Without a group it returns at once."""
    agree_any(False)  # instead of dist.barrier, which would look for an accelerator and may pick the wrong one


def agree_any(flag: bool) -> bool:
    """Return True on every rank if any rank passes True."""
    return start_agree_any(flag)()


def start_agree_any(flag: bool) -> Callable[[], bool]:
    """Start to ask all ranks without waiting. The returned function waits and returns whether any of them passed True.

    Started at the start of a step and read at its end, the answer is there by then and no rank waits.
    """
    group = control_group()
    if group is None:
        return lambda: flag
    vote = torch.tensor([int(flag)], dtype=torch.int32, device="cpu")
    work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result() -> bool:
        work.wait()
        return bool(vote.item())

    return result


def all_gather_values(value: T) -> list[T]:
    """Return the plain values of all ranks, in rank order, on every rank."""
    group = control_group()
    return [value] if group is None else gather_objects(value, group)


def gather_objects(value: T, group: "dist.ProcessGroup | None") -> list[T]:
    """Return the values of all ranks of a group, in rank order. A value that cannot be sent raises on all of them."""
    gathered: list[T] = []
    for rank, message in enumerate(_gather_bytes(_encoded(value), group)):
        if message[0] == _UNSENDABLE:
            raise DistributedError(f"all_gather_values: rank {rank} cannot send a {message[1:].decode()}")
        gathered.append(_decoded(message))
    return gathered


def broadcast_from_master(value: object) -> Any:
    """Return rank 0's value on every rank, with the same types. Tensors are on the same kind of device.

    Numbers, strings, None and nested dicts, lists and tuples of them travel as they are; tensors may be anywhere
    within. What other ranks pass does not matter.
    """
    group = control_group()
    if group is None:
        return value
    tensors: list[Tensor] = []
    message = _encoded(value, tensors) if get_rank() == 0 else b""
    message = _broadcast_bytes(message, group)
    if message[0] == _UNSENDABLE:
        raise DistributedError(f"broadcast_from_master cannot send a {message[1:].decode()}")
    if get_rank() == 0:
        for tensor in tensors:
            _broadcast_tensor(tensor)
        return value
    return _decoded(message)


def gather_rows(tensor: Tensor) -> Tensor:
    """Return the rows of all data ranks, in rank order, on every rank. The numbers of rows may differ.

    An empty tensor without further dimensions fits rows of any shape, so that a rank without results need not know
    theirs. Gradients flow back: those of all ranks' losses are added up, so that with gradients averaged over the ranks a loss over all
    rows gives each rank its part of the gradient of that loss. All ranks must run the backward pass.
    """
    if is_distributed() and tensor.requires_grad and torch.is_grad_enabled():
        return _GatherRows.apply(tensor)
    return _gather(tensor)[0]


class _GatherRows(torch.autograd.Function):
    """`gather_rows` with a gradient."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        rows, counts = _gather(tensor)
        rank = data_rank()
        vars(ctx).update(own=slice(sum(counts[:rank]), sum(counts[: rank + 1])), shape=tensor.shape)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        group, device = _carrier(gradient.device, data_group())
        total = gradient.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total[vars(ctx)["own"]].reshape(vars(ctx)["shape"]).to(gradient.device)


def _gather(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return the rows of all data ranks, and how many come from each."""
    rows = tensor.detach().to_dense()  # one rank with a sparse tensor must not leave the others waiting
    rows = rows.unsqueeze(0) if rows.ndim == 0 else rows
    if not is_distributed():
        return rows, [len(rows)]
    group = data_group()
    kinds = gather_objects((tuple(rows.shape), str(rows.dtype)), group or control_group())
    filled = {(shape[1:], dtype) for shape, dtype in kinds if shape != (0,)}
    if len(filled) > 1:
        listing = ", ".join(f"rank {rank}: {list(shape)} {dtype}" for rank, (shape, dtype) in enumerate(kinds))
        raise DistributedError(
            f"gather_rows needs the same row shape and dtype on every rank; only the number of rows may differ. "
            f"Got {listing}."
        )
    counts = [shape[0] for shape, _ in kinds]
    if not filled:
        return rows, counts
    row_shape, name = filled.pop()
    dtype = getattr(torch, name.removeprefix("torch."))
    longest = max(counts)
    group, device = _carrier(rows.device, group)
    padded = torch.zeros((longest, *row_shape), dtype=dtype, device=device)
    padded[: rows.shape[0]] = rows.reshape(rows.shape[0], *row_shape)
    as_bytes = bytes_of(padded)
    received = [torch.empty_like(as_bytes) for _ in kinds]
    dist.all_gather(received, as_bytes, group=group)
    parts = [part.view(dtype).reshape(padded.shape)[:count] for part, count in zip(received, counts)]
    return torch.cat(parts).to(rows.device), counts


_Group: TypeAlias = "dist.ProcessGroup | None"


def _carrier(device: torch.device, group: _Group = None) -> tuple[_Group, torch.device]:
    """Choose how a tensor on `device` travels: as it is if `group` carries such tensors, else as a copy elsewhere."""
    # The kinds of device are in a text such as "cpu:gloo,cuda:nccl".
    carried = {entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")}
    if device.type in carried:
        return group, device
    if group is None or "cpu" in carried:
        return group or control_group(), torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # a group that carries neither this device nor CPU tensors belongs to an accelerator
    return group, torch.device(accelerator.type, torch.accelerator.current_device_index())


def _broadcast_tensor(tensor: Tensor) -> Tensor:
    """Send rank 0's tensor, or fill this one with it, and return it on its own device."""
    group, device = _carrier(tensor.device)
    as_bytes = bytes_of(tensor.to(device))
    if as_bytes.numel():
        dist.broadcast(as_bytes, src=0, group=group)
    return as_bytes.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)


def bytes_of(tensor: Tensor) -> Tensor:
    """View a tensor as bytes: every backend and every file carries those, whatever the dtype."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element may have any stride and still be contiguous.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _encoded(value: object, found: list[Tensor] | None = None) -> bytes:
    """Return a value as a message, or a note for all ranks that it cannot travel; tensors are left out into `found` if that is given."""
    try:
        try:
            text = json.dumps(JsonPacker(None, lambda tensor, path: _left_out(tensor, found)).pack(value, ""))
            return bytes([_PLAIN]) + text.encode()
        except CheckpointError:  # not plain data
            message = io.BytesIO(bytes([_PICKLED]))
            message.seek(1)
            _Pickler(message, found).dump(value)
            return message.getvalue()
    except Exception as error:  # whatever it is, the other ranks wait for a message
        advice = "Send plain values, and build the object from them on every rank."
        return bytes([_UNSENDABLE]) + f"{type(value).__name__} ({error}). {advice}".encode(errors="replace")


def _decoded(message: bytes) -> Any:
    if message[0] == _PICKLED:
        return _Unpickler(io.BytesIO(message[1:])).load()
    return JsonUnpacker({_SLOT: _received}).unpack(json.loads(message[1:]))


class _Pickler(pickle.Pickler):
    """Leaves tensors out into `found`, or pickles them as they are without it."""

    def __init__(self, file: io.BytesIO, found: list[Tensor] | None):
        super().__init__(file)
        self._found = found
        if found is not None:
            found.clear()

    def persistent_id(self, value: object) -> StateDict | None:
        return _left_out(value, self._found) if isinstance(value, Tensor) and self._found is not None else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, packed: StateDict) -> Tensor:
        return _received(packed)


def _left_out(tensor: Tensor, found: list[Tensor] | None) -> StateDict:
    """Return what it takes to receive a tensor, which travels after the message."""
    if found is None:
        raise CheckpointError("a tensor")  # of values that are gathered; it travels pickled
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or hasattr(tensor, "full_tensor"):
        way_out = "call to_dense(), dequantize(), or full_tensor() for a sharded one"
        raise TypeError(f"only dense tensors with values can be sent; {way_out}")
    found.append(tensor)
    return {_SLOT: [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type]}


def _received(packed: StateDict) -> Tensor:
    shape, dtype, device = packed[_SLOT]
    # Without a number, an accelerator's name means this process's current device.
    return _broadcast_tensor(torch.empty(shape, dtype=getattr(torch, dtype), device=device))


def _gather_bytes(message: bytes, group: _Group) -> list[bytes]:
    group, device = _carrier(torch.device("cpu"), group)
    length = torch.tensor([len(message)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(received, sizes)]


def _broadcast_bytes(message: bytes, group: _Group) -> bytes:
    """Return rank 0's message, over a group on the CPU. Other ranks pass an empty one."""
    length = torch.tensor([len(message)], device="cpu")
    dist.broadcast(length, src=0, group=group)
    data = torch.frombuffer(bytearray(message or int(length)), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return data.numpy().tobytes()


# ---------------------------------------------------------------------- whether all ranks see one folder
# On several machines each may have a local disk at the same path.

PATIENCE_SECONDS = 30.0
"""How long a network file system may take to show a new file on other nodes."""


def why_not_shared(folder: Path, lock: str) -> str | None:
    """Return which ranks do not see the lock that rank 0 holds in a folder and what to do, None where all see it. Called on every rank."""
    if get_num_processes() == 1:
        return None
    host, token = broadcast_from_master([socket.gethostname(), _token(folder, lock) if get_rank() == 0 else ""])
    deadline = time.monotonic() + PATIENCE_SECONDS
    found = not token  # without a lock the disk is full or gone, which a write reports
    while not (found := found or _token(folder, lock) == token) and time.monotonic() < deadline:
        time.sleep(0.1)
    place = "" if found else f"rank {get_rank()} on host {socket.gethostname()} ({os.path.abspath(folder)!r})"
    missing = [place for place in all_gather_values(place) if place]
    if not missing:
        return None
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return (
        f"it is not one folder for all ranks: {shown} did not find there what rank 0 on host {host} wrote. Every rank writes its part. "
        "Choose a folder on a file system that all nodes share, with the same path on each"
    )


def _token(folder: Path, lock: str) -> str:
    try:
        owner = owner_of(folder, lock)
    except OSError:
        return ""
    return "" if owner is None else owner.token
