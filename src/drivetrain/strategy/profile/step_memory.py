"""Track one training step: how much memory is held when and for what, and which collectives are called.

Every storage that an operation returns is tracked until it is released, and each change is recorded in order. Two such records,
of two batch sizes, have the same order, so each moment is a straight line in the batch size. Storages are classified only
afterwards, when it is known which became gradients. Then the record is replayed to find the largest moment of each segment of the
step. A segment begins where a block is entered or left; segments can be extrapolated to a model with more blocks.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core.types import Batch
from drivetrain.module.distributed_tensors import local_part
from drivetrain.module.wrapping import unwrap
from drivetrain.strategy.apply import Application
from drivetrain.strategy.batching import BatchSplit
from drivetrain.strategy.profile.fake_world import GradientBuckets, match_real_memory, workspace_bytes
from drivetrain.strategy.profile.operations import tensors_of
from drivetrain.strategy.profile.unit_recorder import OperationList
from drivetrain.strategy.stepping import PlannedOptimizer
from drivetrain.strategy.task import TrainingTask

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.strategy.profile.torch_private import FakeTensorMode, Operation

CATEGORIES = ("params", "grads", "optimizer", "activations", "gathered", "temporary")
"""Parameters and buffers; gradients; optimizer state; what forward passes make; gathered parameters; what else backward passes
(recomputation included) and updates make."""

_COLLECTIVES = {
    "all_gather": "_allgather_base_ allgather_ all_gather_into_tensor all_gather_into_tensor_out",
    "reduce_scatter": "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor reduce_scatter_tensor_out",
    "all_reduce": "allreduce_ all_reduce all_reduce_",
    "broadcast": "broadcast_ broadcast",
    "all_to_all": "alltoall_base_ alltoall_ all_to_all_single shard_dim_alltoall",
    "send": "send isend",
    "recv": "recv_ irecv",
}
_COLLECTIVE_NAMES = {operation: name for name, operations in _COLLECTIVES.items() for operation in operations.split()}
_GATHERING = ("all_gather_copy_in", "split_with_sizes_copy")
"""Operations of fully_shard around a gathering; their results and what they write into are whole parameters."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

_UNREDUCED = "unreduced"
"""Whole gradients of an open window. They are gradients, but stay on the device where reduced ones go to the host."""

Amounts = dict[str, float]


def by_category(amounts: Amounts, on_host: Sequence[str] = ()) -> Amounts:
    """Return recorded device memory by public category."""
    held = {kind: 0.0 if kind in on_host else amounts[kind] for kind in CATEGORIES}
    held["grads"] += amounts[_UNREDUCED]
    return held


@dataclass
class Record:
    """What one step did: the largest moment of each segment by category, and the collectives of each part."""

    segments: dict[Hashable, Amounts] = field(default_factory=dict)
    collectives: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    """By part of the step, then by collective: how many, and bytes. The bytes are those of the whole tensor."""


class Change(NamedTuple):
    """A storage that is allocated, resized or released."""

    segment: Hashable
    key: int
    size: int
    """Bytes more than before, or fewer."""


