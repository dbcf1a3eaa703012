"""Remember a model's structure, to put it back when a plan fails half-way.

Nothing is copied: classes, dictionaries and the memory behind each parameter are remembered by reference, and a plan replaces those
rather than writing into them. The one exception is the agreement of ranks on rank 0's values; it comes after everything that can be
wrong has been checked.
"""

from typing import Any

import torch
from torch import Tensor, nn


class ModelSnapshot:
    """The structure of a model at one moment."""

    def __init__(self, model: nn.Module):
        self.modules: list[tuple[nn.Module, type, dict[str, Any]]] = []
        self.tensors: list[tuple[Tensor, Tensor, bool, Tensor | None]] = []
        for module in model.modules():
            fields = {key: _shallow(value) for key, value in vars(module).items()}
            self.modules.append((module, type(module), fields))
        for tensor in [*model.parameters(), *model.buffers()]:
            self.tensors.append((tensor, tensor.data, tensor.requires_grad, tensor.grad))

    def restore(self) -> None:
        """Put every class, attribute and tensor back."""
        for module, cls, fields in self.modules:
            object.__setattr__(module, "__class__", cls)
            vars(module).clear()
            vars(module).update({key: _shallow(value) for key, value in fields.items()})
        with torch.no_grad():
            for tensor, data, requires_grad, grad in self.tensors:
                tensor.grad = None
                tensor.data = data
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | set | list) else value
