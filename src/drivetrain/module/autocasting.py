"""Let a model compute in low precision by itself: its `forward` and `generate` run under autocast, whoever calls them.

The model's class becomes a generated subclass, so names, keys and copies stay as they were.
"""

from typing import Any

import torch
from torch import nn

from drivetrain.module.classes import GeneratedClass, subclass_of


class Autocasting(GeneratedClass):
    """Runs a module's forward under autocast."""

    _autocast_device: str
    _autocast_dtype: torch.dtype

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the module's own forward in low precision."""
        with torch.autocast(self._autocast_device, dtype=self._autocast_dtype):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class AutocastingGenerator(Autocasting):
    """Runs `generate` under autocast too."""

    def generate(self, *args: object, **kwargs: object) -> Any:
        """Run the module's own generate in low precision."""
        with torch.autocast(self._autocast_device, dtype=self._autocast_dtype):
            return super().generate(*args, **kwargs)  # type: ignore[misc]


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> nn.Module:
    """Make a model compute under autocast, in place."""
    if not isinstance(model, Autocasting):
        kind = AutocastingGenerator if callable(getattr(model, "generate", None)) else Autocasting
        model.__class__ = subclass_of(type(model), kind)
    model.__dict__["_autocast_device"], model.__dict__["_autocast_dtype"] = device_type, dtype
    return model
