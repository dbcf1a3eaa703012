"""One stage of a pipeline as a module: the user's own modules under the user's own names, and how schedules call it.

Schedules know only tensors, and a loss needs the model's output in its own form. `FlatCall` converts between the two.
"""

from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from drivetrain.module.accumulation import Count, as_factor
from drivetrain.module.loss_items import without_empty
from drivetrain.module.probing import use_copied_buffers

RUNNING: ContextVar["StagePart"] = ContextVar("RUNNING")
"""The stage whose graph runs."""


def in_mode(function: str, *args: object, **kwargs: object) -> Tensor:
    """Call a function of `torch.nn.functional`, such as dropout, in the mode of the stage that runs."""
    return getattr(nn.functional, function)(*args, **kwargs, training=RUNNING.get().training)


class RemoteModule(nn.Module):
    """Replaces a module that another stage holds. It has no parameters."""


class StagePart(nn.Module):
    """One stage: the modules it holds, and the part of the graph that runs them."""

    compute_dtype: torch.dtype | None = None
    """What sharding casts parameters and inputs to for the forward pass."""

    def __init__(self, model: nn.Module, graph: fx.Graph, received: Sequence[str], inputs: Sequence[str]):
        super().__init__()
        self.received = tuple(received)
        """What comes from the stage before, by the names of the values."""
        self.inputs = tuple(inputs)
        """Arguments of the model that this stage needs."""
        steps = [node for node in graph.nodes if node.op in ("call_module", "get_attr")]
        self.targets = frozenset(str(node.target) for node in steps)
        """Dotted names of the modules and tensors that this stage holds."""
        mount(self, model, self.targets)
        # The generated function reads modules off whatever it is called with, so it serves this module too.
        self._run = type(fx.GraphModule(self, graph)).forward
        self._call: FlatCall | None = None

    def hold(self, model: nn.Module, others: Set[str]) -> None:
        """Hold further modules and tensors of the model, which it does not run."""
        self.targets |= others
        mount(self, model, self.targets)

    def begin(self, call: "FlatCall | None") -> None:
        """Take arguments and return outputs in flat form from now on, as a schedule does. None switches back to the plain form."""
        self._call = call

    def forward(self, *received: Tensor, **inputs: Any) -> Any:
        """Return what the next stage receives, or the model's output."""
        call = self._call
        if call is None:
            return self._steps(received, inputs)
        received = tuple(tensor.view_as(tensor) for tensor in received)
        for tensor in received:
            if tensor.requires_grad:  # its gradient is sent to another rank as it is
                tensor.register_hook(Tensor.contiguous)
        with use_copied_buffers(self) if call.is_probing else nullcontext():
            output = self._steps(received, call.unflatten_inputs(inputs))
        return call.flatten_output(output)

    def _steps(self, received: tuple[Tensor, ...], inputs: Mapping[str, object]) -> object:
        token = RUNNING.set(self)
        try:
            return self._run(self, *received, *(inputs[name] for name in self.inputs))
        finally:
            RUNNING.reset(token)


