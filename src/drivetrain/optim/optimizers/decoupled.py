"""Adam and SGD whose weight decay does not depend on the size of the learning rate, as in Composer.

Loshchilov and Hutter (2017, arXiv 1711.05101) decay by the schedule, not by the rate: a weight is multiplied by
1 - weight_decay * lr / initial_lr. torch's AdamW multiplies by 1 - weight_decay * lr, so a value tuned there is divided by the
learning rate here. Steps are torch's own, with its foreach and fused kernels.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, AdamW
from torch.optim.optimizer import ParamsT

from drivetrain.core.arguments import check_flag, check_numbers
from drivetrain.core.errors import DrivetrainWarning
from drivetrain.optim.optimizers.stepping import (
    ParamGroup,
    bare_step,
    check_rates,
    evaluate,
    local_parts,
    shrink,
    with_gradients,
)

_LARGE_DECAY = 1e-3


class DecoupledAdamW(AdamW):
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
        check_rates("DecoupledAdamW", lr=lr)
        check_numbers("DecoupledAdamW", eps=eps, weight_decay=weight_decay)
        check_flag("amsgrad", amsgrad, owner="DecoupledAdamW")
        _warn_of_large_decay("DecoupledAdamW", weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, fused=fused)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Take in a group and remember the rate it starts with."""
        super().add_param_group(param_group)
        _remember_rate(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take AdamW's step with the decay that makes 1 - lr * decay the factor wanted."""
        loss = evaluate(closure)
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = decay / group["initial_lr"] if group["initial_lr"] else 0.0
        try:
            bare_step(AdamW)(self)
        finally:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay
        return loss


class DecoupledSGDW(SGD):
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
        check_rates("DecoupledSGDW", lr=lr)
        check_numbers("DecoupledSGDW", momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        check_flag("nesterov", nesterov, owner="DecoupledSGDW")
        _warn_of_large_decay("DecoupledSGDW", weight_decay)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, foreach=foreach, fused=fused)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Take in a group and remember the rate it starts with."""
        super().add_param_group(param_group)
        _remember_rate(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Decay the parameters that have a gradient, then take SGD's step without decay."""
        loss = evaluate(closure)
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = 0.0
            if decay and group["initial_lr"]:
                moved = with_gradients(group, "DecoupledSGDW")
                # With a fused kernel and a gradient scaler, a step that overflowed must not decay either.
                skipped = getattr(self, "found_inf", None) if group["fused"] else None
                rate = decay * (group["lr"] / group["initial_lr"])
                shrink(local_parts(moved), rate if skipped is None else rate * (1 - skipped))
        try:
            bare_step(SGD)(self)
        finally:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay
        return loss


def _remember_rate(group: ParamGroup) -> None:
    group.setdefault("initial_lr", float(group["lr"]))


def _warn_of_large_decay(name: str, weight_decay: float) -> None:
    if weight_decay >= _LARGE_DECAY:
        warnings.warn(
            f"{name}(weight_decay={weight_decay}): here the decay is not multiplied by the learning rate, so this shrinks weights by "
            f"{weight_decay:.2g} in every full-rate step. A value tuned for torch's AdamW must be multiplied by its learning rate.",
            DrivetrainWarning,
            stacklevel=3,
        )
