"""BlurPool (Zhang, 2019, arXiv 1904.11486): low-pass filter before every subsampling, so that shifted images look alike.

A strided convolution or max-pool aliases: moving the input by one pixel changes what is kept. A small fixed blur in front of the
subsampling removes the frequencies that would fold over.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, inside, warn_no_effect, with_settings
from drivetrain.core.arguments import check_counts
from drivetrain.core.errors import ConfigError
from drivetrain.module.surgery import ReplacementFunction, count_module_instances, replace_module_classes

Size2d = int | tuple[int, int]


def default_filter(device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the 3x3 binomial filter, shape (1, 1, 3, 3); its entries are exact in every floating type."""
    row = torch.tensor([1.0, 2.0, 1.0], device=device, dtype=dtype)
    return (row[:, None] * row[None, :] / 16)[None, None]


def blur_2d(input: Tensor, channels: int = -1, stride: Size2d = 1, filter: Tensor | None = None) -> Tensor:
    """Return images blurred channel by channel with same padding, then subsampled by `stride`.

    `filter` has shape (1, 1, h, w) or (channels, 1, h, w) with odd sides. Images smaller than it are returned as they are.

    >>> blur_2d(torch.ones(1, 2, 8, 8), stride=2).shape
    torch.Size([1, 2, 4, 4])
    """
    filter = default_filter(input.device, input.dtype) if filter is None else filter.to(input)
    height, width = filter.shape[-2:]
    if height % 2 == 0 or width % 2 == 0:
        raise IndexError(
            f"blur_2d: the filter is {height}x{width}; both sides must be odd, so that the filter has a center."
        )
    padding = (height // 2, width // 2)
    if input.shape[-2] + 2 * padding[0] < height or input.shape[-1] + 2 * padding[1] < width:
        return input
    channels = input.shape[-3] if channels < 1 else channels
    if filter.shape[0] == 1:
        filter = filter.expand(channels, -1, -1, -1)
    return F.conv2d(input, filter, stride=stride, padding=padding, groups=channels)


def blurmax_pool2d(
    input: Tensor,
    kernel_size: Size2d | None = None,
    stride: Size2d = 2,
    padding: Size2d = 0,
    dilation: Size2d = 1,
    ceil_mode: bool = False,
    filter: Tensor | None = None,
) -> Tensor:
    """Return the maximum over windows at every position, blurred and subsampled; windows are 2x2 unless said otherwise."""
    kernel_size = (2, 2) if kernel_size is None else kernel_size
    pooled = F.max_pool2d(input, kernel_size, stride=1, padding=padding, dilation=dilation, ceil_mode=ceil_mode)
    return blur_2d(pooled, stride=stride, filter=filter)


class BlurMaxPool2d(nn.Module):
    """Max-pooling that blurs before it subsamples."""

    blur_filter: Tensor

    def __init__(
        self,
        kernel_size: Size2d,
        stride: Size2d | None = None,
        padding: Size2d = 0,
        dilation: Size2d = 1,
        ceil_mode: bool = False,
    ):
        super().__init__()
        self.kernel_size, self.padding, self.dilation, self.ceil_mode = kernel_size, padding, dilation, ceil_mode
        self.stride = kernel_size if stride is None else stride
        self.register_buffer("blur_filter", default_filter(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return blurmax_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.blur_filter
        )

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}"

    @staticmethod
    def from_maxpool2d(module: nn.MaxPool2d, module_index: int = -1) -> "BlurMaxPool2d":
        """Return a layer that replaces a max-pool."""
        return BlurMaxPool2d(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)


class BlurConv2d(nn.Module):
    """A strided convolution with a blur: in front of it, or, at more cost, between a dense convolution and the subsampling."""

    blur_filter: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size2d,
        stride: Size2d | None = None,
        padding: Size2d | str = 0,
        dilation: Size2d = 1,
        groups: int = 1,
        bias: bool = True,
        blur_first: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
    ):
        super().__init__()
        stride = kernel_size if stride is None else stride
        self.blur_first = blur_first
        self.blur_stride: Size2d = 1 if blur_first else stride
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride if blur_first else 1, padding, dilation, groups, bias, padding_mode
        )  # fmt: skip
        self.register_buffer("blur_filter", default_filter(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.blur_first:
            return self.conv(blur_2d(input, filter=self.blur_filter))
        return blur_2d(self.conv(input), stride=self.blur_stride, filter=self.blur_filter)

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, blur_first: bool = True) -> "BlurConv2d":
        """Return a layer that replaces a convolution and uses its parameters."""
        new = BlurConv2d.__new__(BlurConv2d)
        nn.Module.__init__(new)
        new.blur_first = blur_first
        new.blur_stride = 1 if blur_first else _pair(module.stride)
        new.conv = module if blur_first else with_settings(module, stride=(1, 1))
        new.register_buffer("blur_filter", default_filter(), persistent=False)
        return new


class BlurPool2d(nn.Module):
    """A blur that subsamples: the antialiased form of an average pool or of plain striding."""

    blur_filter: Tensor

    def __init__(self, channels: int = 0, stride: Size2d = 2, padding: Size2d = 1):
        super().__init__()
        self.channels, self.stride, self.padding = channels, stride, padding
        self.register_buffer("blur_filter", default_filter(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        channels = input.shape[-3] if self.channels < 1 else self.channels
        filter = self.blur_filter.to(input).expand(channels, -1, -1, -1)
        return F.conv2d(input, filter, stride=self.stride, padding=self.padding, groups=channels)


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Optimizers = None,
) -> None:
    """Put a blur into every max-pool, and into every strided convolution of at least `min_channels` inputs."""
    check_blurpool("apply_blurpool", replace_convs, replace_maxpools, min_channels)
    blurred = inside(model, BlurConv2d)

    def blur_conv(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d)
        if module in blurred or max(module.stride) == 1 or module.in_channels < min_channels:
            return None
        return BlurConv2d.from_conv2d(module, index, blur_first)

    def blur_pool(module: nn.Module, index: int) -> nn.Module | None:
        # A pool that also returns the places of its maxima has none after a blur.
        if type(module) is not nn.MaxPool2d or module.return_indices:
            return None
        return BlurMaxPool2d.from_maxpool2d(module, index)

    policies: dict[type[nn.Module], ReplacementFunction] = {nn.MaxPool2d: blur_pool} if replace_maxpools else {}
    if replace_convs:
        policies[nn.Conv2d] = blur_conv
    layers = (BlurConv2d, BlurMaxPool2d)
    if not replace_module_classes(model, policies, optimizers) and not count_module_instances(model, layers):
        warn_no_effect(
            f"BlurPool found nothing to replace in {type(model).__name__}: no MaxPool2d, and no strided Conv2d with at least "
            f"{min_channels} input channels (min_channels)."
        )


def check_blurpool(who: str, replace_convs: bool, replace_maxpools: bool, min_channels: int) -> None:
    """Reject settings under which nothing could be replaced."""
    check_counts(who, 0, min_channels=min_channels)
    if not replace_convs and not replace_maxpools:
        raise ConfigError(
            f"{who}: replace_convs and replace_maxpools are both False, so nothing would change. Set one to True."
        )


class BlurPool(ModelSurgery):
    """Antialiases the max-pools and strided convolutions of the model."""

    function = staticmethod(apply_blurpool)
    counts = {"blurpool/num_blurpool_layers": BlurMaxPool2d, "blurpool/num_blurconv_layers": BlurConv2d}

    def __init__(
        self, replace_convs: bool = True, replace_maxpools: bool = True, blur_first: bool = True, min_channels: int = 16
    ):
        check_blurpool("BlurPool", replace_convs, replace_maxpools, min_channels)
        self.replace_convs, self.replace_maxpools = replace_convs, replace_maxpools
        self.blur_first, self.min_channels = blur_first, min_channels
