"""Adam and SGD whose weight decay does not depend on the size of the learning rate, as in Composer; and Lion.

Loshchilov and Hutter (2017, arXiv 1711.05101) decay by the schedule, not by the rate: a weight is multiplied by
1 - weight_decay * lr / initial_lr. torch's AdamW multiplies by 1 - weight_decay * lr, so a value tuned there is divided by the
learning rate here. Steps are torch's own, with its foreach and fused kernels.
"""

import inspect
import math
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from drivetrain.core.arguments import check_flag, check_numbers
from drivetrain.core.errors import warn
from drivetrain.core.types import StateDict
from drivetrain.optim.optimizers import stepping
from drivetrain.optim.optimizers.stepping import Closure, ParamGroup

_LARGE_DECAY = 1e-3


class _ScheduledDecay(Optimizer):
    """Remembers the rate that each group starts with, and steps with other decays than the groups have."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Take in a group and remember the rate it starts with."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("initial_lr", float(self.param_groups[-1]["lr"]))

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state of torch's optimizer has no such entry
            group.setdefault("initial_lr", float(group["lr"]))

    def _step_as(self, cls: type[Optimizer], decays: list[float]) -> None:
        own = [group["weight_decay"] for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay
            inspect.unwrap(cls.step)(self)  # without the hooks around it, which our own step has run already
        finally:
            for group, decay in zip(self.param_groups, own):
                group["weight_decay"] = decay


class DecoupledAdamW(_ScheduledDecay, AdamW):
    """Adam with weight decay that follows the schedule: w *= 1 - weight_decay * lr / initial_lr."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ):
        stepping.check_rates("DecoupledAdamW", lr=lr)
        check_numbers("DecoupledAdamW", eps=eps, weight_decay=weight_decay)
        check_flag("amsgrad", amsgrad, owner="DecoupledAdamW")
        _warn_of_large_decay("DecoupledAdamW", weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, fused=fused)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Take AdamW's step with the decay that makes 1 - lr * decay the factor wanted."""
        loss = stepping.evaluate(closure)
        groups = self.param_groups
        self._step_as(AdamW, [g["weight_decay"] / (g["initial_lr"] or math.inf) for g in groups])
        return loss


class DecoupledSGDW(_ScheduledDecay, SGD):
    """SGD with weight decay that follows the schedule and is not part of the gradient."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ):
        stepping.check_rates("DecoupledSGDW", lr=lr)
        check_numbers("DecoupledSGDW", momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        check_flag("nesterov", nesterov, owner="DecoupledSGDW")
        _warn_of_large_decay("DecoupledSGDW", weight_decay)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, foreach=foreach, fused=fused)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Decay the parameters that have a gradient, then take SGD's step without decay."""
        loss = stepping.evaluate(closure)
        for group in self.param_groups:
            decay = group["weight_decay"]
            if decay and group["initial_lr"]:
                moved = stepping.with_gradients(group, "DecoupledSGDW")
                # With a fused kernel and a gradient scaler, a step that overflowed must not decay either.
                skipped = getattr(self, "found_inf", None) if group["fused"] else None
                rate = decay * (group["lr"] / group["initial_lr"])
                stepping.shrink(stepping.local_parts(moved), rate if skipped is None else rate * (1 - skipped))
        self._step_as(SGD, [0.0] * len(self.param_groups))
        return loss


def _warn_of_large_decay(name: str, weight_decay: float) -> None:
    if weight_decay >= _LARGE_DECAY:
        warn(
            f"{name}(weight_decay={weight_decay}): this optimizer does not multiply the decay by the learning rate, so this shrinks "
            f"weights by {weight_decay:.2g} in every full-rate step. A value for torch's AdamW must be multiplied by its learning rate."
        )


class Lion(Optimizer):
    """p -= lr * (sign(b1 m + (1 - b1) g) + wd p), then m = b2 m + (1 - b2) g (Chen et al., 2023, arXiv 2302.06675).

    One state tensor instead of Adam's two. Steps are larger than Adam's, so its learning rate is three to ten times smaller and its
    weight decay as much larger.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = Lion([weight], lr=0.1)
    >>> weight.grad = torch.tensor([3.0, -0.2])
    >>> optimizer.step()
    >>> weight.data
    tensor([ 0.9000, -0.9000])
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        stepping.check_rates("Lion", lr=lr)
        check_numbers("Lion", weight_decay=weight_decay)
        betas = stepping.check_betas("Lion", betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = stepping.evaluate(closure)
        for group in self.param_groups:
            parameters = stepping.with_gradients(group, "Lion")
            if not parameters:
                continue
            momenta = stepping.local_parts(stepping.state_of(self, parameters, "exp_avg", stepping.zeros_of))
            gradients = stepping.gradients_of(parameters)
            own = stepping.local_parts(parameters)
            lr, (beta1, beta2) = group["lr"], group["betas"]
            updates = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
            torch._foreach_sign_(updates)
            stepping.shrink(own, lr * group["weight_decay"])
            stepping.subtract(own, updates, lr)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)
        return loss
