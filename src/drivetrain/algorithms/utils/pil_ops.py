"""The operations of image augmentation on PIL images; `tensor_ops` has the same ones for tensors."""

from PIL import ImageEnhance
from PIL.Image import Image, Resampling, Transform
from PIL.ImageOps import autocontrast, equalize, posterize, solarize  # noqa: F401 (operations as they are)

from drivetrain.algorithms.utils.tensor_ops import Matrix


def rotate(image: Image, degrees: float) -> Image:
    """Turn counter-clockwise around the centre."""
    return image.rotate(degrees, resample=Resampling.BILINEAR)


def affine(image: Image, matrix: Matrix) -> Image:
    """Move every pixel; what comes from outside is black."""
    return image.transform(image.size, Transform.AFFINE, matrix, resample=Resampling.BILINEAR)


def color(image: Image, factor: float) -> Image:
    """Change the saturation: 0 is grey, 1 leaves the image as it is."""
    return ImageEnhance.Color(image).enhance(factor)


def contrast(image: Image, factor: float) -> Image:
    """Change the contrast: 0 is plain grey, 1 leaves the image as it is."""
    return ImageEnhance.Contrast(image).enhance(factor)


def brightness(image: Image, factor: float) -> Image:
    """Change the brightness: 0 is black, 1 leaves the image as it is."""
    return ImageEnhance.Brightness(image).enhance(factor)


def sharpness(image: Image, factor: float) -> Image:
    """Change the sharpness: 0 is smooth, 1 leaves the image as it is."""
    return ImageEnhance.Sharpness(image).enhance(factor)
