"""What the optimizers here share: checking settings, collecting tensors that have a gradient, and torch's own steps.

Everything elementwise is done on the part of a tensor that this rank holds, so a sharded parameter costs no communication.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.arguments import check_number, check_numbers
from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Settings
from drivetrain.module.distributed_tensors import local_part

ParamGroup = Settings
"""A group of parameters as torch keeps it: `params`, and the settings of the group."""
Closure = Callable[[], object] | None
"""Computes the loss and its gradients again, where an optimizer needs that."""


def check_rates(who: str, **rates: object) -> None:
    """Reject a learning rate that is not a finite number of at least 0; a rate on the device is not read back."""
    for name, rate in rates.items():
        if not isinstance(rate, Tensor):
            check_number(name, rate, at_least=0.0, owner=who)


def check_betas(who: str, pair: object, name: str = "betas") -> tuple[float, float]:
    """Reject anything but two numbers from 0 to below 1."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ConfigError(f"{who}({name}={pair!r}): expected two numbers, such as (0.9, 0.99).")
    check_numbers(who, 0.0, 1.0, **{f"{name}[0]": pair[0], f"{name}[1]": pair[1]})
    return float(pair[0]), float(pair[1])


def with_gradients(group: ParamGroup, who: str) -> list[Tensor]:
    """Return the parameters of a group that have a gradient; sparse ones are rejected."""
    found = [p for p in group["params"] if p.grad is not None]
    if any(p.grad.layout is not torch.strided for p in found):
        raise RuntimeError(
            f"{who} needs dense gradients, and one is sparse. Use sparse=False in the embedding, or SparseAdam."
        )
    return found


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return what this rank holds of each gradient, as `local_parts` does."""
    return local_parts(p.grad for p in parameters if p.grad is not None)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return what this rank holds of each tensor; a complex number is two real ones, as in torch's optimizers."""
    parts = [local_part(tensor) for tensor in tensors]
    return [torch.view_as_real(part) if part.is_complex() else part for part in parts]


def state_of(
    optimizer: Optimizer, parameters: list[Tensor], name: str, make: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return one entry of the state for each parameter, made on first use."""
    entries = []
    for parameter in parameters:
        state = optimizer.state[parameter]
        if name not in state:
            state[name] = make(parameter)
        entries.append(state[name])
    return entries


def zeros_of(parameter: Tensor) -> Tensor:
    """Return zeros laid out like a parameter, sharded where it is."""
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def copy_of(parameter: Tensor) -> Tensor:
    """Return a copy laid out like a parameter, sharded where it is."""
    return parameter.detach().clone(memory_format=torch.preserve_format)


def evaluate(closure: Closure) -> Any:
    """Call a closure with gradients switched on, as every optimizer does first, and return its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def subtract(parameters: list[Tensor], updates: list[Tensor], rate: float | Tensor) -> None:
    """Move parameters by -rate * update; a rate on the device is not read back."""
    if isinstance(rate, Tensor):
        # In the parameters' type: bfloat16 updates would be rounded once more.
        wide = [update.to(p.dtype) for p, update in zip(parameters, updates)]
        torch._foreach_sub_(parameters, torch._foreach_mul(wide, rate))
    else:
        torch._foreach_add_(parameters, updates, alpha=-rate)


def shrink(parameters: list[Tensor], rate: float | Tensor) -> None:
    """Decay parameters: multiply them by 1 - rate."""
    if parameters and (isinstance(rate, Tensor) or rate != 0):
        torch._foreach_mul_(parameters, 1 - rate)
