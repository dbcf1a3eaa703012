"""Watch one training step: what memory is held when, for what, and which collectives are called.

Every storage that an operation returns is followed from its first sight to its end. Storages are sorted into categories only afterwards,
when it is known what became a gradient; then the record is played again to find the largest moment of each segment of the step. A
segment begins where a block is entered or left; segments are what can be extrapolated to a model of more blocks.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.module.distributed_tensors import local_part
from drivetrain.strategy.profile.accelerator_rules import borrowed_bytes, hold_as_torch_does

CATEGORIES = ("params", "grads", "optimizer", "activations", "gathered", "temporary")
"""Parameters and buffers; gradients; optimizer state; what forward passes make; gathered parameters; what else backward passes
(recomputation included) and updates make."""

_COLLECTIVES = {
    "all_gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor", "all_gather_into_tensor_out"),
    "reduce_scatter": (
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
    ),
    "all_reduce": ("allreduce_", "all_reduce", "all_reduce_"),
    "broadcast": ("broadcast_", "broadcast"),
    "all_to_all": ("alltoall_base_", "alltoall_", "all_to_all_single", "shard_dim_alltoall"),
    "send": ("send", "isend"),
    "recv": ("recv_", "irecv"),
}
_COLLECTIVE_NAMES = {operation: name for name, operations in _COLLECTIVES.items() for operation in operations}
_GATHERING = ("all_gather_copy_in", "split_with_sizes_copy")
"""Operations of fully_shard around a gathering; their results and what they write into are whole parameters."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

_UNREDUCED = "unreduced"
"""Whole gradients of an open window. They are gradients, but stay on the device where reduced ones go to the host."""

Amounts = dict[str, float]


def by_category(amounts: Amounts, on_host: Sequence[str] = ()) -> Amounts:
    """Return what a device holds of recorded amounts, in the public categories."""
    held = {kind: 0.0 if kind in on_host else amounts[kind] for kind in CATEGORIES}
    held["grads"] += amounts[_UNREDUCED]
    return held


@dataclass
class Record:
    """What one step did: the largest moment of each segment, by category, and the collectives of each part."""

    segments: dict[Hashable, Amounts] = field(default_factory=dict)
    collectives: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    """By part of the step, then by collective: how many, and bytes. The bytes are those of the whole tensor."""


