"""Sharpness-aware minimisation (Foret et al., 2020, arXiv 2010.01412): step with the gradient of the worst point nearby.

The worst point within a ball of radius rho is found to first order: along the gradient. Its own gradient needs a second forward
and backward pass, so a step takes a closure that repeats them. Between the two passes the weights are kept aside and put back
exactly.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.arguments import check_counts, check_numbers
from drivetrain.core.errors import ConfigError
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.optim.optimizers.stepping import copy_of, evaluate, local_parts
from drivetrain.optim.optimizers.wrapper import WrappedOptimizer

_COUNT = "sam_step"


class SAMOptimizer(WrappedOptimizer):
    """Steps with the gradient at w + rho g / (|g| + epsilon) in every interval-th step, with the plain one in the others.

    The gradients of the present weights must be there when `step(closure)` is called; the closure clears them, repeats forward and
    backward, and returns the loss.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.1), rho=0.5)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = weight.pow(2).sum()
    ...     loss.backward()
    ...     return loss
    >>> loss = closure()
    >>> _ = optimizer.step(closure)
    >>> weight.data
    tensor([0.7000])
    """

    needs_closure = True
    """A trainer that sees this repeats the passes of an update when `step` asks for it."""

    def __init__(self, base_optimizer: Optimizer, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1):
        check_numbers("SAMOptimizer", rho=rho, epsilon=epsilon)
        check_counts("SAMOptimizer", 1, interval=interval)
        super().__init__(base_optimizer)
        self.rho, self.epsilon, self.interval = rho, epsilon, interval

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update; a sharpness-aware step needs the closure and returns the loss at the perturbed weights."""
        count = self.param_groups[0].get(_COUNT, 0) + 1
        loss = None
        if count % self.interval == 0:
            if closure is None:
                raise ConfigError(
                    "SAMOptimizer.step() needs a closure that clears the gradients, repeats forward and backward, and returns the loss: "
                    "optimizer.step(closure)."
                )
            before = self.perturb()
            try:
                loss = evaluate(closure)
            finally:
                self.put_back(before)
        self.base_optimizer.step()
        for group in self.param_groups:  # counted in the groups, which are saved; a step that failed does not count
            group[_COUNT] = count
        return loss

    @torch.no_grad()
    def perturb(self) -> dict[Tensor, Tensor]:
        """Move to the worst point nearby and return the weights as they were."""
        moved = [p for p in self.parameters() if p.grad is not None]
        gradients = [p.grad for p in moved if p.grad is not None]
        if not gradients:
            return {}
        before = {p: copy_of(p) for p in moved}
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]
        offsets = torch._foreach_mul(local_parts(gradients), self.rho / (norm + self.epsilon))
        torch._foreach_add_(local_parts(moved), offsets)
        return before

    @torch.no_grad()
    def put_back(self, before: dict[Tensor, Tensor]) -> None:
        """Return to the weights that `perturb` left."""
        if before:
            torch._foreach_copy_(local_parts(before), local_parts(before.values()))

    def _own_settings(self) -> dict[str, object]:
        return {"rho": self.rho, "epsilon": self.epsilon, "interval": self.interval}
