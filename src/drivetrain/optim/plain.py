"""A torch optimizer as it is, made a unit so that it can be in a set with others."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.optim.scheduler import OptimScheduler
from drivetrain.optim.selection import all_names


class PlainLr(OptimScheduler):
    """Leaves the learning rate to whoever owns the optimizer; nothing is clipped unless asked for."""

    def sche_init(self) -> None:
        """Take no arguments."""

    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        """Return the rate the optimizer has."""
        return self.get_lr()

    def _set_rates(self, epoch_num: int | None) -> None:
        """Set nothing."""


def as_unit(optimizer: Optimizer, model: nn.Module, **general: Any) -> PlainLr:
    """Return a unit around an existing optimizer, owning the parameters that it holds."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in all_names(model) if id(p) in held]
    found = {id(p) for _, p in all_names(model)} & held
    if len(found) < len(held):
        raise ConfigError(
            f"{type(optimizer).__name__} holds {len(held) - len(found)} parameters that the model does not have. Build it from "
            "the parameters of this model."
        )
    general = {"grad_clip": None, **general}
    return PlainLr(lambda params: optimizer, None, model, updated_modules=names, **general)
