"""What the low-precision norms share: the cast under autocast, the replacement, and the timing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.algorithms.surgery import Optimizers, model_of, torch_optimizers, warn_no_effect
from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Logger
from drivetrain.module.precision import Precision, parse_precision
from drivetrain.module.surgery import count_module_instances, replace_module_classes

_APPLY_AT = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)


def cast_for_autocast(device: str, x: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
    """Return input and weights in the type that autocast uses on this kind of device."""
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), *(None if weight is None else weight.to(dtype) for weight in weights)


def replace_norms(
    model: nn.Module,
    norm: type[nn.Module],
    low: type[nn.Module],
    make: Callable[..., nn.Module],
    precision: str | Precision | None,
    optimizers: Optimizers,
) -> None:
    """Replace all norms of exactly one class; a subclass may compute something else and stays."""
    name = f"LowPrecision{norm.__name__}"
    if precision is not None and parse_precision(precision).autocast_dtype is None:
        warn_no_effect(
            f"{name} acts under autocast only, and the precision is {parse_precision(precision).name!r}. Use precision='bf16' or "
            "'fp16', or leave it out."
        )
        return
    replaced = replace_module_classes(
        model, {norm: lambda module, index: make(module, index) if type(module) is norm else None}, optimizers
    )
    if not replaced and not count_module_instances(model, low):
        warn_no_effect(f"{name} found no {norm.__name__} in {type(model).__name__}.")


class LowPrecisionNorm(Algorithm):
    """The timing: once, after all other changes to the model."""

    allow_multiple = False
    writes = ("model",)
    after = ("#surgery",)
    replace: Callable[..., None]

    def __init__(self, apply_at: Event | str = Event.INIT):
        valid = [event.name for event in _APPLY_AT]
        if str(getattr(apply_at, "name", apply_at)).upper() not in valid:
            raise ConfigError(
                unknown_name("event", getattr(apply_at, "name", apply_at), valid, where=f"{self}(apply_at=)")
            )
        self.apply_at = Event(apply_at)
        self.events = frozenset({self.apply_at})

    @staticmethod
    def required_on_load() -> bool:
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.replace(model_of(state, str(self)), state.precision, torch_optimizers(state))
