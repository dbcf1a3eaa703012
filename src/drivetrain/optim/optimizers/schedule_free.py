"""Schedule-free learning (Defazio et al., 2024, arXiv 2405.15682): an average of the iterates replaces the schedule.

Three sequences belong to every weight. Gradients are taken at y and move z; x averages z and is what is evaluated;
y = (1 - beta) z + beta x. Only z is stored next to the parameter, which holds y while training and x after `eval()`. The training
weights are kept aside until then, so that `train()` goes on from exactly the y that was left.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from drivetrain.core.arguments import check_counts, check_number, check_numbers
from drivetrain.core.errors import ConfigError, warn
from drivetrain.optim.optimizers import stepping
from drivetrain.optim.optimizers.stepping import Closure, ParamGroup


class _ScheduleFree(Optimizer):
    """The averaging that both optimizers share; a subclass defines the direction in which z moves."""

    _interpolation: ClassVar[str]
    """The group's entry that holds beta."""

    def __init__(self, params: ParamsT, defaults: dict[str, object]):
        name = type(self).__name__
        if isinstance(defaults["lr"], Tensor):
            raise ConfigError(f"{name}(lr=...): expected a number; the averaging weights need the rate on the host.")
        for number in ("lr", "weight_decay", "r", "weight_lr_power"):
            check_number(number, defaults[number], at_least=0, owner=name)
        check_counts(name, 0, warmup_steps=defaults["warmup_steps"])
        # Numbers of the run live in the groups, so that they are saved and restored with them.
        progress = {"k": 0, "lr_max": 0.0, "weight_sum": 0.0, "train_mode": True}
        self._training_weights: dict[Tensor, Tensor] = {}
        self._has_warned = False
        super().__init__(params, {**defaults, **progress})

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Take in a group whose weights can be recovered from its z and y."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not self._beta(group) > 0:
            raise ConfigError(
                f"{type(self).__name__}({self._interpolation}={group[self._interpolation]!r}): x cannot be recovered from z and y with an "
                "interpolation of 0. Give a number above 0, such as 0.9."
            )

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._training_weights = {}  # those of another moment
        self.__dict__.setdefault("_has_warned", False)

    @property
    def training(self) -> bool:
        """Whether the parameters hold y, the weights that are trained, and not x, the ones to evaluate."""
        return all(group["train_mode"] for group in self.param_groups)

    @torch.no_grad()
    def eval(self) -> None:
        """Let the parameters hold the averaged weights x."""
        for group in self.param_groups:
            if not group["train_mode"]:
                continue
            moved = [p for p in group["params"] if "z" in self.state.get(p, {})]
            self._training_weights.update({p: stepping.copy_of(p) for p in moved})
            self._blend(moved, 1 - 1 / self._beta(group))
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Let the parameters hold the training weights y again."""
        for group in self.param_groups:
            if group["train_mode"]:
                continue
            kept = [p for p in group["params"] if p in self._training_weights]
            if kept:
                torch._foreach_copy_(
                    stepping.local_parts(kept), stepping.local_parts(self._training_weights[p] for p in kept)
                )
            # A state saved in evaluation mode brings no y along: it is worked out, up to rounding.
            others = [p for p in group["params"] if p not in self._training_weights and "z" in self.state.get(p, {})]
            self._blend(others, 1 - self._beta(group))
            group["train_mode"] = True
        self._training_weights = {}

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Move z by the gradient at y, average it into x, and set y between the two."""
        if not self.training:
            raise RuntimeError(
                f"{type(self).__name__} is in evaluation mode: call train() before the next forward pass."
            )
        loss = stepping.evaluate(closure)
        for group in self.param_groups:
            lr, share = self._advance(group)
            parameters = stepping.with_gradients(group, type(self).__name__)
            if not parameters:
                continue
            z = stepping.local_parts(stepping.state_of(self, parameters, "z", stepping.copy_of))
            y = stepping.local_parts(parameters)
            directions = self._directions(group, parameters, y)
            # y' = (1 - beta) z' + beta x', written without x: x is determined by y and z.
            torch._foreach_lerp_(y, z, share)
            torch._foreach_add_(y, directions, alpha=lr * (self._beta(group) * (1 - share) - 1))
            torch._foreach_add_(z, directions, alpha=-lr)
        return loss

    def _directions(self, group: dict[str, object], parameters: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        """Return what a step of one goes against, weight decay included; each optimizer has its own."""
        raise NotImplementedError

    def _advance(self, group: ParamGroup) -> tuple[float, float]:
        """Count the step; return its learning rate and the weight of the new z in the average."""
        group["k"] += 1
        warmup = group["warmup_steps"]
        lr = group["lr"] * (min(1.0, group["k"] / warmup) if warmup else 1.0)
        if lr < group["lr_max"] and not self._has_warned:
            self._has_warned = True
            warn(
                f"{type(self).__name__}: the learning rate falls from {group['lr_max']:g} to {lr:g}. The average replaces a decaying "
                "schedule; use a constant rate, with warmup_steps if needed."
            )
        group["lr_max"] = max(group["lr_max"], lr)
        weight = group["k"] ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] += weight
        return lr, weight / group["weight_sum"] if group["weight_sum"] else 0.0

    def _blend(self, parameters: list[Tensor], weight: float) -> None:
        if parameters:
            torch._foreach_lerp_(
                stepping.local_parts(parameters), stepping.local_parts(self.state[p]["z"] for p in parameters), weight
            )

    def _beta(self, group: ParamGroup) -> float:
        value = group[self._interpolation]
        return value[0] if isinstance(value, tuple | list) else value


class AdamWScheduleFree(_ScheduleFree):
    """AdamW without a schedule; `eval()` before evaluating or saving weights, `train()` before training on.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = AdamWScheduleFree([weight], lr=0.1)
    >>> for _ in range(3):
    ...     weight.grad = weight.detach().clone()
    ...     optimizer.step()
    >>> optimizer.eval()
    """

    _interpolation = "betas"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ):
        check_numbers("AdamWScheduleFree", eps=eps)
        defaults = {"lr": lr, "betas": stepping.check_betas("AdamWScheduleFree", betas), "eps": eps}
        average = {"warmup_steps": warmup_steps, "r": r, "weight_lr_power": weight_lr_power}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, **average})

    def _directions(self, group: ParamGroup, parameters: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        beta2, gradients = group["betas"][1], stepping.gradients_of(parameters)
        squares = stepping.local_parts(stepping.state_of(self, parameters, "exp_avg_sq", stepping.zeros_of))
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_div_(scales, math.sqrt(1 - beta2 ** group["k"]))
        torch._foreach_add_(scales, group["eps"])
        directions = torch._foreach_div(gradients, scales)
        if group["weight_decay"]:
            torch._foreach_add_(directions, y, alpha=group["weight_decay"])
        return list(directions)


class SGDScheduleFree(_ScheduleFree):
    """SGD without a schedule; its learning rate is usually large, about 10 times that of SGD with momentum."""

    _interpolation = "momentum"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ):
        check_numbers("SGDScheduleFree", 0.0, 1.0, momentum=momentum)
        average = {"warmup_steps": warmup_steps, "r": r, "weight_lr_power": weight_lr_power}
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **average})

    def _directions(self, group: ParamGroup, parameters: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        gradients = stepping.gradients_of(parameters)
        if not group["weight_decay"]:
            return gradients
        return list(torch._foreach_add(gradients, y, alpha=group["weight_decay"]))
