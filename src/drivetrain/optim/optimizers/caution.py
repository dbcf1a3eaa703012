"""Cautious updates (Liang et al., 2024, arXiv 2411.16085): leave out what points against the present gradient.

Momentum may still move a weight where the gradient has turned. Those entries are dropped, and the rest is scaled up so that the
mean size of the update stays.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.core.arguments import check_numbers
from drivetrain.optim.optimizers.stepping import copy_of, evaluate, local_parts
from drivetrain.optim.optimizers.wrapper import WrappedOptimizer

_DECOUPLED = ("Lion", "Muon", "MuonHybrid", "DecoupledSGDW", "SOAP")
"""Optimizers whose decay is beside the gradient and whose groups do not say so."""


class Cautious(WrappedOptimizer):
    """Multiplies each tensor's update u by m / max(mean(m), eps), where m is 1 for entries with u g > 0.

    Weight decay that is no part of the gradient (AdamW, Lion, Muon) is left as it is. The mean is over the part of a tensor that
    this rank holds.
    """

    def __init__(self, base_optimizer: Optimizer, eps: float = 1e-3):
        check_numbers("Cautious", eps=eps)
        super().__init__(base_optimizer)
        self.eps = eps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the optimizer inside step, and keep of its step what agrees with the gradient."""
        loss = evaluate(closure)
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        gradients = [local_parts(copy_of(p.grad) for p in own if p.grad is not None) for own in groups]
        before = [local_parts(copy_of(p) for p in own) for own in groups]
        decays = [self._take_decay(group) for group in self.param_groups]
        try:
            self.base_optimizer.step()
        finally:
            for group, (_, setting) in zip(self.param_groups, decays):
                if setting:
                    group["weight_decay"] = setting
        for own, gradient, old, (rate, _) in zip(groups, gradients, before, decays):
            if not own:
                continue
            new = local_parts(own)
            updates = torch._foreach_sub(old, new)
            agreeing = [(update * one > 0).to(update) for update, one in zip(updates, gradient)]
            scales = [mask.mean().clamp_(min=self.eps) for mask in agreeing]
            torch._foreach_mul_(updates, agreeing)
            torch._foreach_div_(updates, scales)
            torch._foreach_copy_(new, old)
            torch._foreach_mul_(new, 1 - rate)
            torch._foreach_sub_(new, updates)
        return loss

    def _take_decay(self, group: dict[str, Any]) -> tuple[float, float]:
        """Return the share by which this step decays weights, and the setting, which is zero during the step if the decay is decoupled."""
        decay = group.get("weight_decay", 0.0)
        decoupled = group.get("decoupled_weight_decay", type(self.base_optimizer).__name__ in _DECOUPLED)
        if not decay or not decoupled:
            return 0.0, decay
        group["weight_decay"] = 0.0
        per_rate = type(self.base_optimizer).__name__.startswith("Decoupled")
        return decay * group["lr"] / (group["initial_lr"] if per_rate else 1), decay

    def _own_settings(self) -> dict[str, object]:
        return {"eps": self.eps}
