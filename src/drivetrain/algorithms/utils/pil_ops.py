"""The operations of image augmentation on PIL images; `tensor_ops` has the same ones for tensors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

Matrix = tuple[float, float, float, float, float, float]
"""Where an output pixel (x, y) comes from: (a x + b y + c, d x + e y + f), counted from pixel corners."""


def size(image: "Image") -> tuple[int, int]:
    """Return width and height."""
    return image.size


def autocontrast(image: "Image") -> "Image":
    """Stretch each channel to the full range."""
    from PIL import ImageOps

    return ImageOps.autocontrast(image)


def equalize(image: "Image") -> "Image":
    """Make each channel's values equally frequent."""
    from PIL import ImageOps

    return ImageOps.equalize(image)


def posterize(image: "Image", bits: int) -> "Image":
    """Keep the highest bits of each value."""
    from PIL import ImageOps

    return ImageOps.posterize(image, bits)


def solarize(image: "Image", threshold: int) -> "Image":
    """Invert the values that reach the threshold."""
    from PIL import ImageOps

    return ImageOps.solarize(image, threshold)


def rotate(image: "Image", degrees: float) -> "Image":
    """Turn counter-clockwise around the centre."""
    from PIL import Image

    return image.rotate(degrees, resample=Image.Resampling.BILINEAR)


def affine(image: "Image", matrix: Matrix) -> "Image":
    """Move every pixel; what comes from outside is black."""
    from PIL import Image

    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)


def color(image: "Image", factor: float) -> "Image":
    """Change the saturation: 0 is grey, 1 leaves the image as it is."""
    return _enhanced("Color", image, factor)


def contrast(image: "Image", factor: float) -> "Image":
    """Change the contrast: 0 is plain grey, 1 leaves the image as it is."""
    return _enhanced("Contrast", image, factor)


def brightness(image: "Image", factor: float) -> "Image":
    """Change the brightness: 0 is black, 1 leaves the image as it is."""
    return _enhanced("Brightness", image, factor)


def sharpness(image: "Image", factor: float) -> "Image":
    """Change the sharpness: 0 is smooth, 1 leaves the image as it is."""
    return _enhanced("Sharpness", image, factor)


def _enhanced(kind: str, image: "Image", factor: float) -> "Image":
    from PIL import ImageEnhance

    return getattr(ImageEnhance, kind)(image).enhance(factor)
