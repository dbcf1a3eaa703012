"""Optimizers around another one: same groups, same state, something more at every step.

The wrapper owns no groups and no state of its own: it shows those of the optimizer inside, so that schedulers, scalers and
checkpoints work on the real ones. Tensors that a wrapper keeps for a parameter are entries of the same state, added after the step of
the optimizer inside, because many optimizers take an empty entry to mean "not begun".
"""

import math
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.arguments import check_counts, check_fractions, check_numbers
from drivetrain.core.errors import ConfigError, ConfigTypeError
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.optim.optimizers.stepping import (
    Closure,
    ParamGroup,
    copy_of,
    evaluate,
    gradients_of,
    local_parts,
    with_gradients,
)


def _of_base(name: str) -> Any:
    """Return a property that is an attribute of the optimizer inside."""
    return property(
        lambda self: getattr(self.base_optimizer, name), lambda self, value: setattr(self.base_optimizer, name, value)
    )


class WrappedOptimizer(Optimizer):
    """Passes everything on to `base_optimizer`; a subclass adds to `step`."""

    settings: tuple[str, ...] = ()
    """The attributes of a subclass that a copy needs."""

    param_groups, state, defaults = _of_base("param_groups"), _of_base("state"), _of_base("defaults")

    def __init__(self, base_optimizer: Optimizer):
        if not isinstance(base_optimizer, Optimizer):
            raise ConfigTypeError(
                f"{type(self).__name__} wraps an optimizer, such as torch.optim.AdamW(...); it was given a {type(base_optimizer).__name__}."
            )
        self.base_optimizer = base_optimizer
        super().__setstate__({})  # hooks and profiling; the constructor would make groups of its own

    def around(self, base_optimizer: Optimizer) -> Self:
        """Return a wrapper of the same settings around another optimizer."""
        return type(self)(base_optimizer, **{name: getattr(self, name) for name in self.settings})

    def add_param_group(self, param_group: ParamGroup) -> None:
        self.base_optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)

    @property
    def training(self) -> bool:
        """Whether the parameters hold the weights that are trained; always True for an optimizer without modes."""
        return getattr(self.base_optimizer, "training", True)

    def train(self) -> None:
        """Put an optimizer with modes (schedule-free) into training mode."""
        if hasattr(self.base_optimizer, "train"):
            self.base_optimizer.train()

    def eval(self) -> None:
        """Put an optimizer with modes into evaluation mode."""
        if hasattr(self.base_optimizer, "eval"):
            self.base_optimizer.eval()

    def parameters(self) -> Iterable[Tensor]:
        """Yield every parameter, in the order of the groups."""
        return (p for group in self.param_groups for p in group["params"])

    def state_dict(self) -> StateDict:
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.base_optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> StateDict:
        return {name: getattr(self, name) for name in ("base_optimizer", *self.settings)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_optimizer!r})"


_LOOKAHEAD_STEPS = "lookahead_step"


