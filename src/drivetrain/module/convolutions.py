"""Changes to convolutions: channels-last memory, and a first layer that whitens its patches.

Channels-last: convolutions read all channels of a pixel together, which tensor cores and CPU kernels prefer. Only the memory layout of
kernels and inputs changes, not shapes, names and values.

Whitening (Page, 2018; Jordan, 2024, arXiv 2404.00498) sets the first layer from the data instead of learning it: projected on the
principal directions of small patches and scaled to unit variance, channels are uncorrelated and of equal size.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from drivetrain.core.errors import ConfigError, ConfigTypeError

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@torch.no_grad()
def to_channels_last(model: nn.Module) -> int:
    """Lay out the kernels of 2-D and 3-D convolutions channels-last, in place; return how many there are."""
    kernels = _kernels(model)
    for kernel in kernels:
        kernel.data = kernel.data.contiguous(memory_format=_FORMATS[kernel.ndim])
    return len(kernels)


def channels_last_input(tensor: Tensor) -> Tensor:
    """Return a 4-D or 5-D floating-point tensor channels-last, and any other value unchanged."""
    if tensor.ndim in _FORMATS and tensor.is_floating_point():
        return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])
    return tensor


def is_worth_channels_last(model: nn.Module) -> bool:
    """Return whether 2-D and 3-D convolutions hold most of the parameters, which one patch convolution of a transformer does not."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return 2 * sum(kernel.numel() for kernel in _kernels(model)) > total


def _kernels(model: nn.Module) -> list[nn.Parameter]:
    """Return the distinct kernels that have a channels-last layout."""
    convolutions = [module for module in model.modules() if isinstance(module, _ConvNd)]
    kernels = dict.fromkeys(parameter for module in convolutions for parameter in module.parameters())
    return [kernel for kernel in kernels if kernel.ndim in _FORMATS]


@torch.no_grad()
def whitening_kernel(images: Tensor, kernel_size: tuple[int, int], eps: float = 5e-4) -> Tensor:
    """Return filters (C·h·w, C, h, w) whose outputs on patches of the images are uncorrelated and have variance λ / (λ + eps).

    The filters are the eigenvectors of the patches' covariance, largest eigenvalue λ first, each divided by sqrt(λ + eps).

    >>> images = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(0)).cumsum(-1)
    >>> outputs = nn.functional.conv2d(images, whitening_kernel(images, (1, 2), eps=0.0)).transpose(0, 1).flatten(1)
    >>> torch.allclose(torch.cov(outputs), torch.eye(2), atol=1e-3)
    True
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ConfigTypeError(
            f"whitening_kernel: expected floating-point images (N, C, H, W); got {images.dtype} of shape {tuple(images.shape)}."
        )
    height, width = kernel_size
    patches = images.float().unfold(2, height, 1).unfold(3, width, 1)  # (N, C, rows, columns, h, w)
    flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, images.shape[1] * height * width)
    if len(flat) <= flat.shape[1]:
        raise ConfigError(
            f"whitening_kernel: {len(flat)} patches are too few for {flat.shape[1]} directions. Give more images."
        )
    eigenvalues, eigenvectors = torch.linalg.eigh(torch.cov(flat.T))
    filters = (eigenvectors / (eigenvalues.clamp(min=0) + eps).sqrt()).T.flip(0)
    return filters.reshape(-1, images.shape[1], height, width)


@torch.no_grad()
def whiten_convolution(convolution: nn.Conv2d, images: Tensor, eps: float = 5e-4) -> None:
    """Set a convolution to the whitening filters of some images and their negatives, and freeze its weight.

    Both signs are there because the activation that follows cuts off one. The layer has C·h·w filters, or twice as many; a bias is set to
    zero and stays trainable.
    """
    if convolution.groups != 1:
        raise ConfigError(f"whiten_convolution: the layer has {convolution.groups} groups; expected 1.")
    kernel = whitening_kernel(images, (convolution.kernel_size[0], convolution.kernel_size[1]), eps)
    if convolution.in_channels != kernel.shape[1] or convolution.out_channels not in (len(kernel), 2 * len(kernel)):
        raise ConfigError(
            f"whiten_convolution: images with {kernel.shape[1]} channels need Conv2d({kernel.shape[1]}, {len(kernel)}) or "
            f"Conv2d({kernel.shape[1]}, {2 * len(kernel)}) for this kernel size; got "
            f"Conv2d({convolution.in_channels}, {convolution.out_channels})."
        )
    both = torch.cat([kernel, -kernel])[: convolution.out_channels]
    convolution.weight.copy_(both)
    convolution.weight.requires_grad_(False)
    if convolution.bias is not None:
        convolution.bias.zero_()
