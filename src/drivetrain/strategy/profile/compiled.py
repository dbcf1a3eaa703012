"""What a compiled forward pass keeps for backward; eager figures do not apply, because compilation drops and recomputes activations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from drivetrain.strategy.profile.torch_private import captured_saved_bytes
from drivetrain.strategy.task import TrainingTask


class _Forward(nn.Module):
    """A model with its loss, as one module."""

    def __init__(self, task: TrainingTask, model: nn.Module, low: bool):
        super().__init__()
        self.task, self.model, self.low = task, model, low

    def forward(self, inputs: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.low, cache_enabled=False):
            return loss_of(self.task, inputs, self.task.call(self.model, inputs))


def compiled_saved_bytes(task: TrainingTask, model: nn.Module, inputs: Any, arithmetic: str) -> float:
    """Return what the compiled forward pass of a fake model keeps for backward, beside parameters and inputs."""
    whole = _Forward(task, model, arithmetic != "float32")
    state = dict(whole.named_parameters()) | dict(whole.named_buffers())
    leaves, layout = tree_flatten(inputs)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> Tensor:
        values = list(leaves)
        for index, tensor in zip(places, tensors[len(state) :]):
            values[index] = tensor
        named = dict(zip(state, tensors))
        return torch.func.functional_call(whole, named, (tree_unflatten(values, layout),), tie_weights=True)

    return captured_saved_bytes(run, [*state.values(), *(leaves[index] for index in places)])


def loss_of(task: TrainingTask, inputs: Any, outputs: Any) -> Tensor:
    """Return the task's loss, or where it has none the mean of everything a model returns."""
    if task.loss_func is not None:
        return task.loss(inputs, outputs)
    found = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([tensor.float().mean() for tensor in found]).sum()
