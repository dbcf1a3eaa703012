"""How the optimizer of a plan is made: with which function, settings and parameters.

It is made last, from the final parameters. Methods change the recipe and not the optimizer: `fused_optimizer` adds a setting,
`zero1` wraps the class, `half` makes it train float32 copies. An existing optimizer is updated in place where possible
(sharding). Otherwise it is made again, which is allowed as long as it has no state.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Settings
from drivetrain.module.optimizers import start_momentum
from drivetrain.module.sharding import rebind_optimizer
from drivetrain.module.wrapping import named_clean_parameters, unwrap


@dataclass(kw_only=True)
class OptimizerRecipe:
    """How to make the optimizer."""

    build: Callable[..., Optimizer]
    """Called with parameters or groups, and the settings."""
    settings: Settings = field(default_factory=dict)
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    existing: Optimizer | None = None
    """An optimizer of the user's own that this recipe would replace."""
    names: dict[str, nn.Parameter] = field(default_factory=dict)
    """The parameters of that optimizer's model by name, as they were."""
    is_changed: bool = False
    """Whether a method changed the recipe, so that an existing optimizer must be made again."""

    def make(self, model: nn.Module) -> Optimizer:
        """Return the optimizer for the final model."""
        if self.existing is not None and not self.is_changed:
            new = dict(named_clean_parameters(model))
            if any(new.get(name) is not old for name, old in self.names.items()):
                rebind_optimizer(self.existing, self.names, model)
            return self.existing
        if self.existing is not None and self.existing.state:
            raise ConfigError(
                f"the plan replaces the {type(self.existing).__name__}, which already has state. Apply the plan before the first step."
            )
        optimizer = self.build(self.groups(unwrap(model)), **self.settings)
        start_momentum(optimizer)
        return optimizer

    def wrap(self, around: Callable[[Callable[..., Optimizer], Any, Settings], Optimizer]) -> None:
        """Let a function make the optimizer. It is called with the present `build`, the parameters or groups, and the settings."""
        inner = self.build
        self.build = lambda groups, **settings: around(inner, groups, settings)
        self.is_changed = True


def recipe_of(optimizer: Optimizer, model: nn.Module) -> OptimizerRecipe:
    """Return the recipe that makes an optimizer like a given one: same class, groups and settings."""
    names = dict(named_clean_parameters(model))
    by_id = {id(parameter): name for name, parameter in names.items()}
    missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in by_id]
    if missing:
        raise ConfigError(
            f"the optimizer holds {len(missing)} parameters that are not in the model. Apply a plan to one model and its optimizer. "
            "Weights of a loss can be a part of the model, whose forward returns the loss then."
        )
    layout, defaults = [], optimizer.defaults
    for group in optimizer.param_groups:
        # Only what a group has of its own: the rest comes from the settings, which methods may change.
        usual = {"params", "param_names", *(key for key in defaults if group.get(key) is defaults[key])}
        own = {key: value for key, value in group.items() if key not in usual}
        layout.append(([by_id[id(p)] for p in group["params"]], own))
    build = maker_of(optimizer)
    accepted = inspect.signature(build).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return OptimizerRecipe(
        build=build, settings=settings, groups=partial(_named_groups, layout), existing=optimizer, names=names
    )


def maker_of(optimizer: Optimizer) -> Callable[..., Optimizer]:
    """Return what makes an optimizer like a given one from groups and settings; one around another is put around a new one."""
    around = getattr(optimizer, "around", None)
    if around is None:
        return type(optimizer)
    inner = maker_of(optimizer.base_optimizer)  # type: ignore[attr-defined]
    return update_wrapper(lambda groups, **settings: around(inner(groups, **settings)), inner, updated=())


def _named_groups(layout: list[tuple[list[str], Settings]], model: nn.Module) -> list[Settings]:
    """Return parameter groups for any model of the same structure, from the names of the parameters and the settings of each group."""
    parameters = dict(named_clean_parameters(model))
    return [  # a stage of a pipeline has only some of them
        {**settings, "params": [parameters[name] for name in held if name in parameters]} for held, settings in layout
    ]
