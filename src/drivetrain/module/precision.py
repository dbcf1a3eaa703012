"""What a precision name means: the autocast type, the parameters' type, and whether gradients need scaling.

Mixed precision keeps parameters in float32 and lets autocast choose per operation (Micikevicius et al., 2018). Only float16 on an
accelerator needs a gradient scaler: bfloat16 has float32's range, and a CPU has no fast float16. `autocast_forward` makes a model
run under autocast by itself: its class becomes a generated subclass, so names, keys and copies do not change.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from drivetrain.core.errors import ConfigError, unknown_name, warn
from drivetrain.core.types import StateDict
from drivetrain.module.wrapping import GeneratedClass, add_mixin


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision to compute in, made by `parse_precision`."""

    name: str
    """The canonical name, which is also what a checkpoint and a run configuration show."""
    autocast_dtype: torch.dtype | None = None
    """The low-precision type of autocast, or None for no autocast."""
    parameter_dtype: torch.dtype | None = None
    """The type parameters are cast to, or None to leave them as they are."""

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """Return a context in which operations run in this precision."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)

    def make_scaler(self, device: torch.device) -> "torch.amp.GradScaler | None":
        """Return a gradient scaler if float16 needs one, else None."""
        if self.autocast_dtype is torch.float16 and device.type != "cpu":
            return torch.amp.GradScaler(device.type)
        return None

    def cast_parameters(self, model: nn.Module) -> nn.Module:
        """Cast floating-point parameters and buffers in place if this precision requires it."""
        return model if self.parameter_dtype is None else model.to(dtype=self.parameter_dtype)


def warn_unscaled_float16(reason: str) -> None:
    """Warn that float16 gradients are not scaled."""
    warn(f"{reason}: small gradients become zero and large ones infinite. Use 'bf16', or full precision.")


PRECISIONS = {
    "no": Precision(name="no"),
    "bf16": Precision(name="bf16", autocast_dtype=torch.bfloat16),
    "fp16": Precision(name="fp16", autocast_dtype=torch.float16),
    "bf16-true": Precision(name="bf16-true", parameter_dtype=torch.bfloat16),
    "fp64": Precision(name="fp64", parameter_dtype=torch.float64),
    "fp8": Precision(name="fp8", autocast_dtype=torch.bfloat16),
}
_OTHER_NAMES = {
    "no": "fp32 32 32-true float32",
    "bf16": "bf16-mixed amp_bf16 bfloat16",
    "fp16": "16-mixed amp_fp16 float16",
    "fp64": "64 64-true float64 double",
    "fp8": "amp_fp8",
}
_ALIASES = {alias: name for name, aliases in _OTHER_NAMES.items() for alias in aliases.split()}


def parse_precision(name: "str | int | Precision | None") -> Precision:
    """Return the precision with a name. None reads the environment variable that `accelerate launch` sets.

    >>> parse_precision("bf16-mixed").name
    'bf16'
    """
    if isinstance(name, Precision):
        return name
    if name is None:
        name = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    text = str(name).strip().lower()
    canonical = _ALIASES.get(text, text)
    if canonical not in PRECISIONS:
        raise ConfigError("precision: " + unknown_name("precision", name, [*PRECISIONS, *_ALIASES]))
    return PRECISIONS[canonical]


class Autocasting(GeneratedClass):
    """Runs a module's forward under autocast."""

    _autocast_device: str
    _autocast_dtype: torch.dtype

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module's own forward in low precision."""
        with torch.autocast(self._autocast_device, dtype=self._autocast_dtype):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class AutocastingGenerator(Autocasting):
    """Runs `generate` under autocast too."""

    def generate(self, *args: object, **kwargs: object) -> object:
        """Run the module's own generate in low precision."""
        with torch.autocast(self._autocast_device, dtype=self._autocast_dtype):
            return super().generate(*args, **kwargs)  # type: ignore[misc]


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> nn.Module:
    """Make a model compute under autocast, in place."""
    kind = AutocastingGenerator if callable(getattr(model, "generate", None)) else Autocasting
    add_mixin(model, kind, _autocast_device=device_type, _autocast_dtype=dtype)
    return model


_MAX_NODES = 20_000  # of a graph to look for float16 in; enough for any in which it occurs at all


class Scaling:
    """The gradient scaler of optimizers that share a backward pass, if they need one.

    Small float16 gradients vanish, so the loss is multiplied by a large number and gradients are divided by it again (Micikevicius et
    al., 2018). bfloat16 has float32's range and needs none, and neither does anything on a CPU. Whether a scaler exists is decided at
    the first backward, because only then it is known in what precision the forward ran.
    """

    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.autocast_dtype: torch.dtype | None = None
        self._knows_precision = False
        self._decided = False
        self._waiting: StateDict | None = None

    def scaler_for(
        self, loss: Tensor, parameters: Sequence[Tensor], is_wanted: bool, name: str
    ) -> "torch.amp.GradScaler | None":
        """Return the scaler. The first call decides whether there is one."""
        if not self._decided:
            self._decided = True
            device = parameters[0].device.type
            if is_wanted and device != "cpu" and self._is_float16(device, parameters, loss):
                self.scaler = torch.amp.GradScaler(device)
                if self._waiting is not None:
                    self.scaler.load_state_dict(self._waiting)
            elif self._waiting is not None:
                _warn_of_unused_scale(name)
            self._waiting = None
        return self.scaler

    def use(self, autocast_dtype: torch.dtype | None) -> None:
        """Set the precision; None means no autocast."""
        self.autocast_dtype, self._knows_precision = autocast_dtype, True

    def state_dict(self) -> StateDict | None:
        """Return the scaler's state, None without one."""
        return self._waiting if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: StateDict | None, can_scale: bool, name: str) -> None:
        """Load a saved scale. Before the first backward it is kept until the decision."""
        if not state:
            return
        if self.scaler is not None:
            self.scaler.load_state_dict(state)
        elif self._decided or not can_scale:
            _warn_of_unused_scale(name)
        else:
            self._waiting = dict(state)

    def _is_float16(self, device: str, parameters: Sequence[Tensor], loss: Tensor) -> bool:
        if not all(p.dtype is torch.float32 for p in parameters if p.is_floating_point()):
            return False  # a scaler cannot unscale float16 gradients
        if self._knows_precision:
            return self.autocast_dtype is torch.float16
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device) is torch.float16
        return computes_in_float16(loss)


def computes_in_float16(loss: Tensor) -> bool:
    """Return whether any gradient in the backward graph of the loss is float16. Autocast is usually left before backward."""
    todo: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while todo and len(seen) < _MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(getattr(meta, "dtype", None) is torch.float16 for meta in getattr(node, "_input_metadata", ())):
            return True
        todo.extend(following for following, _ in node.next_functions)
    return False


def _warn_of_unused_scale(name: str) -> None:
    warn(f"unit {name!r}: the saved state has a gradient scale, but this run needs none; it is ignored.")
