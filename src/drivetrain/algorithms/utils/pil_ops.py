"""The operations of image augmentation on PIL images; `tensor_ops` has the same ones for tensors."""

from typing import Any

Matrix = tuple[float, float, float, float, float, float]
"""Where an output pixel (x, y) comes from: (a x + b y + c, d x + e y + f), counted from pixel corners."""


def size(image: Any) -> tuple[int, int]:
    """Return width and height."""
    return image.size


def autocontrast(image: Any) -> Any:
    """Stretch each channel to the full range."""
    from PIL import ImageOps

    return ImageOps.autocontrast(image)


def equalize(image: Any) -> Any:
    """Make each channel's values equally frequent."""
    from PIL import ImageOps

    return ImageOps.equalize(image)


def posterize(image: Any, bits: int) -> Any:
    """Keep the highest bits of each value."""
    from PIL import ImageOps

    return ImageOps.posterize(image, bits)


def solarize(image: Any, threshold: int) -> Any:
    """Invert the values that reach the threshold."""
    from PIL import ImageOps

    return ImageOps.solarize(image, threshold)


def rotate(image: Any, degrees: float) -> Any:
    """Turn counter-clockwise around the centre."""
    from PIL import Image

    return image.rotate(degrees, resample=Image.Resampling.BILINEAR)


def affine(image: Any, matrix: Matrix) -> Any:
    """Move every pixel; what comes from outside is black."""
    from PIL import Image

    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)


def color(image: Any, factor: float) -> Any:
    """Change the saturation: 0 is grey, 1 leaves the image as it is."""
    from PIL import ImageEnhance

    return ImageEnhance.Color(image).enhance(factor)


def contrast(image: Any, factor: float) -> Any:
    """Change the contrast: 0 is plain grey, 1 leaves the image as it is."""
    from PIL import ImageEnhance

    return ImageEnhance.Contrast(image).enhance(factor)


def brightness(image: Any, factor: float) -> Any:
    """Change the brightness: 0 is black, 1 leaves the image as it is."""
    from PIL import ImageEnhance

    return ImageEnhance.Brightness(image).enhance(factor)


def sharpness(image: Any, factor: float) -> Any:
    """Change the sharpness: 0 is smooth, 1 leaves the image as it is."""
    from PIL import ImageEnhance

    return ImageEnhance.Sharpness(image).enhance(factor)