class Lookahead(WrappedOptimizer):
    """Lets the optimizer inside take k steps, then goes back to slow + alpha * (fast - slow) (Zhang et al., 2019, arXiv 1907.08610).

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = Lookahead(torch.optim.SGD([weight], lr=1.0), k=2, alpha=0.5)
    >>> for _ in range(2):
    ...     weight.grad = -torch.ones(1)
    ...     optimizer.step()
    >>> weight.data
    tensor([1.])
    """

    settings = ("k", "alpha")

    def __init__(self, base_optimizer: Optimizer, k: int = 5, alpha: float = 0.5):
        check_counts("Lookahead", 1, k=k)
        check_fractions("Lookahead", alpha=alpha)
        super().__init__(base_optimizer)
        self.k, self.alpha = k, alpha

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Step inside, and after every k-th step move the slow weights."""
        loss = evaluate(closure)
        state = self.state
        begun = {p: copy_of(p) for p in self.parameters() if p.grad is not None and "slow" not in state.get(p, ())}
        self.base_optimizer.step()
        for parameter, weights in begun.items():
            state[parameter]["slow"] = weights
        count = self.param_groups[0].get(_LOOKAHEAD_STEPS, 0) + 1
        for group in self.param_groups:  # counted in the groups, which are saved
            group[_LOOKAHEAD_STEPS] = count
        kept = [p for p in self.parameters() if "slow" in state.get(p, ())] if count % self.k == 0 else []
        if kept:
            fast, slow = local_parts(kept), local_parts(state[p]["slow"] for p in kept)
            torch._foreach_lerp_(slow, fast, self.alpha)
            torch._foreach_copy_(fast, slow)
        return loss

    def state_dict(self) -> StateDict:
        """Return the state of the optimizer inside, with the slow weights also where that gathers its state from elsewhere (ZeRO)."""
        saved = super().state_dict()
        for number, parameter in enumerate(self.parameters()):
            if "slow" in (entry := self.state.get(parameter, {})):
                saved["state"][number] = {**saved["state"].get(number, {}), "slow": entry["slow"]}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Give the optimizer inside its part, and take back the slow weights."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        entries = {number: dict(entry) for number, entry in state_dict["state"].items() if isinstance(entry, dict)}
        slow = {number: entry.pop("slow") for number, entry in entries.items() if "slow" in entry}
        rest = {
            number: entries.get(number, entry)
            for number, entry in state_dict["state"].items()
            if number not in slow or entries[number]
        }
        super().load_state_dict({**state_dict, "state": rest})
        for number, parameter in zip(numbers, self.parameters()):
            if number in slow:
                self.state[parameter]["slow"] = slow[number].detach().to(parameter.device, parameter.dtype, copy=True)


_DECOUPLED = ("Lion", "Muon", "MuonHybrid", "DecoupledSGDW", "SOAP", "Adafactor")
"""Optimizers with decoupled decay whose groups do not mark it."""


class Cautious(WrappedOptimizer):
    """Multiplies each tensor's update u by m / max(mean(m), eps), where m is 1 for entries with u g > 0.

    Cautious updates (Liang et al., 2024, arXiv 2411.16085). Momentum may still move a weight where the gradient has turned. Those entries
    are dropped, and the rest is scaled up so that the mean size of the update stays.

    Decoupled weight decay (AdamW, Lion, Muon) is unchanged. The mean is over the part of a tensor that
    this rank holds.
    """

    settings = ("eps",)

    def __init__(self, base_optimizer: Optimizer, eps: float = 1e-3):
        check_numbers("Cautious", eps=eps)
        super().__init__(base_optimizer)
        self.eps = eps

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Let the optimizer inside step, and keep of its step what agrees with the gradient."""
        loss = evaluate(closure)
        groups = [with_gradients(group, "Cautious") for group in self.param_groups]
        signs = [-1 if group.get("maximize") else 1 for group in self.param_groups]
        gradients = [[one * sign for one in gradients_of(own)] for own, sign in zip(groups, signs)]
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

    def _take_decay(self, group: ParamGroup) -> tuple[float, float]:
        """Return the share by which this step decays weights, and the setting, which is zero during the step if the decay is decoupled."""
        inner: Optimizer = self
        while isinstance(inner, WrappedOptimizer):
            inner = inner.base_optimizer
        names, decay = {cls.__name__ for cls in type(inner).__mro__}, group.get("weight_decay", 0.0)
        decoupled = group.get("decoupled_weight_decay", not names.isdisjoint(_DECOUPLED))
        if not decay or not decoupled:
            return 0.0, decay
        group["weight_decay"] = 0.0
        return decay * group["lr"] / ((group["initial_lr"] or math.inf) if "_ScheduledDecay" in names else 1), decay


_SAM_STEPS = "sam_step"


class SAMOptimizer(WrappedOptimizer):
    """Steps with the gradient at w + rho g / (|g| + epsilon) in every interval-th step, with the plain one in the others.

    Sharpness-aware minimisation (Foret et al., 2020, arXiv 2010.01412): the worst point within a ball of radius rho is found to first
    order, along the gradient. Its own gradient needs a second forward and backward pass; between the two the weights are kept aside,
    exactly.

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

    settings = ("rho", "epsilon", "interval")
    needs_closure = True
    """If set, a trainer repeats the passes of an update when `step` calls the closure."""

    def __init__(self, base_optimizer: Optimizer, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1):
        check_numbers("SAMOptimizer", rho=rho, epsilon=epsilon)
        check_counts("SAMOptimizer", 1, interval=interval)
        super().__init__(base_optimizer)
        self.rho, self.epsilon, self.interval = rho, epsilon, interval

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Update; a sharpness-aware step needs the closure and returns the loss at the perturbed weights."""
        count = self.param_groups[0].get(_SAM_STEPS, 0) + 1
        loss = None
        if closure is None and all(group.get("lr") == 0 for group in self.param_groups):
            count -= 1  # moves nothing: torch makes the state by such a step, before it loads one
        elif count % self.interval == 0:
            if closure is None:
                raise ConfigError(
                    "SAMOptimizer.step() needs a closure that clears the gradients, repeats forward and backward, and returns the loss: "
                    "optimizer.step(closure)."
                )
            before = self.perturb()
            try:
                loss = evaluate(closure)
            finally:
                if before:
                    torch._foreach_copy_(local_parts(before), local_parts(before.values()))
        self.base_optimizer.step()
        for group in self.param_groups:  # counted in the groups, which are saved; a step that failed does not count
            group[_SAM_STEPS] = count
        return loss

    @torch.no_grad()
    def perturb(self) -> dict[Tensor, Tensor]:
        """Move to the worst point nearby and return the weights as they were."""
        moved = [p for group in self.param_groups for p in with_gradients(group, "SAMOptimizer")]
        gradients = [p.grad for p in moved if p.grad is not None]
        if not gradients:
            return {}
        before = {p: copy_of(p) for p in moved}
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]
        radius = self.rho / (norm + self.epsilon)
        for group in self.param_groups:
            own = [p for p in group["params"] if p in before]
            if own:  # the worst point is where the loss is largest, or what is maximized is smallest
                offsets = torch._foreach_mul(gradients_of(own), -radius if group.get("maximize") else radius)
                torch._foreach_add_(local_parts(own), offsets)
        return before
