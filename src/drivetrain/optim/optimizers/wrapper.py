"""An optimizer around another one: same groups, same state, something more at every step.

The wrapper owns no groups and no state of its own kind: it shows those of the optimizer inside, so that schedulers, scalers and
checkpoints work on the real ones. Tensors that a wrapper keeps for a parameter appear in the same state under the wrapper's
name for them, but are held apart, because many optimizers take an empty entry to mean "not begun".
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigTypeError
from drivetrain.optim.optimizers.stepping import ParamGroup


class WrappedOptimizer(Optimizer):
    """Passes everything on to `base_optimizer`; a subclass adds to `step`."""

    kept_names: tuple[str, ...] = ()
    """Names under which a subclass keeps tensors for parameters."""

    def __init__(self, base_optimizer: Optimizer):
        if not isinstance(base_optimizer, Optimizer):
            raise ConfigTypeError(
                f"{type(self).__name__} wraps an optimizer, such as torch.optim.AdamW(...); it was given a {type(base_optimizer).__name__}."
            )
        self.base_optimizer = base_optimizer
        self._kept: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        super().__setstate__({})  # hooks and profiling; the constructor would make groups of its own

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The groups of the optimizer inside."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the optimizer inside."""
        return self.base_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the optimizer inside."""
        return self.base_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, object]) -> None:
        self.base_optimizer.defaults = defaults

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Give a group to the optimizer inside."""
        self.base_optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.base_optimizer.zero_grad(set_to_none)

    @property
    def training(self) -> bool:
        """Whether the parameters hold the weights that are trained; an optimizer without modes always says yes."""
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, with what is kept here beside it."""
        saved = self.base_optimizer.state_dict()
        state = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in saved["state"].items()}
        for number, parameter in enumerate(self.parameters()):
            if parameter in self._kept:
                state.setdefault(number, {}).update(self._kept[parameter])
        return {**saved, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer inside its part, and take back what is kept here."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own: dict[Any, dict[str, Any]] = {}
        rest: dict[Any, Any] = {}
        for number, entry in state_dict["state"].items():
            if not isinstance(entry, dict):
                rest[number] = entry
                continue
            own[number] = {name: entry[name] for name in self.kept_names if name in entry}
            others = {name: value for name, value in entry.items() if name not in self.kept_names}
            if others:
                rest[number] = others
        self.base_optimizer.load_state_dict({**state_dict, "state": rest})
        self._kept = defaultdict(dict)
        for number, parameter in zip(numbers, self.parameters()):
            for name, value in own.get(number, {}).items():
                self._kept[parameter][name] = value.detach().to(parameter.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"base_optimizer": self.base_optimizer, "_kept": self._kept, **self._own_settings()}

    def _own_settings(self) -> dict[str, object]:
        """Return the attributes a copy needs."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_optimizer!r})"
