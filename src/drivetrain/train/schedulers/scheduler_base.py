"""A scheduler sets one field of an optimizer's parameter groups as a function of the number of updates.

It is stepped after every update, never per epoch, so there is one count and no doubt about its meaning. The first
`step()` evaluates update 0, the value the constructor already set: update k (from 0) runs with f(max(k - 1, 0)).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.arguments import check_number
from drivetrain.core.errors import ConfigError, warn
from drivetrain.core.types import StateDict

Values = None | float | Iterable[float]


class SchedulerArgumentError(ConfigError, AssertionError):
    """A scheduler received an invalid argument."""


class SchedulerBase(ABC):
    """Keeps no count: call `step_update(num_updates)`."""

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr"):
        self.optimizer = optimizer
        self.param_group_field = param_group_field
        self._initial_param_group_field = f"initial_{param_group_field}"
        for index, group in enumerate(optimizer.param_groups):
            if param_group_field not in group:
                raise KeyError(
                    f"{param_group_field} is missing from param_groups[{index}], which has "
                    f"{', '.join(map(str, group))}."
                )
        self._update_param_groups(self.base_lr_values)

    @property
    def base_lr_values(self) -> list[float]:
        """The value that each group starts from. It belongs to the group, so a resumed optimizer and an added group bring their own."""
        field, initial = self.param_group_field, self._initial_param_group_field
        return [float(group.setdefault(initial, float(group[field]))) for group in self.optimizer.param_groups]

    @base_lr_values.setter
    def base_lr_values(self, values: Iterable[float]) -> None:
        for group, value in zip(self.optimizer.param_groups, values):
            group[self._initial_param_group_field] = value

    @abstractmethod
    def get_updated_values(self, num_updates: int) -> Values:
        """Return the value after this many updates: one for all groups, one for each, or None for no change."""

    def step_update(self, num_updates: int) -> None:
        """Set the value for this many updates."""
        values = self.get_updated_values(num_updates)
        if values is not None:
            self._update_param_groups(values)

    def _update_param_groups(self, values: float | Iterable[float]) -> None:
        groups = self.optimizer.param_groups
        values = list(values) if isinstance(values, Iterable) else [values] * len(groups)
        if len(values) != len(groups):
            raise ValueError(
                f"{type(self).__name__}.get_updated_values returned {len(values)} values for {len(groups)} parameter "
                "groups; return one number, or one for each group."
            )
        for group, value in zip(groups, values):
            if isinstance(group[self.param_group_field], Tensor):
                group[self.param_group_field].fill_(value)  # a compiled or captured step holds on to this tensor
            else:
                group[self.param_group_field] = value

    def state_dict(self) -> StateDict:
        """Return all attributes except the optimizer, which is saved separately."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the attributes."""
        for name, value in state_dict.items():
            setattr(self, name, value)


class StatefulSchedulerBase(SchedulerBase):
    """Counts its own updates: call `step()` after each one."""

    saved: ClassVar[tuple[str, ...] | None] = None
    """The attributes to save, where those are not all; `num_updates` is the count. Base rates belong to the optimizer."""

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr"):
        super().__init__(optimizer, param_group_field)
        self._num_updates = -1

    def step(self) -> None:
        """Set the value for the next update."""
        self._num_updates += 1
        self.step_update(self._num_updates)

    def state_dict(self) -> StateDict:
        """Return the attributes to save, without the optimizer. The count is called `num_updates`."""
        state = super().state_dict()
        state["num_updates"] = state.pop("_num_updates")
        return state if self.saved is None else {name: state[name] for name in self.saved}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the attributes and the count."""
        state = dict(state_dict)
        num_updates = state.pop("num_updates", None)
        if num_updates is None:
            name = type(self).__name__
            warn(f"the saved state of {name} has no count of updates; the schedule continues from {self._num_updates}.")
        else:
            self._num_updates = num_updates
        super().load_state_dict(state)


def require(condition: bool, message: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise SchedulerArgumentError(message)


def require_numbers(given: Mapping[str, object], *names: str, **limits: Any) -> None:
    """Raise for arguments that are not finite numbers within the limits of `check_number`. None means not set."""
    for name in names:
        try:
            if given[name] is not None:
                check_number(name, given[name], **limits)
        except ConfigError as error:
            raise SchedulerArgumentError(str(error)) from None
