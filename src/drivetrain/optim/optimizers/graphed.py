"""Muon's directions as one recorded CUDA graph.

An update of a small network is many small products, and starting a kernel costs the host more than the kernel costs the device. The
shapes never change, so the whole way from gradients to directions is recorded once and started at once from then on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain.optim.optimizers.newton_schulz import adjusted_rate, orthogonalise

_WARM_UPS = 3


class GraphedDirections:
    """Turns updates of fixed shapes into directions for a rate of one; the results are overwritten by the next call."""

    def __init__(self, updates: Sequence[Tensor], weights: Sequence[Tensor], steps: int, adjust_lr: str):
        self._inputs = [torch.empty_like(update).copy_(update) for update in updates]
        self._outputs = [torch.empty_like(weight) for weight in weights]
        self._steps, self._adjust_lr = steps, adjust_lr
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose kernels and take workspaces now, not while recording
            for _ in range(_WARM_UPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._compute()

    def __call__(self, updates: Sequence[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self._inputs, list(updates))
        self._graph.replay()
        return self._outputs

    def fits(self, updates: Sequence[Tensor], steps: int, adjust_lr: str) -> bool:
        """Say whether these updates are of the recorded kind, to be turned in the recorded way."""
        is_same_way = (steps, adjust_lr) == (self._steps, self._adjust_lr)
        return (
            is_same_way
            and len(updates) == len(self._inputs)
            and all(
                mine.shape == other.shape and mine.dtype == other.dtype for mine, other in zip(self._inputs, updates)
            )
        )

    def _compute(self) -> None:
        matrices = [update.flatten(1) for update in self._inputs]
        for output, matrix, direction in zip(self._outputs, matrices, orthogonalise(matrices, self._steps)):
            factor = adjusted_rate(1.0, (matrix.shape[0], matrix.shape[1]), self._adjust_lr)
            output.copy_(direction.float().mul_(factor).view(output.shape))
