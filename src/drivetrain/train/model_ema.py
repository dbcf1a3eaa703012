"""A copy of a model that follows its weights slowly."""

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.wrapping import unwrap


class ModelEma(nn.Module):
    """A copy of a model whose weights follow it slowly: `decay * average + (1 - decay) * new`.

    Floating parameters and buffers are averaged; the others (`num_batches_tracked`) are copied. Override `update_fn`
    for another rule. `module.average.AveragedWeights` is the shadow for sharded or half-precision models; this one is
    a module of its own, which can be called.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999):
        super().__init__()
        if not 0 <= decay <= 1:
            raise ConfigError(
                f"decay={decay}: expected a number from 0 to 1; values near 1, such as 0.999, change slowly."
            )
        self.module = copy.deepcopy(unwrap(model)).requires_grad_(False).eval()
        self.decay = decay

    def update_fn(self, ema_model_weights: Tensor, updated_model_weights: Tensor) -> Tensor:
        """Return the new average of one floating entry."""
        return self.decay * ema_model_weights + (1.0 - self.decay) * updated_model_weights

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take one step towards the model's present weights."""
        averages, weights = self._copy_others(model)
        if type(self).update_fn is not ModelEma.update_fn:
            for average, weight in zip(averages, weights):
                average.copy_(self.update_fn(average, weight))
        elif averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    @torch.no_grad()
    def set(self, model: nn.Module) -> None:
        """Take over the model's present weights."""
        averages, weights = self._copy_others(model)
        if averages:
            torch._foreach_copy_(averages, weights)

    def _copy_others(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Copy entries that have no mean and return the pairs that have one."""
        averages, weights = [], []
        for average, weight in zip(_tensors(self.module), _tensors(unwrap(model))):
            if average.is_floating_point() or average.is_complex():
                averages.append(average)
                weights.append(weight if weight.device == average.device else weight.to(average.device))
            else:
                average.copy_(weight)
        return averages, weights


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())
