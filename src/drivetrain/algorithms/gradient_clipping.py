"""Gradient clipping: by the total norm (Pascanu et al., 2013), by value, or by unit, relative to the weights (AGC).

Adaptive gradient clipping (Brock et al., 2021, arXiv 2102.06171) limits the gradient of every output unit to a share of the norm of
its weights. Sharded gradients are clipped as whole ones are.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from drivetrain.algorithms.surgery import model_of
from drivetrain.context.state import State
from drivetrain.core import Algorithm, Event, Logger
from drivetrain.core.arguments import check_choice, check_number, check_numbers
from drivetrain.module.distributed_tensors import is_dtensor, local_part

ClippingType = Literal["norm", "value", "adaptive"]


def apply_gradient_clipping(
    model: nn.Module | Iterable[nn.Parameter],
    clipping_type: ClippingType,
    clipping_threshold: float,
    fsdp_enabled: bool = False,
    eps: float = 0.0,
) -> None:
    """Clip the gradients of a model, or of its parameters, in place.

    Sharded parameters are recognised, so `fsdp_enabled` changes nothing; `eps` is the smallest weight norm that adaptive clipping
    reckons with.
    """
    _check("apply_gradient_clipping", clipping_type, clipping_threshold, eps)
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    clipped = [p for p in parameters if p.grad is not None]
    if not clipped:
        return
    if clipping_type == "norm":
        clip_grad_norm_(clipped, clipping_threshold)
    elif clipping_type == "value":
        gradients = [local_part(p.grad) for p in clipped if p.grad is not None]
        with torch.no_grad():
            torch._foreach_clamp_min_(gradients, -clipping_threshold)
            torch._foreach_clamp_max_(gradients, clipping_threshold)
    else:
        _clip_by_unit(clipped, clipping_threshold, eps)


@torch.no_grad()
def _clip_by_unit(parameters: list[nn.Parameter], threshold: float, eps: float) -> None:
    """Scale the gradient of each output unit to at most `threshold` times the norm of its weights."""
    gradients: list[Tensor] = []
    factors: list[Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None
        weight_norm, gradient_norm = _unit_norm(parameter.detach()), _unit_norm(parameter.grad)
        limit = weight_norm.clamp(min=eps) * threshold
        # A gradient of zero needs no clipping: 0 / 0 is read as 1.
        factor = torch.where(gradient_norm > 0, limit / gradient_norm, torch.ones_like(limit)).clamp(max=1.0)
        gradients.append(local_part(parameter.grad))
        factors.append(_local_factor(factor, parameter))
    torch._foreach_mul_(gradients, factors)


def _unit_norm(tensor: Tensor) -> Tensor:
    """Return the norm over everything but the first dimension, or over all of a vector; kept broadcastable."""
    dims = list(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=tensor.ndim > 0)


def _local_factor(factor: Tensor, parameter: Tensor) -> Tensor:
    """Return the factors of the units that this rank holds a part of."""
    if not is_dtensor(factor):
        return factor
    from torch.distributed.tensor import Replicate, Shard

    rows = [
        place if place == Shard(0) and parameter.ndim > 1 else Replicate()
        for place in parameter.placements  # type: ignore[attr-defined]
    ]
    return factor.redistribute(parameter.device_mesh, rows).to_local()  # type: ignore[attr-defined]


class GradientClipping(Algorithm):
    """Clips the complete gradients of an update; `eps` lets weights that are zero be trained under adaptive clipping."""

    events = frozenset({Event.AFTER_TRAIN_BATCH})
    reads, writes = ("model",), ("grads",)

    def __init__(self, clipping_type: ClippingType, clipping_threshold: float, eps: float = 1e-3):
        _check(type(self).__name__, clipping_type, clipping_threshold, eps)
        self.clipping_type, self.clipping_threshold, self.eps = clipping_type, clipping_threshold, eps

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        apply_gradient_clipping(model_of(state, str(self)), self.clipping_type, self.clipping_threshold, eps=self.eps)


def _check(who: str, clipping_type: object, threshold: object, eps: object) -> None:
    check_choice("clipping_type", clipping_type, ("norm", "value", "adaptive"), owner=who)
    check_numbers(who, 0, eps=eps)
    check_number("clipping_threshold", threshold, above=0, infinite=True, owner=who)


def apply_agc(model: nn.Module, clipping_threshold: float = 0.01) -> None:
    """Clip the gradient of every output unit to a share of the norm of its weights."""
    apply_gradient_clipping(model, "adaptive", clipping_threshold)


class AGC(GradientClipping):
    """Adaptive gradient clipping: `GradientClipping("adaptive", threshold)`."""

    def __init__(self, clipping_threshold: float = 0.01):
        super().__init__("adaptive", clipping_threshold)
