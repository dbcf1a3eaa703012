"""Lion (Chen et al., 2023, arXiv 2302.06675): steps of one size, in the direction of a sign.

One state tensor instead of Adam's two. Steps are larger than Adam's, so its learning rate is three to ten times smaller and its
weight decay as much larger.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from drivetrain.core.arguments import check_numbers
from drivetrain.optim.optimizers.stepping import (
    check_betas,
    check_rates,
    evaluate,
    local_parts,
    shrink,
    state_of,
    subtract,
    with_gradients,
    zeros_of,
)


class Lion(Optimizer):
    """p -= lr * (sign(b1 m + (1 - b1) g) + wd p), then m = b2 m + (1 - b2) g.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = Lion([weight], lr=0.1)
    >>> weight.grad = torch.tensor([3.0, -0.2])
    >>> optimizer.step()
    >>> weight.data
    tensor([ 0.9000, -0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        check_rates("Lion", lr=lr)
        check_numbers("Lion", weight_decay=weight_decay)
        betas = check_betas("Lion", betas=betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = evaluate(closure)
        for group in self.param_groups:
            parameters = with_gradients(group, "Lion")
            if not parameters:
                continue
            momenta = local_parts(state_of(self, parameters, "exp_avg", zeros_of))
            gradients = local_parts(p.grad for p in parameters if p.grad is not None)
            own = local_parts(parameters)
            lr, (beta1, beta2) = group["lr"], group["betas"]
            updates = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
            torch._foreach_sign_(updates)
            shrink(own, lr * group["weight_decay"])
            subtract(own, updates, lr)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)
        return loss
