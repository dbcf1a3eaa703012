"""Channels-last memory: convolutions read each pixel's channels in one go, which tensor cores and CPU kernels prefer.

Only convolution kernels are re-laid out; shapes, names and values stay. Inputs must follow, or every first layer
converts.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@torch.no_grad()
def to_channels_last(model: nn.Module) -> int:
    """Lay out the kernels of 2-D and 3-D convolutions channels-last, in place; return how many there are."""
    kernels = _kernels(model)
    for kernel in kernels:
        kernel.data = kernel.data.contiguous(memory_format=_FORMATS[kernel.ndim])
    return len(kernels)


def channels_last_input(tensor: Tensor) -> Tensor:
    """Return a 4-D or 5-D floating tensor channels-last, anything else as it is."""
    if tensor.ndim in _FORMATS and tensor.is_floating_point():
        return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])
    return tensor


def is_worth_channels_last(model: nn.Module) -> bool:
    """Return whether 2-D and 3-D convolutions hold most of the parameters.

    A vision transformer with one patch convolution does not gain; a convolutional network does.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    return 2 * sum(kernel.numel() for kernel in _kernels(model)) > total


def _kernels(model: nn.Module) -> list[nn.Parameter]:
    """Return the distinct kernels that have a channels-last layout."""
    found = {
        parameter: None
        for module in model.modules()
        if isinstance(module, _ConvNd)
        for parameter in module.parameters(recurse=True)
        if parameter.ndim in _FORMATS
    }
    return list(found)