class FlatCall:
    """How schedules, which know only tensors, call one stage: with numbered tensors that have a row for each sample.

    A call that is `probing` finds out shapes: it leaves buffers alone, and its output is not collected.
    """

    def __init__(self, inputs: Mapping[str, object], *, is_last: bool, probing: bool, collects: bool):
        leaves, self._form = tree_flatten(dict(inputs))
        named = {f"leaf_{index}": leaf for index, leaf in enumerate(leaves)}
        self.batched = {name: leaf for name, leaf in named.items() if is_batched(leaf)}
        self._named = named
        self.is_last, self.is_probing, self.collects = is_last, probing, collects
        self._output_form: Any = None
        self._output_rest: dict[int, object] = {}
        self._collected: list[tuple[Tensor, ...]] = []

    def unflatten_inputs(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the model from numbered tensors."""
        return tree_unflatten({**self._named, **tensors}.values(), self._form)

    def flatten_output(self, output: Any) -> Any:
        """Return the model's output as a tuple of its tensors. Outputs of other stages already are one."""
        was_probing, self.is_probing = self.is_probing, False
        if not self.is_last:
            return tuple(tensor.contiguous() for tensor in output)
        leaves, self._output_form = tree_flatten(output)
        self._output_rest = {index: leaf for index, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if self.collects and not was_probing:
            self._collected.append(tensors)
        return tensors

    def unflatten_output(self, output: object) -> Any:
        """Return the model's output from its tensors."""
        tensors = iter(output if isinstance(output, tuple | list) else (output,))
        count = self._output_form.num_leaves
        leaves = [self._output_rest[i] if i in self._output_rest else next(tensors) for i in range(count)]
        return tree_unflatten(leaves, self._output_form)

    def joined_output(self, shares: Sequence[Count]) -> Any:
        """Return the output of all micro-batches: rows concatenated, single numbers averaged by their weights."""
        columns = list(zip(*self._collected))
        joined = [torch.cat(column) if column[0].dim() else _weighted_sum(column, shares) for column in columns]
        self._collected = []
        return self.unflatten_output(joined)


def _weighted_sum(numbers: Sequence[Tensor], shares: Sequence[Count]) -> Tensor:
    parts = [without_empty(number, share) * as_factor(share, number) for number, share in zip(numbers, shares)]
    return torch.stack(parts).sum(0)


def is_batched(leaf: object) -> bool:
    """Return whether a value has a row for each sample."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def mount(root: nn.Module, model: nn.Module, targets: Set[str]) -> None:
    """Register the named modules and tensors of a model in `root`; other members of their containers become `RemoteModule`."""

    def visit(here: nn.Module, there: nn.Module, prefix: str) -> None:
        for name, tensor in there._parameters.items():
            if prefix + name in targets:
                here.register_parameter(name, tensor)
        for name, buffer in there._buffers.items():
            if prefix + name in targets:
                here.register_buffer(name, buffer, persistent=name not in there._non_persistent_buffers_set)
        for name, value in vars(there).items():  # not registered, or made by the forward itself
            if isinstance(value, Tensor) and prefix + name in targets:
                setattr(here, name, value)
        for name, child in there._modules.items():
            path = prefix + name
            if child is None:
                continue
            if path in targets:
                here.register_module(name, child)
            elif any(target.startswith(path + ".") for target in targets):
                holder = nn.ModuleList() if isinstance(child, nn.ModuleList | nn.Sequential) else nn.Module()
                here.register_module(name, holder)
                visit(holder, child, path + ".")
            else:
                here.register_module(name, RemoteModule())
        here.training = there.training

    visit(root, model, "")


# What a stage shares with others: how much losses count, and parameters that several hold.


class LossWeights(Protocol):
    """The weights of the losses of partial batches. By default every sample counts the same."""

    is_sum: bool = False
    """Whether the losses of parts add up to that of the whole, instead of being averaged."""

    @property
    def is_last_pass(self) -> bool:
        """Whether the current batch is the last one before an update."""
        return True

    def items_of(self, inputs: object) -> Count | None:
        """Return how many items the loss of a model's input is a mean over; None for its samples."""
        return None

    def gradient_weight(self, items: Count | None) -> Count:
        """Return the factor for the gradient of a rank's batch."""
        return 1.0

    def amount(self, items: Count | None) -> Count:
        """Return the weight of a rank's loss in the mean over all data ranks."""
        return 1


class EqualSampleWeights(LossWeights):
    """Every sample counts the same."""


def sum_over(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
    """Replace a tensor by its sum over some ranks of a pipeline, with identical results on all of them."""
    own, first = dist.get_rank(group), ranks[0]
    held = tensor.to(device).contiguous()
    if own == first:
        other = torch.empty_like(held)
        for rank in ranks[1:]:
            dist.recv(other, group=group, group_src=rank)
            held = held + other
    else:
        dist.send(held, group=group, group_dst=first)
    tensor.copy_(held)
    broadcast_from_first_stage(tensor, ranks, group, device)


def broadcast_from_first_stage(
    tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Copy the tensor of the first of some pipeline ranks to the others."""
    held = tensor.to(device).contiguous()
    if dist.get_rank(group) == ranks[0]:
        for rank in ranks[1:]:
            dist.send(held, group=group, group_dst=rank)
    else:
        dist.recv(held, group=group, group_src=ranks[0])
        tensor.copy_(held)
