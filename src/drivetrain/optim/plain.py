"""Whatever describes units, as a set: units, torch optimizers as they are, configurations, functions of the model."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError, ConfigTypeError, DrivetrainWarning
from drivetrain.optim.arguments import SHARED
from drivetrain.optim.building import all_names
from drivetrain.optim.config import check_shared_names
from drivetrain.optim.optim_set import OptimSet
from drivetrain.optim.scheduler import OptimScheduler


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
            f"{type(optimizer).__name__} holds {len(held) - len(found)} parameters that are not in the model. Build it from "
            "the parameters of this model."
        )
    general = {"grad_clip": None, **general}
    return PlainLr(lambda params: optimizer, None, model, updated_modules=names, **general)


def build_optim_sches(
    model: nn.Module, optim_sche_cfg: Mapping[str, object], args: object = None, **shared: object
) -> OptimSet:
    """Build a set as SpeeChain's runner does: `args` is a namespace or mapping that holds shared arguments among others.

    >>> cfg = {"type": "noam.Noamlr", "conf": {"optim_type": "Adam", "optim_conf": {"lr": 1e-3}}}
    >>> build_optim_sches(nn.Linear(2, 1), cfg, {"accum_grad": 4, "seed": 0})["main"].accum_grad
    4
    """
    values = args if isinstance(args, Mapping) else vars(args) if args is not None else {}
    found = {name: values[name] for name in SHARED if name in values}
    return OptimSet.from_config(optim_sche_cfg, model, **{**found, **shared})


def as_optim_set(value: object, model: nn.Module, **shared: Any) -> OptimSet:
    """Turn whatever describes units into a set: units, optimizers, mappings of them, configuration, or a function.

    `shared` values hold for units that were not given their own, by themselves or by their configuration.
    """
    check_shared_names(shared)
    if isinstance(value, (str, os.PathLike)):
        made = OptimSet.from_yaml(value, model)
    elif isinstance(value, OptimSet):
        made = value
    elif isinstance(value, (OptimScheduler, Optimizer)):
        made = OptimSet(main=_as_unit(value, model))
    elif isinstance(value, Mapping):
        if not all(isinstance(item, (OptimScheduler, Optimizer)) for item in value.values()) or not value:
            made = OptimSet.from_config(value, model)
        else:
            made = OptimSet({name: _as_unit(item, model) for name, item in value.items()})
    elif callable(value):
        return as_optim_set(value(model), model, **shared)
    else:
        raise ConfigTypeError(
            f"a {type(value).__name__} is not an optimizer; expected a torch Optimizer, an OptimScheduler, a mapping of them, an OptimSet, "
            "a configuration with 'optim_sches', the path of a YAML file, or a function of the model that returns one of these."
        )
    made.share(**shared)
    _warn_of_unused(made, shared)
    return made


def _warn_of_unused(made: OptimSet, shared: Mapping[str, object]) -> None:
    """Name the shared values that no unit takes, because each has its own; a default needs no word."""
    for name, value in shared.items():
        own = {unit_name: getattr(unit, name) for unit_name, unit in made.items()}
        if value != SHARED[name].value and value not in own.values():
            warnings.warn(
                f"{name}={value!r} has no effect: every unit sets its own ({', '.join(f'{k}: {v!r}' for k, v in own.items())}). Remove "
                "one of the two.",
                DrivetrainWarning,
                stacklevel=3,
            )


def _as_unit(value: OptimScheduler | Optimizer, model: nn.Module) -> OptimScheduler:
    return value if isinstance(value, OptimScheduler) else as_unit(value, model)
