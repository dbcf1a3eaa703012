"""Record a model's structure and the settings of the process, to restore both when a plan fails halfway or has been tried.

Nothing of the model is copied: classes, what containers hold and the storage of each parameter are kept by reference, and a plan replaces
them instead of writing into them. The only exception is the broadcast of rank 0's values; it comes after all checks.

A model on the meta device has nothing to record: here it gets memory and its first values.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.wrapping import parameter_places

_Container = dict[object, object] | list[object] | set[object]


class HeldValues:
    """What dicts, lists and sets hold at one moment, with those inside them."""

    def __init__(self, containers: Iterable[object]):
        self._found: dict[int, tuple[_Container, list[object]]] = {}
        waiting = list(containers)
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict | list | set) and id(value) not in self._found:
                self._found[id(value)] = value, _content(value)
                waiting += self._found[id(value)][1]

    def restore(self) -> None:
        """Restore them in place, because others may refer to them."""
        for container, content in self._found.values():
            if list(map(id, _content(container))) == list(map(id, content)):
                continue
            container.clear()
            if isinstance(container, dict):
                container.update(zip(content[::2], content[1::2]))
            else:
                (container.extend if isinstance(container, list) else container.update)(content)


def _content(container: _Container) -> list[object]:
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)


class ModelSnapshot:
    """The structure of a model at one moment."""

    def __init__(self, model: nn.Module):
        self.classes = [(module, type(module)) for module in model.modules()]
        self.held = HeldValues(vars(module) for module in model.modules())
        self.tensors: list[tuple[Tensor, Tensor, bool, Tensor | None]] = []
        for tensor in [*model.parameters(), *model.buffers()]:
            self.tensors.append((tensor, tensor.data, tensor.requires_grad, tensor.grad))

    def restore(self) -> None:
        """Restore every class, attribute and tensor."""
        for module, cls in self.classes:
            object.__setattr__(module, "__class__", cls)
        self.held.restore()
        with torch.no_grad():
            for tensor, data, requires_grad, grad in self.tensors:
                tensor.grad = None
                tensor.data = data
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad


@dataclass(frozen=True)
class ProcessSettings:
    """The settings of a process at one moment, by name."""

    values: Mapping[str, Any]

    @classmethod
    def capture(cls) -> "ProcessSettings":
        """Return the settings of this process. No device is initialized."""
        return cls({name: read() for name, (read, _) in _settings().items()})

    def restore(self) -> None:
        """Apply the settings to this process."""
        for name, (read, write) in _settings().items():
            value = self.values.get(name, 1.0)  # a compiler that was not loaded yet keeps all activations
            if value is not None and value != read():  # some calls import the compiler, which takes seconds
                write(value)


def _settings() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return how each setting is read and written, in the order in which they are restored."""
    backends: Any = torch.backends
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "precision": (_older_precision, torch.set_float32_matmul_precision),
        "deterministic": (
            lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
        ),
        "benchmark": _attribute(backends.cudnn, "benchmark"),
    }  # fmt: skip
    holders = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    found |= {f"precision {index}": _attribute(holder, "fp32_precision") for index, holder in enumerate(holders)}
    if (compiler := sys.modules.get("torch._functorch.config")) is not None:
        found["activation budget"] = _attribute(compiler, "activation_memory_budget")
    return found


def _attribute(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


def _older_precision() -> str | None:
    """Return the precision of float32 products under its older name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set through the newer names, in a way that the older one cannot express
        return None


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
