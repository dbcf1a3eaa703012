"""Kernels of constant norm: before every step a convolution kernel is scaled back to Frobenius norm sqrt(filters).

A convolution that is followed by a batch norm computes the same at any scale of its kernel, but the larger the kernel
grows, the less a step turns it. At a constant norm the learning rate alone decides by how much (as Jordan's airbench
does for Muon, 2024; see also van Laarhoven, 2017, arXiv 1706.05350).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drivetrain.algorithms.surgery import model_of
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.module.distributed_tensors import is_dtensor, local_part
from drivetrain.module.params import select_parameters
from drivetrain.module.wrapping import unwrap


@torch.no_grad()
def normalise_kernels(kernels: Sequence[Tensor]) -> None:
    """Scale each tensor (filters, ...) in place to Frobenius norm sqrt(filters).

    >>> kernel = torch.full((4, 1, 2, 2), 3.0)
    >>> normalise_kernels([kernel])
    >>> float(kernel.norm())
    2.0
    """
    tensors = list({id(kernel): kernel for kernel in kernels}.values())  # one that two layers share is scaled once
    if not tensors:
        return
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in torch._foreach_norm(tensors)]  # type: ignore[attr-defined]
    torch._foreach_clamp_min_(norms, 1e-7)  # a kernel of zeros stays one
    own = [local_part(tensor) for tensor in tensors]
    torch._foreach_div_(own, norms)
    torch._foreach_mul_(own, [math.sqrt(len(tensor)) for tensor in tensors])


class KernelNorm(Algorithm):
    """Keeps convolution kernels at norm sqrt(filters): all that are trained, or those that `layers` names (patterns allowed)."""

    allow_multiple = False
    events = frozenset({Event.INIT, Event.BEFORE_STEP})
    reads, writes = ("model",), ("model",)
    after = ("#surgery",)
    conflicts = {"WeightStandardization": "a standardized kernel has a fixed norm. Use one of them"}

    def __init__(self, layers: str | Sequence[str] | None = None):
        self.layers = layers if layers is None or isinstance(layers, str) else list(layers)
        self._seen: tuple[nn.Module, list[Tensor]] | None = None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model = unwrap(model_of(state, str(self)))
        if event is Event.INIT:
            self._seen = None
            if not self._kernels(model):
                raise ConfigError(f"KernelNorm found no trainable convolution in {type(model).__name__}.")
        elif self._seen is None or self._seen[0] is not model:
            self._seen = model, self._kernels(model)
        if self._seen is not None:
            normalise_kernels([kernel for kernel in self._seen[1] if kernel.requires_grad])  # LayerFreezing freezes

    def _kernels(self, model: nn.Module) -> list[Tensor]:
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
        kernels: list[Tensor] = [module.weight for module in convolutions if module.weight.requires_grad]
        if self.layers is None:
            return kernels
        named = {id(p) for p in select_parameters(model, self.layers, where="KernelNorm(layers=...)").values()}
        return [kernel for kernel in kernels if id(kernel) in named]