class StepMemory(TorchDispatchMode):
    """Tracks storages and collectives inside its context."""

    def __init__(self, round_to: int = 1, check: Callable[[], None] = lambda: None):
        """`check` is called before every operation; what it raises ends the run."""
        super().__init__()
        self.round_to, self._check = round_to, check
        self.segment: Hashable = "start"
        self.phase = "activations"  # what newly seen storages are, unless they turn out to be something else
        self.part = "only"
        self.window = 0
        """Which pass of a window runs."""
        self.events: list[Change] = []
        self.kinds: dict[int, str] = {}
        self._numbers: dict[int, int] = {}  # id of a living storage -> its number
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._count = 0
        self._collectives: dict[str, dict[str, tuple[int, float]]] = {}
        self._fake_mode: FakeTensorMode | None = None
        self.operations: OperationList | None = None
        """Where every operator is recorded, if requested."""

    # Who is who.

    def register(self, tensors: Iterable[object], kind: str) -> None:
        """Record what storages are used for, whether or not they were seen before."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                number = self._track_tensor(local_part(tensor.detach() if tensor.requires_grad else tensor), kind)
                if number is not None:
                    self.kinds[number] = kind

    def register_all(self, model: nn.Module, optimizer: "Optimizer | None") -> None:
        """Record which storages are parameters, gradients and optimizer state now."""
        own = [*model.parameters(), *model.buffers()]
        inner = getattr(optimizer, "inner", optimizer)
        inner = getattr(inner, "optim", inner)  # the part of a sharded optimizer that this rank steps
        if inner is not None:
            known = {id(parameter) for parameter in own}
            copies = [p for group in inner.param_groups for p in group["params"] if id(p) not in known]
            self.register(tensors_of(list(inner.state.values())), "optimizer")
            self.register(copies, "optimizer")
            self.register([copy.grad for copy in copies], "grads")
        self.register(own, "params")
        self.register([parameter.grad for parameter in model.parameters()], "grads")

    def settle(self) -> None:
        """Record that the results of a backward pass are gradients: fully_shard keeps them unsharded while a window is open."""
        for number in self._numbers.values():
            if self.kinds[number] == "temporary" and self._sizes[number]:
                self.kinds[number] = _UNREDUCED

    # What happens.

    def __enter__(self) -> Self:
        self._fake_mode, self._resize = active_fake_mode(), torch.UntypedStorage.resize_
        resize = self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self._track_storage(storage, "gathered")
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: "Operation", types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensors first become operations on their local parts
        if func.namespace == "prim":  # torch asks for a device where an exception would end the process
            return func(*args, **(kwargs or {}))
        self._check()
        is_own = active_fake_mode() is self._fake_mode
        name = func._schema.name.rpartition("::")[2]
        if name == "wait_tensor" and is_own and self._fake_mode is not None:
            return args[0]  # as it is on real tensors; the rule for fake ones makes a new one
        result = func(*args, **(kwargs or {}))
        if not is_own:
            return result  # sharding rules are worked out on fake tensors of their own, which nobody pays for
        collective = _COLLECTIVE_NAMES.get(name) if func.namespace in _NAMESPACES else None
        if collective is not None:
            self._count_collective(collective, args, result)
        gathers = collective == "all_gather" or (func.namespace == "fsdp" and name in _GATHERING)
        for tensor in tensors_of(result):
            self._track_tensor(tensor, "gathered" if gathers else self.phase)
        if self.operations is not None:
            self.operations.add(func, args, kwargs or {}, result, lambda tensor: self._track_tensor(tensor, self.phase))
        match_real_memory(func, args, result)
        self._add_workspace(workspace_bytes(func, args, result))
        if gathers:
            for tensor in tensors_of((args, kwargs or {})):
                number = self._track_tensor(tensor, "gathered") if tensor.untyped_storage().nbytes() > 0 else None
                if number is not None and self.kinds[number] in ("activations", "temporary"):
                    self.kinds[number] = "gathered"
        return result

    def _count_collective(self, name: str, args: tuple, result: object) -> None:
        sizes = [sum(t.numel() * t.element_size() for t in tensors_of(value)) for value in (*args, result)]
        counts = self._collectives.setdefault(self.part, {})
        count, size = counts.get(name, (0, 0.0))
        counts[name] = (count + 1, size + max(sizes))

    def _add_workspace(self, size: int) -> None:
        if size:
            self._count += 1
            self.kinds[self._count] = "temporary"
            size = self._rounded(size)
            self.events += [Change(self.segment, self._count, size), Change(self.segment, self._count, -size)]

    def _track_tensor(self, tensor: Tensor, kind: str) -> int | None:
        if hasattr(type(tensor), "__tensor_flatten__"):
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without memory of its own
            return None
        return self._track_storage(storage, kind)

    def _track_storage(self, storage: torch.UntypedStorage, kind: str) -> int:
        key = id(storage)
        number = self._numbers.get(key)
        if number is None:
            number = self._count = self._count + 1
            self._numbers[key], self.kinds[number], self._sizes[number] = number, kind, 0
            self._references[number] = weakref.ref(storage, partial(self._end, key, number))
        size = self._rounded(storage.nbytes())
        if size != self._sizes[number]:
            self.events.append(Change(self.segment, number, size - self._sizes[number]))
            self._sizes[number] = size
        return number

    def _rounded(self, size: int) -> int:
        return -(-size // self.round_to) * self.round_to

    def _end(self, key: int, number: int, reference: object) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._references.pop(number, None)
        if size := self._sizes.get(number):
            self._sizes[number] = 0
            self.events.append(Change(self.segment, number, -size))

    def freeze(self) -> None:
        """End the record. Later releases are not recorded."""
        self._references.clear()
        self._numbers.clear()

    # What it came to.

    def totals(self) -> list[int]:
        """Return the bytes in use after each change."""
        return list(accumulate(change.size for change in self.events))

    def record(self) -> Record:
        """Return the largest moment of each segment. Every storage counts as what it finally was."""
        now = dict.fromkeys((*CATEGORIES, _UNREDUCED), 0.0)
        segments: dict[Hashable, Amounts] = {}
        total, peaks, last = 0.0, dict[Hashable, float](), None
        for segment, number, change in self.events:
            if segment != last:  # what a segment finds when it begins counts too
                if total > peaks.get(segment, -1.0):
                    peaks[segment], segments[segment] = total, dict(now)
                last = segment
            now[self.kinds[number]] += change
            total += change
            if total > peaks[segment]:
                peaks[segment], segments[segment] = total, dict(now)
        return Record(segments, self._collectives)


@dataclass
class Update:
    """One update of a planned model with every pass of its window. Real and simulated training are tracked by the same code."""

    task: TrainingTask
    ctx: Application
    batch: BatchSplit
    buckets: Sequence[GradientBuckets] = ()
    before_pass: Callable[[], None] = lambda: None

    def run(self, tracker: StepMemory | None) -> None:
        """Clear the gradients of the previous step, then run every pass of a window and update."""
        ctx = self.ctx
        if tracker is not None:
            self._register(tracker)
        with nullcontext() if tracker is None else tracker:
            unwrap(ctx.model).zero_grad()
            if isinstance(ctx.optimizer, PlannedOptimizer):
                ctx.optimizer.inner.zero_grad()
            for window in range(self.batch.accumulation):
                self.before_pass()
                self._pass(window, tracker)
                if tracker is not None:
                    tracker.settle()
                    self._register(tracker)
                    tracker.segment = "update"
                if ctx.optimizer is not None:
                    ctx.optimizer.step()
                if tracker is not None:
                    self._register(tracker)

    def _pass(self, window: int, tracker: StepMemory | None) -> None:
        ctx, is_last = self.ctx, window == self.batch.accumulation - 1
        for bucket in self.buckets:
            bucket.is_synchronising = is_last
        if tracker is not None:
            tracker.part, tracker.window = "closing" if is_last else "open", window
            tracker.segment, tracker.phase = ("forward", window), "activations"
        inputs = ctx.prepared(self.task.batch(self.batch.micro))
        loss = self._loss(inputs)
        if tracker is not None:
            tracker.segment, tracker.phase = ("backward", window), "temporary"
        loss.backward()

    def _loss(self, inputs: Batch) -> Tensor:
        outputs = self.task.call(self.ctx.model, inputs)
        if self.task.loss_func is None:
            return mean_of_outputs(outputs)
        result = self.ctx.stepping.loss(inputs, outputs)
        return result[0] if isinstance(result, list | tuple) else result

    def _register(self, tracker: StepMemory) -> None:
        tracker.register_all(unwrap(self.ctx.model), self.ctx.optimizer)
        for bucket in self.buckets:
            tracker.register(bucket.storages, "grads")


def mean_of_outputs(outputs: object) -> Tensor:
    """Return the mean of everything that a model returns, as the loss of a task without one."""
    found = [tensor.float().mean() for tensor in tensors_of(outputs) if tensor.requires_grad]
    return torch.stack(found).sum()
