"""A gradient scaler that is created on demand, for optimizers that do not know the precision of the forward pass."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from drivetrain.core.errors import DrivetrainWarning
from drivetrain.core.types import StateDict

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
    warnings.warn(
        f"unit {name!r}: the saved state has a gradient scale, but this run needs none; it is ignored.",
        DrivetrainWarning,
        stacklevel=5,
    )
