"""The thirteen augmentations of AugMix and RandAugment, and how strong each one is drawn.

Every function takes an image, a level from 0 to 10 and a generator, draws its strength up to that level and returns an image of the
same kind: PIL images through PIL, tensors (C, H, W; uint8, or floats from 0 to 1) through the same operations written in torch.
Strengths follow Hendrycks et al., "AugMix" (arXiv 1912.02781); colour, contrast, brightness and sharpness are drawn symmetrically
around 1, the `_original` variants as in the paper's code.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.algorithms.utils import tensor_ops
from drivetrain.algorithms.utils.parts import Generator, draw_coin, draw_integer, draw_uniform
from drivetrain.core.errors import ConfigError, ConfigTypeError, unknown_name

Image = Any
"""A PIL image or a tensor (C, H, W)."""
Augmentation = Callable[..., Image]
"""`(image, level, generator=None) -> image`"""


class UnknownSetError(ConfigError, KeyError):
    """There is no augmentation set of this name."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


Draw = Callable[[float, Generator, tuple[int, int]], tuple[object, ...]]
"""Draws the arguments of an operation from level, generator, and width and height of the image."""


def _augmentation(name: str, doc: str, draw: Draw, operation: str = "") -> Augmentation:
    """Return the augmentation that calls an operation, by default the one of its name, with drawn arguments."""
    operation = operation or name

    def augment(image: Image, level: float, generator: Generator = None) -> Image:
        if is_pil(image):
            from drivetrain.algorithms.utils import pil_ops

            return getattr(pil_ops, operation)(image, *draw(level, generator, image.size))
        if not isinstance(image, Tensor) or image.ndim != 3:
            shape = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ConfigTypeError(f"an image is a PIL image or a tensor (C, H, W); got {shape}.")
        operate, drawn = getattr(tensor_ops, operation), draw(level, generator, tensor_ops.size(image))
        if image.dtype is torch.uint8:
            return operate(image, *drawn)
        levels = (image.float() * 255).round().clamp(0, 255).to(torch.uint8)
        return (operate(levels, *drawn).float() / 255).to(image.dtype)

    augment.__name__ = augment.__qualname__ = name
    augment.__doc__ = doc
    augment.draws_from_generator = True  # type: ignore[attr-defined]
    return augment


def _strength(level: float, maximum: float, generator: Generator) -> float:
    """Return a strength drawn up to `level` tenths of the maximum."""
    return draw_uniform(0.1, level, generator) * maximum / 10


def _either_sign(value: float, generator: Generator) -> float:
    return -value if draw_coin(generator) else value


def _shear(level: float, generator: Generator) -> float:
    return _either_sign(_strength(level, 0.3, generator), generator)


def _shift(level: float, generator: Generator, side: int) -> float:
    return _either_sign(int(_strength(level, side / 3, generator)), generator)


def _around_one(level: float, generator: Generator) -> float:
    """Return a factor that is as often above as below 1, which changes nothing."""
    return draw_uniform(1, level, generator) if draw_coin(generator) else draw_uniform(1 - 0.09 * level, 1, generator)


def _not_too_bright(level: float, generator: Generator) -> float:
    """Return a factor around 1; brightening is weaker, because it soon leaves nothing to see."""
    factor = _around_one(level, generator)
    return factor * 0.75 if factor > 1 else factor


autocontrast = _augmentation("autocontrast", "Stretch each channel to the full range.", lambda level, rng, size: ())
equalize = _augmentation("equalize", "Make each channel's values equally frequent.", lambda level, rng, size: ())
posterize = _augmentation(
    "posterize", "Keep one to four bits of each value.", lambda level, rng, size: (4 - int(_strength(level, 4, rng)),)
)
rotate = _augmentation(
    "rotate",
    "Turn by up to 30 degrees to either side.",
    lambda level, rng, size: (_either_sign(int(_strength(level, 30, rng)), rng),),
)
solarize = _augmentation(
    "solarize", "Invert the brightest values.", lambda level, rng, size: (256 - int(_strength(level, 256, rng)),)
)
shear_x = _augmentation(
    "shear_x", "Shear to either side.", lambda level, rng, size: ((1, _shear(level, rng), 0, 0, 1, 0),), "affine"
)
shear_y = _augmentation(
    "shear_y", "Shear up or down.", lambda level, rng, size: ((1, 0, 0, _shear(level, rng), 1, 0),), "affine"
)
translate_x = _augmentation(
    "translate_x",
    "Move by up to a third to either side.",
    lambda level, rng, size: ((1, 0, _shift(level, rng, size[0]), 0, 1, 0),),
    "affine",
)
translate_y = _augmentation(
    "translate_y",
    "Move by up to a third up or down.",
    lambda level, rng, size: ((1, 0, 0, 0, 1, _shift(level, rng, size[1])),),
    "affine",
)
color, contrast, sharpness = (
    _augmentation(name, f"Change the {name}.", lambda level, rng, size: (_around_one(level, rng),))
    for name in ("color", "contrast", "sharpness")
)
brightness = _augmentation(
    "brightness", "Change the brightness.", lambda level, rng, size: (_not_too_bright(level, rng),)
)
color_original, contrast_original, brightness_original, sharpness_original = (
    _augmentation(
        f"{name}_original",
        f"Change the {name} by the paper's factor.",
        lambda level, rng, size: (_strength(level, 1.8, rng) + 0.1,),
        name,
    )
    for name in ("color", "contrast", "brightness", "sharpness")
)

