"""Memory and first values for models that were built on the meta device."""

from collections.abc import Callable

import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.tensor_parallel import shared_places


def materialise(
    model: nn.Module, device: torch.device, param_init_fn: Callable[[nn.Module], None] | None = None
) -> None:
    """Give a model on the meta device memory, and let each module initialise its own parameters."""
    ties = shared_places(model)
    model.to_empty(device=device)
    for places in ties:
        for module, key in places[1:]:
            module._parameters[key] = places[0][0]._parameters[places[0][1]]
    for name, module in model.named_modules():
        initialise(name, module, param_init_fn)


def initialise(name: str, module: nn.Module, param_init_fn: Callable[[nn.Module], None] | None = None) -> None:
    """Let a module that was on the meta device set its own parameters and buffers."""
    if param_init_fn is not None:
        param_init_fn(module)
    elif callable(getattr(module, "reset_parameters", None)):
        module.reset_parameters()  # type: ignore[operator]
    elif next(module.parameters(recurse=False), None) is not None or module._buffers:
        raise ConfigError(
            f"the model is on the meta device, and {name or 'the model'} ({type(module).__name__}) has parameters or buffers of its "
            "own but no reset_parameters(). Give it one, or pass param_init_fn to fsdp."
        )
