"""Attribute the operations of a pass on fake tensors to the blocks that run them: what each part of a model computes and keeps.

`UnitRecorder` tracks a forward pass by itself. `OperationList` receives every operator of a tracked step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.hooks import RemovableHandle

from drivetrain.module.checkpointing import keep_expensive
from drivetrain.strategy.profile.operations import (
    BY_WIDTH,
    VIEW,
    Called,
    by_number,
    described,
    other_flops,
    tensors_of,
    touched,
)
from drivetrain.strategy.profile.torch_private import is_view_operation, operation_flops

if TYPE_CHECKING:
    from drivetrain.strategy.profile.torch_private import Operation


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of a context."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class UnitTotals:
    """What all members of one unit did in a forward pass."""

    flops: float = 0.0
    traffic: float = 0.0
    operations: int = 0
    saved: float = 0.0
    inputs: float = 0.0
    expensive: float = 0.0
    heads: int | None = None
    saved_by_member: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def amounts(self) -> dict[str, float]:
        """Return everything that is additive."""
        return {name: getattr(self, name) for name in _ADDITIVE}

    def continue_to(self, longer: "UnitTotals", more: int) -> None:
        """Extrapolate to `more` further blocks, each of which adds the difference to `longer`."""
        after = longer.amounts()
        for name, before in self.amounts().items():
            setattr(self, name, before + more * (after[name] - before))


_ADDITIVE = ("flops", "traffic", "operations", "saved", "inputs", "expensive")


class UnitRecorder(TorchDispatchMode):
    """Attributes a forward pass to units: the index of the unit whose member runs, or `rest` outside of all."""

    def __init__(
        self,
        members: dict[nn.Module, int],
        rest: int,
        known: Iterable[Tensor],
        check: Callable[[], None] = lambda: None,
    ):
        """`check` is called before every operation; what it raises ends the run."""
        super().__init__()
        self._check = check
        self.totals: dict[int, UnitTotals] = defaultdict(UnitTotals)
        self.loss = UnitTotals()
        """What the loss did, also charged to the rest."""
        self.is_in_loss = False
        self.output_bytes = 0.0
        """The size of what the model returned."""
        self.sequence_length: int | None = None
        self.cross_entropy_head: str | None = None
        self._members, self._rest = members, rest
        self._stack: list[tuple[int, nn.Module | None]] = [(rest, None)]
        self._kept: dict[int, torch.UntypedStorage] = {}  # storages are held, so that no address comes twice
        self._saved = {self._key(tensor) for tensor in known}
        self._entered: set[int] = set()
        self._expensive: set[int] = set()
        self._origins: dict[int, str] = {}  # storage of a Linear's output, or of a copy of it -> name of the Linear

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._kept[id(storage)] = storage
        return id(storage)

    @property
    def current(self) -> UnitTotals:
        """The unit that runs now."""
        return self.totals[self._stack[-1][0]]

    def amounts(self) -> dict[int, dict[str, float]]:
        """Return everything that is additive, by unit. The loss counts as one more unit."""
        return {-1: self.loss.amounts()} | {index: unit.amounts() for index, unit in self.totals.items()}

    def continue_to(self, longer: "UnitRecorder", more: int) -> None:
        """Extrapolate the record to `more` further blocks."""
        for index in {*self.totals, *longer.totals}:
            self.totals[index].continue_to(longer.totals[index], more)
        self.loss.continue_to(longer.loss, more)

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Register hooks on the members and on Linear layers, and return their handles."""
        handles = []
        for name, module in model.named_modules():
            if module in self._members:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(partial(self._remember, name)))
        return handles

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        unit = self._members[module]
        self._stack.append((unit, module))
        for tensor in tensors_of((args, kwargs)):
            key = self._key(tensor)
            if key not in self._entered:
                self._entered.add(key)
                self.totals[unit].inputs += tensor.untyped_storage().nbytes()
            if self.sequence_length is None and tensor.ndim == 3 and tensor.is_floating_point():
                self.sequence_length = tensor.shape[1]

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._stack.pop()

    def _remember(self, name: str, module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            self._origins[self._key(output)] = name

    def count_saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which tensors saved by autograd are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def _pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor saved for backward, each storage once."""
        key = self._key(tensor)
        if key not in self._saved:
            self._saved.add(key)
            size = tensor.untyped_storage().nbytes()
            self.current.saved += size
            self.current.saved_by_member[id(self._stack[-1][1])] += size
            if self.is_in_loss:
                self.loss.saved += size
        return tensor.detach()  # the tensor itself would keep its own node alive

    def __torch_dispatch__(
        self,
        func: "Operation",
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # torch asks for a device where an exception would end the process
            return func(*args, **kwargs)
        self._check()
        result = func(*args, **kwargs)
        if is_view_operation(func):
            return result
        unit = self.current
        flops = operation_flops(func, args, kwargs, result)
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
        unit.flops += flops
        unit.operations += 1
        if inputs:
            unit.traffic += sum(map(touched, inputs)) + sum(map(touched, outputs))
        self._record_operation(func, inputs, outputs)
        if self._stack[-1][0] != self._rest and keep_expensive(None, func, *args) is CheckpointPolicy.MUST_SAVE:
            for tensor in outputs:
                key = self._key(tensor)
                if key not in self._expensive:
                    self._expensive.add(key)
                    unit.expensive += tensor.untyped_storage().nbytes()
        return result

    def _record_operation(self, func: "Operation", inputs: list[Tensor], outputs: list[Tensor]) -> None:
        name = func._schema.name
        if "scaled_dot_product" in name and inputs[0].ndim == 4:
            self.current.heads = inputs[0].shape[1]
        elif name in _FOLLOWED and inputs:
            origin = self._origins.get(self._key(inputs[0]))
            if origin is not None:
                self._origins[self._key(outputs[0])] = origin
        elif name.startswith("aten::nll_loss") and "backward" not in name:
            self.cross_entropy_head = self._origins.get(self._key(inputs[0]), self.cross_entropy_head)


# What may stand between a Linear and the loss for its output to be called logits.
_FOLLOWED = frozenset({"aten::_to_copy", "aten::clone", "aten::_log_softmax"})


@dataclass
class OperationList:
    """Records operators. `StepMemory` passes it each one with the numbers of its storages."""

    phase: str = "forward"
    in_block: bool = False
    calls: list[Called] = field(default_factory=list)
    _outputs: set[int] = field(default_factory=set)
    _depth: int = 0

    def add(
        self,
        func: "Operation",
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        number: Callable[[Tensor], int | None],
    ) -> None:
        """Record one operator."""
        name = func._schema.name.rpartition("::")[2]
        if name in _FREE:
            return
        if is_view_operation(func):
            self.calls.append(Called(VIEW, name, "", self.phase, self.in_block, 0.0, 0.0, ()))
            return
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
        if not outputs and not inputs:
            return
        read = by_number(inputs, number)
        written = by_number(outputs, number)
        key, dims = described(func, name, args, kwargs, inputs, outputs)
        if key == "gather":  # of a table only some rows are read; a loss reads one number for each label
            most = 0.0 if name == "nll_loss_backward" else sum(size for _, size in written)
            read = tuple((place, min(size, most)) for place, size in read)
        first = next((t for t in (*inputs, *outputs) if t.is_floating_point()), (*inputs, *outputs)[0])
        moved = sum(size for _, size in read) + sum(size for _, size in written)
        if key.startswith(BY_WIDTH):
            dims = (*dims, moved)
        self.calls.append(
            Called(
                key=key,
                name=name,
                dtype=str(first.dtype).removeprefix("torch."),
                phase=self.phase,
                in_block=self.in_block,
                flops=operation_flops(func, args, kwargs, result) or other_flops(key, dims),
                moved=moved,
                dims=dims,
                inputs=read,
                outputs=written,
            )
        )

    def watch(self, blocks: Iterable[nn.Module]) -> list[RemovableHandle]:
        """Register hooks on blocks, so that operators can be attributed to them in both directions. Return the handles."""
        handles = []
        for block in blocks:
            handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        return handles

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        self._depth += 1
        self.in_block = True
        for tensor in tensors_of((args, kwargs)):
            if tensor.requires_grad and id(tensor) not in self._outputs:
                tensor.register_hook(self._backward_outside)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._depth -= 1
        self.in_block = self._depth > 0
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                self._outputs.add(id(tensor))
                tensor.register_hook(self._backward_inside)

    def _backward_inside(self, gradient: Tensor) -> None:
        self.in_block = True

    def _backward_outside(self, gradient: Tensor) -> None:
        self.in_block = False


_FREE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _local_scalar_dense is_same_size lift_fresh sym_size".split()
)