class StepMemory(TorchDispatchMode):
    """Follows storages and collectives while it is entered."""

    def __init__(self, round_to: int = 1):
        super().__init__()
        self.round_to = round_to
        self.segment: Hashable = "start"
        self.phase = "activations"  # what newly seen storages are, unless they turn out to be something else
        self.part = "only"
        self._events: list[tuple[Hashable, int, int]] = []  # segment, storage, its bytes from now on
        self._kinds: dict[int, str] = {}
        self._numbers: dict[int, int] = {}  # id of a living storage -> its number
        self._references: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._count = 0
        self._collectives: dict[str, dict[str, tuple[int, float]]] = {}
        self._fake_mode: Any = None

    # Who is who.

    def register(self, tensors: Iterable[Any], kind: str) -> None:
        """Record what storages are for, whether they were seen before or not."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                number = self._see(local_part(tensor.detach() if tensor.requires_grad else tensor), kind)
                if number is not None:
                    self._kinds[number] = kind

    def register_all(self, model: nn.Module, optimizer: Any) -> None:
        """Record which storages are parameters, gradients and optimizer state now."""
        own = [*model.parameters(), *model.buffers()]
        inner = getattr(optimizer, "inner", optimizer)
        inner = getattr(inner, "optim", inner)  # the part of a sharded optimizer that this rank steps
        if inner is not None:
            known = {id(parameter) for parameter in own}
            copies = [p for group in inner.param_groups for p in group["params"] if id(p) not in known]
            self.register(tree_leaves(list(inner.state.values())), "optimizer")
            self.register(copies, "optimizer")
            self.register([copy.grad for copy in copies], "grads")
        self.register(own, "params")
        self.register([parameter.grad for parameter in model.parameters()], "grads")

    def settle(self) -> None:
        """Record that what a backward pass has left behind are gradients: fully_shard keeps them whole while a window is open."""
        for number in self._numbers.values():
            if self._kinds[number] == "temporary" and self._sizes[number]:
                self._kinds[number] = _UNREDUCED

    # What happens.

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow everything that happens in this context; storages that change their size too."""
        from torch._guards import active_fake_mode

        self._fake_mode = active_fake_mode()
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._see_storage(storage, "gathered")
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensors first become operations on their local parts
        from torch._guards import active_fake_mode

        is_own = active_fake_mode() is self._fake_mode
        name = func._schema.name.rpartition("::")[2]
        if name == "wait_tensor" and is_own and self._fake_mode is not None:
            return args[0]  # as it is on real tensors; the rule for fake ones makes a new one
        result = func(*args, **(kwargs or {}))
        if not is_own:
            return result  # sharding rules are worked out on fake tensors of their own, which nobody pays for
        space = func.namespace
        if space in _NAMESPACES and name in _COLLECTIVE_NAMES:
            self._count_collective(_COLLECTIVE_NAMES[name], args, result)
        gathers = space in _NAMESPACES and _COLLECTIVE_NAMES.get(name) == "all_gather"
        gathers |= space == "fsdp" and name in _GATHERING
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, "gathered" if gathers else self.phase)
        hold_as_torch_does(func, args, result)
        self._borrow(borrowed_bytes(func, args, result))
        if gathers:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() > 0:
                    self._mark_gathered(leaf)
        return result

    def _count_collective(self, name: str, args: tuple, result: Any) -> None:
        sizes = [
            sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
            for value in (*args, result)
        ]
        counts = self._collectives.setdefault(self.part, {})
        count, size = counts.get(name, (0, 0.0))
        counts[name] = (count + 1, size + max(sizes))

    def _borrow(self, size: int) -> None:
        if size:
            self._count += 1
            self._kinds[self._count] = "temporary"
            self._events += [(self.segment, self._count, size), (self.segment, self._count, 0)]

    def _mark_gathered(self, tensor: Tensor) -> None:
        number = self._see(tensor, "gathered")
        if number is not None and self._kinds[number] in ("activations", "temporary"):
            self._kinds[number] = "gathered"

    def _see(self, tensor: Tensor, kind: str) -> int | None:
        if hasattr(type(tensor), "__tensor_flatten__"):
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without memory of its own
            return None
        return self._see_storage(storage, kind)

    def _see_storage(self, storage: torch.UntypedStorage, kind: str) -> int:
        key = id(storage)
        number = self._numbers.get(key)
        if number is None:
            number = self._count = self._count + 1
            self._numbers[key], self._kinds[number], self._sizes[number] = number, kind, 0
            self._references[number] = weakref.ref(storage, partial(self._end, key, number))
        size = -(-storage.nbytes() // self.round_to) * self.round_to
        if size != self._sizes[number]:
            self._sizes[number] = size
            self._events.append((self.segment, number, size))
        return number

    def _end(self, key: int, number: int, reference: Any) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._references.pop(number, None)
        if self._sizes.get(number):
            self._sizes[number] = 0
            self._events.append((self.segment, number, 0))

    # What it came to.

    def record(self) -> Record:
        """Return the largest moment of each segment; every storage counts for what it was in the end."""
        now = dict.fromkeys((*CATEGORIES, _UNREDUCED), 0.0)
        sizes: dict[int, int] = {}
        segments: dict[Hashable, Amounts] = {}
        total, peaks, last = 0.0, dict[Hashable, float](), None
        for segment, number, size in self._events:
            if segment != last:  # what a segment finds when it begins counts too
                if total > peaks.get(segment, -1.0):
                    peaks[segment], segments[segment] = total, dict(now)
                last = segment
            change = size - sizes.get(number, 0)
            sizes[number] = size
            now[self._kinds[number]] += change
            total += change
            if total > peaks[segment]:
                peaks[segment], segments[segment] = total, dict(now)
        return Record(segments, self._collectives)
