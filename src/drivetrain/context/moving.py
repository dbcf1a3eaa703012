"""Moving values to a device: batches in the loop, and what an optimizer keeps about its parameters.

`move_to_device` is called for every batch, so the common case, a tuple or list of tensors, takes the shortest way. It
returns new containers of the same types and leaves the given ones alone: a dataset may own them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.containers import map_items
from drivetrain.core.errors import warn
from drivetrain.runtime.device import PINNED, wide_dtype

Device = torch.device | str


def move_to_device(device: Device, *args: object, non_blocking: bool = False) -> Any:
    """Return the argument on `device`, or a list of them when several are given.

    Dicts, lists, tuples, namedtuples and dataclasses keep their types; anything with `.to` is asked to move itself; other
    objects are returned as they are. `non_blocking` has an effect on devices where torch can do that safely: cuda and xpu.

    >>> move_to_device("cpu", {"x": torch.zeros(1), "name": "a"})
    {'x': tensor([0.]), 'name': 'a'}
    """
    non_blocking = non_blocking and torch.device(device).type in PINNED
    if len(args) == 1:
        return _move(args[0], device, non_blocking)
    return [_move(value, device, non_blocking) for value in args]


def _move(value: Any, device: Device, non_blocking: bool) -> object:
    kind = type(value)
    if kind is Tensor:
        return _move_tensor(value, device, non_blocking)
    if kind is tuple or kind is list:
        return kind([_move(item, device, non_blocking) for item in value])
    if kind is dict:
        return {key: _move(item, device, non_blocking) for key, item in value.items()}
    if kind in (str, int, float, bool, type(None)):
        return value
    if isinstance(value, Tensor):
        return _move_tensor(value, device, non_blocking)
    if isinstance(value, nn.Module):
        return value.to(device, non_blocking=non_blocking)
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        moved = value.to(device)
        return value if moved is None else moved
    return map_items(value, lambda item: _move(item, device, non_blocking))


def _move_tensor(tensor: Tensor, device: Device, non_blocking: bool) -> Tensor:
    try:
        return tensor.to(device, non_blocking=non_blocking)
    except TypeError:
        if tensor.dtype is not torch.float64 or wide_dtype(torch.device(device)) is torch.float64:
            raise
        warn(
            f"{str(device)!r} has no float64, so float64 tensors become float32 there. Give float32 to avoid this warning."
        )
        return tensor.to(device, torch.float32)


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`; a leaf that is being trained keeps its identity, so that its optimizer still finds it."""
    if tensor.device == device:
        return tensor
    if not (isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)):
        return tensor.to(device)
    with torch.no_grad():
        gradient = tensor.grad
        tensor.grad = None  # its device must not contradict the data's while that changes
        tensor.data = tensor.data.to(device)
        if gradient is not None:
            tensor.grad = gradient.to(device)
    return tensor


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: Device | None = None) -> None:
    """Bring what the optimizer keeps about each parameter to `device`, by default that parameter's."""
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for name, setting in group.items():
            # A learning rate may be a tensor. On the CPU it serves every device; elsewhere it must be where the parameters are.
            if isinstance(setting, Tensor) and setting.device.type != "cpu" and group["params"]:
                group[name] = setting.to(device or group["params"][0].device)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                # torch keeps the step count on the CPU unless a fused or captured kernel reads it.
                target = "cpu" if key == "step" and not on_device else device or parameter.device
                state[key] = _move(value, target, False)
