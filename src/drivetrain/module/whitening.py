"""A first convolution that whitens its patches, from the data instead of from learning (Page, 2018; Jordan, 2024, arXiv
2404.00498).

Neighbouring pixels say nearly the same. Projected on the principal directions of small patches, and scaled to unit
variance, the channels of the first layer are uncorrelated and alike in size, which is what an optimizer would otherwise
spend its first epochs on.
"""

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, ConfigTypeError


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
            f"whitening_kernel: {len(flat)} patches cannot show {flat.shape[1]} directions. Give more images."
        )
    eigenvalues, eigenvectors = torch.linalg.eigh(torch.cov(flat.T))
    filters = (eigenvectors / (eigenvalues.clamp(min=0) + eps).sqrt()).T.flip(0)
    return filters.reshape(-1, images.shape[1], height, width)


@torch.no_grad()
def whiten_convolution(convolution: nn.Conv2d, images: Tensor, eps: float = 5e-4) -> None:
    """Fill a convolution with the whitening filters of some images, then with their negatives, and freeze its weight.

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
