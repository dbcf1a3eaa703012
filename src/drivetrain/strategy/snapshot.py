"""Record a model's structure and the settings of the process, to restore both when a plan fails halfway.

Nothing of the model is copied: classes, dictionaries and the storage of each parameter are kept by reference, and a plan replaces
them instead of writing into them. The only exception is the broadcast of rank 0's values; it comes after all checks.

Settings of the whole process change what a step computes or costs. A trial runs under the caller's settings, and the changes of a
plan are undone before the next plan is tried in the same process.

A model on the meta device has nothing to record: here it gets memory and its first values.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.wrapping import parameter_places


class ModelSnapshot:
    """The structure of a model at one moment."""

    def __init__(self, model: nn.Module):
        self.modules: list[tuple[nn.Module, type, dict[str, Any]]] = []
        self.tensors: list[tuple[Tensor, Tensor, bool, Tensor | None]] = []
        for module in model.modules():
            fields = {key: _shallow(value) for key, value in vars(module).items()}
            self.modules.append((module, type(module), fields))
        for tensor in [*model.parameters(), *model.buffers()]:
            self.tensors.append((tensor, tensor.data, tensor.requires_grad, tensor.grad))

    def restore(self) -> None:
        """Restore every class, attribute and tensor."""
        for module, cls, fields in self.modules:
            object.__setattr__(module, "__class__", cls)
            vars(module).clear()
            vars(module).update({key: _shallow(value) for key, value in fields.items()})
        with torch.no_grad():
            for tensor, data, requires_grad, grad in self.tensors:
                tensor.grad = None
                tensor.data = data
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad


def _shallow(value: object) -> object:
    return value.copy() if isinstance(value, dict | set | list) else value


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """The settings of a process at one moment."""

    threads: int
    dtype: torch.dtype
    precision: tuple[str, ...]
    """How float32 products are computed, by backend."""
    legacy_precision: str | None
    """The same under its older name; None where torch cannot say it."""
    benchmark: bool
    deterministic: bool
    warn_only: bool
    activation_budget: float
    """Share of the activations that the compiler may keep."""

    @classmethod
    def capture(cls) -> "ProcessSettings":
        """Return the settings of this process. No device is initialized."""
        return cls(
            threads=torch.get_num_threads(),
            dtype=torch.get_default_dtype(),
            precision=tuple(backend.fp32_precision for backend in _backends()),
            legacy_precision=_legacy_precision(),
            benchmark=torch.backends.cudnn.benchmark,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            activation_budget=_functorch().activation_memory_budget
            if "torch._functorch.config" in sys.modules
            else 1.0,
        )

    def restore(self) -> None:
        """Apply the settings to this process."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.dtype)
        if self.legacy_precision is not None and self.legacy_precision != _legacy_precision():
            torch.set_float32_matmul_precision(self.legacy_precision)
        for backend, value in zip(_backends(), self.precision):
            if backend.fp32_precision != value:
                backend.fp32_precision = value
        torch.backends.cudnn.benchmark = self.benchmark
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (self.deterministic, self.warn_only):  # the call imports the compiler, which takes seconds
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        if self.activation_budget != 1.0 or "torch._functorch.config" in sys.modules:
            _functorch().activation_memory_budget = self.activation_budget


def _backends() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul


def _legacy_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set through the newer names, in a way that the older one cannot express
        return None


def _functorch() -> Any:
    from torch._functorch import config

    return config


def materialise(
    model: nn.Module, device: torch.device, param_init_fn: Callable[[nn.Module], None] | None = None
) -> None:
    """Allocate memory for a model on the meta device, and let each module initialise its own parameters."""
    ties = list(parameter_places(model).values())
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