_SAFE = [autocontrast, equalize, posterize, rotate, solarize, shear_x, shear_y, translate_x, translate_y]

augmentation_sets: dict[str, list[Augmentation]] = {
    "all": [*_SAFE, color, contrast, brightness, sharpness],
    "safe": _SAFE,
    "original": [*_SAFE, color_original, contrast_original, brightness_original, sharpness_original],
}
"""`safe` excludes operations that resemble the corruptions of ImageNet-C and CIFAR-10-C."""


AugmentationSet = str | Sequence[Augmentation]
"""The name of a set, or functions `(image, level) -> image`."""


def find_set(given: AugmentationSet, who: str) -> Sequence[Augmentation]:
    """Return the augmentations of a set, given by its name or as functions."""
    if isinstance(given, str):
        if given not in augmentation_sets:
            raise UnknownSetError(unknown_name("augmentation set", given, augmentation_sets, where=who))
        return augmentation_sets[given]
    if not isinstance(given, list | tuple) or not given or not all(map(callable, given)):
        raise ConfigTypeError(
            f"{who}(augmentation_set={given!r}): expected a name ({', '.join(augmentation_sets)}) or a list of functions "
            "(image, level) -> image."
        )
    return given


def apply_one_of(
    augmentations: Sequence[Augmentation], image: object, level: float, generator: Generator = None
) -> Image:
    """Return the image after one augmentation drawn from the list; functions from elsewhere draw from generators of their own."""
    chosen = augmentations[draw_integer(0, len(augmentations), generator)]
    return chosen(image, level, generator) if hasattr(chosen, "draws_from_generator") else chosen(image, level)


def shown_set(given: AugmentationSet) -> str:
    """Return a set as a repr shows it."""
    if isinstance(given, str):
        return repr(given)
    return f"[{', '.join(getattr(one, '__name__', repr(one)) for one in given)}]"


def check_image(image: object, who: str) -> None:
    """Reject tensors that are no images, and float ones on the host that have been normalised already."""
    if not isinstance(image, Tensor):
        return
    if image.ndim not in (3, 4):
        raise ConfigTypeError(
            f"{who}: a tensor of shape {tuple(image.shape)} is not an image (C, H, W) or a batch of them."
        )
    tensor_ops.check_channels(image)
    if image.is_floating_point() and image.device.type == "cpu" and image.numel():
        low, high = (float(edge) for edge in torch.aminmax(image.detach().float()))
        if low < 0 or high > 1:
            raise ConfigError(
                f"{who} expects float images with values from 0 to 1; these range from {low:.4g} to {high:.4g}. Augment before normalizing."
            )


def each_image(augment: Callable[[Image], Image], images: object) -> Image:
    """Apply a function to one image, or to each image of a batch on its own."""
    if isinstance(images, Tensor) and images.ndim == 4:
        return torch.stack([augment(image) for image in images]) if len(images) else images
    return augment(images)


def is_pil(image: object) -> bool:
    """Return whether this is a PIL image; a program that has not imported PIL has none."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(image, module.Image)


def as_tensor(image: object) -> Tensor:
    """Return a PIL image as a tensor (C, H, W) of its own values."""
    import numpy as np

    values = torch.from_numpy(np.array(image))
    return values.unsqueeze(0) if values.ndim == 2 else values.permute(2, 0, 1)


def as_pil(values: Tensor, mode: str) -> Image:
    """Return a tensor (C, H, W) as a PIL image."""
    from PIL import Image

    array = values[0] if values.shape[0] == 1 else values.permute(1, 2, 0)
    image = Image.fromarray(array.contiguous().numpy())
    return image if image.mode == mode else image.convert(mode)


def on_tensor(function: Callable[[Tensor], Tensor], image: Image) -> Image:
    """Apply a function of tensors to an image of either kind and return that kind."""
    if not is_pil(image):
        return function(image)
    changed = as_pil(function(as_tensor(image)), image.mode)
    if image.mode == "P":
        changed.putpalette(image.getpalette())
    return changed
