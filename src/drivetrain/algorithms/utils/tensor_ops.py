"""The operations of image augmentation on uint8 tensors (C, H, W), on any device, with PIL's arithmetic.

They give what `pil_ops` gives, up to one level where PIL rounds in another precision, and never wait for the device.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain.core.errors import ConfigTypeError

Matrix = tuple[float, float, float, float, float, float]
"""Where an output pixel (x, y) comes from: (a x + b y + c, d x + e y + f), counted from pixel corners."""


def size(image: Tensor) -> tuple[int, int]:
    """Return width and height."""
    return image.shape[-1], image.shape[-2]


def autocontrast(image: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    low, high = (edge.float().view(-1, 1, 1) for edge in torch.aminmax(image.flatten(1), dim=1))
    stretched = (image.float() - low) * (255 / (high - low).clamp(min=1))
    return torch.where(high > low, _to_levels(stretched + 1e-3), image)  # rounding down must not turn 255 into 254


def equalize(image: Tensor) -> Tensor:
    """Make each channel's values equally frequent."""
    values = image.flatten(1).long()
    counts = values.new_zeros(values.shape[0], 256).scatter_add_(1, values, torch.ones_like(values))
    brightest = counts.gather(1, values.amax(1, keepdim=True))
    step = (values.shape[1] - brightest) // 255
    below = counts.cumsum(1) - counts
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=image.device))
    return table.gather(1, values).to(torch.uint8).view_as(image)


def posterize(image: Tensor, bits: int) -> Tensor:
    """Keep the highest bits of each value."""
    return image & (256 - 2 ** (8 - bits))


def solarize(image: Tensor, threshold: int) -> Tensor:
    """Invert the values that reach the threshold."""
    return torch.where(image.int() < threshold, image, 255 - image)


def rotate(image: Tensor, degrees: float) -> Tensor:
    """Turn counter-clockwise around the centre."""
    width, height = size(image)
    x, y = width / 2, height / 2
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return affine(image, (cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y))


def affine(image: Tensor, matrix: Matrix) -> Tensor:
    """Move every pixel; what comes from outside is black."""
    a, b, c, d, e, f = matrix
    width, height = size(image)
    across = torch.arange(width, device=image.device, dtype=torch.float32) + 0.5
    down = (torch.arange(height, device=image.device, dtype=torch.float32) + 0.5).unsqueeze(1)
    x, y = a * across + b * down + c, d * across + e * down + f
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = x - 0.5, y - 0.5
    left, top = x.floor(), y.floor()
    x_share, y_share = x - left, y - top
    columns = [(left.long() + step).clamp(0, width - 1) for step in (0, 1)]
    rows = [(top.long() + step).clamp(0, height - 1) for step in (0, 1)]
    above, below = (torch.lerp(*(image[:, row, column].float() for column in columns), x_share) for row in rows)  # type: ignore[call-overload]
    values = torch.lerp(above, below, y_share)
    return torch.where(is_inside, _to_levels(values + 1e-3), torch.zeros_like(image))


def color(image: Tensor, factor: float) -> Tensor:
    """Change the saturation: 0 is grey, 1 leaves the image as it is."""
    return _blend(_grey(image).expand_as(image), image, factor)


def contrast(image: Tensor, factor: float) -> Tensor:
    """Change the contrast: 0 is plain grey, 1 leaves the image as it is."""
    return _blend((_grey(image).float().mean() + 0.5).floor(), image, factor)


def brightness(image: Tensor, factor: float) -> Tensor:
    """Change the brightness: 0 is black, 1 leaves the image as it is."""
    return _blend(torch.zeros_like(image), image, factor)


def sharpness(image: Tensor, factor: float) -> Tensor:
    """Change the sharpness: 0 is smooth, 1 leaves the image as it is."""
    if min(image.shape[-2:]) < 3:  # the filter needs neighbours
        return image
    kernel = torch.ones(3, 3, device=image.device)
    kernel[1, 1].fill_(5)  # a kernel; an assignment would copy the number, and the host would wait
    smooth = image.clone()  # the border has no neighbours and stays
    inner = F.conv2d(image.float().unsqueeze(1), (kernel / 13).view(1, 1, 3, 3)).squeeze(1)
    smooth[:, 1:-1, 1:-1] = _to_levels(inner + 0.5)
    return _blend(smooth, image, factor)


def _grey(image: Tensor) -> Tensor:
    """Return the image's luma, (1, H, W)."""
    check_channels(image)
    if image.shape[0] == 1:
        return image
    red, green, blue = image.int()
    luma = red * 19595 + green * 38470 + blue * 7471  # of ITU-R 601, as sixteen-bit fractions
    return ((luma + 2**15) >> 16).to(torch.uint8).unsqueeze(0)


def check_channels(image: Tensor) -> None:
    """Reject what has no colours: they are defined for one channel and for three."""
    if image.shape[-3] not in (1, 3):
        raise ConfigTypeError(f"color operations need images with 1 or 3 channels; this one has {image.shape[-3]}.")


def _blend(start: Tensor, end: Tensor, factor: float) -> Tensor:
    """Go from one image towards another, and beyond it for factors above 1."""
    return _to_levels(start.float() + factor * (end.float() - start.float()))


def _to_levels(values: Tensor) -> Tensor:
    """Return values cut to 0..255 and rounded down, as PIL does."""
    return values.clamp(0, 255).to(torch.uint8)
