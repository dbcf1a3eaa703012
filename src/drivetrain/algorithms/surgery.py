"""What the algorithms that change a model share: when they act, which optimizers they keep in step, how they say "nothing to do".

The model is changed at INIT, before it is moved, loaded or wrapped. Layers take over the old parameters wherever they can, so
an optimizer's state for them stays; a second application changes nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, ConfigTypeError, Event, Logger
from drivetrain.core.errors import NoEffectWarning, unknown_name, warn
from drivetrain.module.precision import Precision, parse_precision
from drivetrain.module.surgery import count_module_instances, replace_module_classes

Optimizers = Optimizer | Iterable[Optimizer] | None
M = TypeVar("M", bound=nn.Module)


class ModelSurgery(Algorithm):
    """An algorithm that changes the model once, at INIT; a checkpoint of the changed model needs it again."""

    allow_multiple = False
    events = frozenset({Event.INIT})
    writes: tuple[str, ...] = ("model", "optimizers")
    tags = frozenset({"surgery"})
    counts: Mapping[str, type[nn.Module]] = {}
    """The layers whose number in the changed model is logged, by the name in the log."""

    @staticmethod
    def required_on_load() -> bool:
        return True

    function: Callable[..., object]
    """The plain function: it takes a model, what the constructor takes, and `optimizers`."""

    def operate(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Change the model and its optimizers."""
        settings = {name: getattr(self, name) for name in self.config()}
        self.function(model, **settings, optimizers=optimizers)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model = model_of(state, str(self))
        self.operate(model, torch_optimizers(state))
        rebind_units(state)
        if self.counts:
            logger.log_hyperparameters({name: count_module_instances(model, cls) for name, cls in self.counts.items()})


def model_of(state: State, who: str) -> nn.Module:
    """Return the state's model, which must be a module."""
    if not isinstance(state.model, nn.Module):
        raise ConfigTypeError(
            f"{who} changes layers of an nn.Module; the Trainer was given {type(state.model).__name__}."
        )
    return state.model


def torch_optimizers(state: State) -> list[Optimizer]:
    """Return the state's torch optimizers, which surgery keeps in step; units look their parameters up again instead."""
    return [one for one in state.optimizers if isinstance(one, Optimizer)]


def rebind_units(state: State) -> None:
    """Let units (`OptimScheduler`, `OptimSet`) find their parameters in the changed model; a description makes its own later."""
    for one in state.optimizers:
        if isinstance(one, Optimizer):
            continue
        for unit in one.values() if type(one) is dict else (one,):
            rebind = getattr(unit, "rebind", None) or getattr(unit, "attach", None)
            if callable(rebind):
                rebind(state.model)


def warn_no_effect(message: str) -> None:
    """Warn that an algorithm changed nothing."""
    warn(message, NoEffectWarning)


def with_settings(module: M, **attributes: object) -> M:
    """Return a module of the same class that shares the given one's parameters and buffers but has other settings."""
    twin = type(module).__new__(type(module))  # torch forbids `copy` where weights are parametrized
    registries = {name: dict(vars(module)[name]) for name in ("_parameters", "_buffers", "_modules")}
    vars(twin).update(vars(module), **registries)
    for name, value in attributes.items():
        setattr(twin, name, value)
    return twin


def share_tensors(new: M, old: nn.Module) -> M:
    """Give a new layer the very parameters and buffers of the one it replaces; where that has none, it has none either."""
    new._parameters.update({name: old._parameters.get(name) for name in new._parameters})
    new._buffers.update({name: old._buffers.get(name) for name in new._buffers})
    return new


def inside(model: nn.Module, layers: type[nn.Module] | tuple[type[nn.Module], ...]) -> set[nn.Module]:
    """Return everything inside a layer of the given classes: what was treated before, however it was changed since."""
    holders = [module for module in model.modules() if isinstance(module, layers)]
    return {child for holder in holders for child in holder.modules() if child is not holder}


def disable_fused_encoder(model: nn.Module, layers: type[nn.Module] | tuple[type[nn.Module], ...]) -> None:
    """Keep torch's fused evaluation, which reads `linear1.weight`, away from encoders that have other layers in its place."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.linear1, layers) or isinstance(module.linear2, layers):
                module.activation_relu_or_gelu = 0  # no activation that the fused path knows
        elif isinstance(module, nn.TransformerEncoder) and any(isinstance(child, layers) for child in module.modules()):
            module.use_nested_tensor = False


def in_autocast_dtype(norm: Callable[..., Tensor], x: Tensor, *weights: Tensor | None) -> Tensor:
    """Return a norm of input and weights, which are cast to the type of autocast where that is on."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return norm(x, *weights)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return norm(x.to(dtype), *(None if weight is None else weight.to(dtype) for weight in weights))


def replace_norms(
    model: nn.Module,
    norm: type[nn.Module],
    low: type[nn.Module],
    make: Callable[..., nn.Module],
    precision: str | Precision | None,
    optimizers: Optimizers,
) -> None:
    """Replace all norms of exactly one class; a subclass may compute something else and stays."""
    name, parsed = f"LowPrecision{norm.__name__}", None if precision is None else parse_precision(precision)
    if parsed is not None and parsed.autocast_dtype is None:
        warn_no_effect(
            f"{name} works only under autocast, and the precision is {parsed.name!r}. Use precision='bf16' or 'fp16', or remove it."
        )
        return
    replaced = replace_module_classes(
        model, {norm: lambda module, index: make(module, index) if type(module) is norm else None}, optimizers
    )
    if not replaced and not count_module_instances(model, low):
        warn_no_effect(f"{name} found no {norm.__name__} in {type(model).__name__}.")


class LowPrecisionNorm(ModelSurgery):
    """The timing: once, after all other changes to the model."""

    writes = ("model",)
    after = ("#surgery",)
    tags: frozenset[str] = frozenset()
    replace: Callable[..., None]

    def __init__(self, apply_at: Event | str = Event.INIT):
        name, valid = getattr(apply_at, "name", apply_at), ("INIT", "BEFORE_LOAD", "AFTER_LOAD")
        if str(name).upper() not in valid:
            raise ConfigError(unknown_name("event", name, valid, where=f"{self}(apply_at=)"))
        self.apply_at = Event(apply_at)
        self.events = frozenset({self.apply_at})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.replace(model_of(state, str(self)), state.precision, torch_optimizers(state))
