"""Gradient scaling where float16 needs it, shared by the units that can share a backward pass.

Small float16 gradients vanish, so the loss is multiplied by a large number and gradients divided by it again (Micikevicius
et al., 2018). bfloat16 has float32's range and needs none, and neither does anything on a CPU. Whether a scaler exists is
decided at the first backward, because only then it is known in what precision the forward ran.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.core.errors import DrivetrainWarning

if TYPE_CHECKING:
    from drivetrain.optim.scheduler import OptimScheduler

_MAX_NODES = 20_000  # enough for any graph in which float16 occurs at all


class Scaling:
    """Holds the scaler of one or more units, or the knowledge that there is none."""

    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.autocast_dtype: torch.dtype | None = None
        self._knows_precision = False
        self._decided = False
        self._waiting: dict[str, Any] | None = None

    def scaler_for(self, unit: "OptimScheduler", loss: Tensor) -> "torch.amp.GradScaler | None":
        """Return the scaler, deciding on the first call whether there is one."""
        if not self._decided:
            self._decided = True
            device = unit.params[0].device.type
            if unit.use_amp and device != "cpu" and self._is_float16(device, unit, loss):
                self.scaler = torch.amp.GradScaler(device)
                if self._waiting is not None:
                    self.scaler.load_state_dict(self._waiting)
            elif self._waiting is not None:
                _warn_unused(unit)
            self._waiting = None
        return self.scaler

    def use(self, autocast_dtype: torch.dtype | None) -> None:
        """Take the precision from whoever knows it; None means no autocast."""
        self.autocast_dtype, self._knows_precision = autocast_dtype, True

    def state_dict(self) -> dict[str, Any] | None:
        """Return the scaler's state, None without one."""
        return self._waiting if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None, unit: "OptimScheduler") -> None:
        """Take a saved scale; one that arrives before the first backward waits for the decision."""
        if not state:
            return
        if self.scaler is not None:
            self.scaler.load_state_dict(state)
        elif self._decided or not unit.use_amp or unit.params[0].device.type == "cpu":
            _warn_unused(unit)
        else:
            self._waiting = dict(state)

    def _is_float16(self, device: str, unit: "OptimScheduler", loss: Tensor) -> bool:
        if not all(p.dtype is torch.float32 for p in unit.params if p.is_floating_point()):
            return False  # a scaler cannot unscale float16 gradients
        if self._knows_precision:
            return self.autocast_dtype is torch.float16
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device) is torch.float16
        return computes_in_float16(loss)


def computes_in_float16(loss: Tensor) -> bool:
    """Say whether any gradient on the way back from the loss is float16; autocast is usually left before backward."""
    todo: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while todo and len(seen) < _MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(getattr(meta, "dtype", None) is torch.float16 for meta in getattr(node, "_input_metadata", ())):
            return True
        todo.extend(following for following, _ in node.next_functions)
    return False


def _warn_unused(unit: "OptimScheduler") -> None:
    warnings.warn(
        f"unit {unit.name!r}: the saved state has a gradient scale, but this run needs none; it is left out.",
        DrivetrainWarning,
        stacklevel=5,
    )
