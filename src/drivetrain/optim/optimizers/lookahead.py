"""Lookahead (Zhang et al., 2019, arXiv 1907.08610): k fast steps forward, one slow step towards where they led."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.core.arguments import check_counts, check_fractions
from drivetrain.optim.optimizers.stepping import copy_of, evaluate, local_parts
from drivetrain.optim.optimizers.wrapper import WrappedOptimizer

_COUNT = "lookahead_step"


class Lookahead(WrappedOptimizer):
    """Lets the optimizer inside take k steps, then goes back to slow + alpha * (fast - slow).

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = Lookahead(torch.optim.SGD([weight], lr=1.0), k=2, alpha=0.5)
    >>> for _ in range(2):
    ...     weight.grad = -torch.ones(1)
    ...     optimizer.step()
    >>> weight.data
    tensor([1.])
    """

    kept_names = ("slow",)

    def __init__(self, base_optimizer: Optimizer, k: int = 5, alpha: float = 0.5):
        check_counts("Lookahead", 1, k=k)
        check_fractions("Lookahead", alpha=alpha)
        super().__init__(base_optimizer)
        self.k, self.alpha = k, alpha

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step inside, and after every k-th step move the slow weights."""
        loss = evaluate(closure)
        for parameter in self.parameters():
            if parameter.grad is not None and parameter not in self._kept:
                self._kept[parameter]["slow"] = copy_of(parameter)
        self.base_optimizer.step()
        count = self.param_groups[0].get(_COUNT, 0) + 1
        for group in self.param_groups:  # counted in the groups, which are saved
            group[_COUNT] = count
        if count % self.k == 0 and self._kept:
            fast = local_parts(self._kept)
            slow = local_parts(kept["slow"] for kept in self._kept.values())
            torch._foreach_lerp_(slow, fast, self.alpha)
            torch._foreach_copy_(fast, slow)
        return loss

    def _own_settings(self) -> dict[str, object]:
        return {"k": self.k, "alpha": self.alpha}
