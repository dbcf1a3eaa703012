"""CutMix (Yun et al., 2019, arXiv 1905.04899): paste a box of another image, and weigh the targets by area."""

import math

import torch
from torch import Tensor

from drivetrain.algorithms.mixup import dense_targets
from drivetrain.algorithms.utils import parts
from drivetrain.algorithms.utils.losses import PairMixing
from drivetrain.algorithms.utils.parts import (
    Box,
    Generator,
    first_image,
    is_image_like,
    map_tensors,
    take_rows,
    warn_of_small_sides,
)
from drivetrain.context.batch import BatchKey
from drivetrain.context.state import State
from drivetrain.core.arguments import check_fraction, check_numbers
from drivetrain.core.containers import leaves
from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Batch


def cutmix_batch(
    input: object,
    target: object,
    length: float | None = None,
    alpha: float = 1.0,
    bbox: Box | None = None,
    indices: Tensor | None = None,
    uniform_sampling: bool = False,
    *,
    generator: Generator = None,
) -> tuple[Batch, Batch, float, Box]:
    """Return images with a box of another one pasted in, the targets `y[indices]`, the own share of the area, and the box.

    The loss is `area L(y) + (1 - area) L(y[indices])`. The box is `(row1, col1, row2, col2)`; its sides are a fraction `length`
    of the image's where that is given, else drawn so that its area is 1 - Beta(alpha, alpha). Without mixing (`alpha` 0) it is empty.

    >>> x, y = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 1, 2, 2), torch.tensor([0, 1])
    >>> mixed, other, area, _ = cutmix_batch(x, y, bbox=(0, 0, 1, 2), indices=torch.tensor([1, 0]))
    >>> mixed[0, 0].tolist(), other.tolist(), area
    ([[1.0, 1.0], [0.0, 0.0]], [1, 0], 0.5)
    """
    check_numbers("cutmix_batch", 0, alpha=alpha)
    first = first_image(input, "CutMix")
    if indices is None:
        indices = parts.draw_permutation(first.shape[0], first.device, generator)
    if bbox is None:
        bbox = _draw_cut(first, length, alpha, uniform_sampling, generator)
    elif length is not None:
        raise ConfigError(f"cutmix_batch: bbox={bbox} and length={length} were both given. Give one of them.")
    mixed = map_tensors(lambda x: paste(x, take_rows(x, indices), bbox), input)
    return mixed, take_rows(target, indices), own_area(first, bbox), bbox


def _draw_cut(image: Tensor, length: float | None, alpha: float, uniform: bool, generator: Generator) -> Box:
    height, width = image.shape[-2:]
    if length is not None:
        side = check_fraction("length", length, owner="cutmix_batch")
    else:
        side = math.sqrt(1 - parts.draw_beta(alpha, generator)) if alpha > 0 else 0.0
    if side and min(height, width) < 3:
        warn_of_small_sides(image, "CutMix")
    if side == 0:
        return (0, 0, 0, 0)
    return parts.draw_box((height, width), (int(height * side), int(width * side)), uniform, generator)


def own_area(image: Tensor, bbox: Box) -> float:
    """Return the part of the image that is not in the box."""
    top, left, bottom, right = bbox
    return 1 - (bottom - top) * (right - left) / (image.shape[-2] * image.shape[-1])


def paste(x: Tensor, other: Tensor, bbox: Box) -> Tensor:
    """Return a copy of `x` with a box of `other` in it."""
    top, left, bottom, right = bbox
    mixed = x.clone()
    mixed[..., top:bottom, left:right] = other[..., top:bottom, left:right]
    return mixed


def cutmix(
    input: Tensor, target: Tensor, alpha: float = 1.0, num_classes: int | None = None, *, generator: Generator = None
) -> tuple[Tensor, Tensor]:
    """Return cut and pasted images and the soft targets that belong to them; class indices need `num_classes`."""
    dense = dense_targets(target, num_classes, "cutmix")
    x, other, area, _ = cutmix_batch(input, dense, alpha=alpha, generator=generator)
    assert isinstance(x, Tensor) and isinstance(other, Tensor)
    return x, torch.lerp(other, dense, area)


class CutMix(PairMixing):
    """Pastes a box of another image into each image of a batch, and mixes targets or losses by area.

    Targets with the height and width of the images, as for segmentation, are cut and pasted too.
    """

    conflicts = {"MixUp": "both mix the samples of a batch. Apply one per batch: OneOf(MixUp(...), CutMix(...))"}

    def __init__(
        self,
        alpha: float = 1.0,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ):
        check_numbers("CutMix", 0, alpha=alpha)
        super().__init__(interpolate_loss, input_key, target_key)
        self.alpha, self.uniform_sampling = alpha, uniform_sampling
        self._bbox: Box = (0, 0, 0, 0)
        self._image = torch.empty(0)  # the first of the present ones, for its size

    def mix_inputs(self, state: State) -> tuple[float, Tensor]:
        inputs, targets = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        self._image = first = first_image(inputs, "CutMix")
        if self.interpolate_loss and any(is_image_like(target, first) for target in leaves(targets, Tensor)):
            raise ConfigError(
                "CutMix(interpolate_loss=True): the targets are images, which are cut and pasted like the inputs; there is only one "
                "loss, so there is nothing to interpolate. Use interpolate_loss=False."
            )
        rows, generator = torch.arange(len(first), device=first.device), state.rng(type(self).__name__)
        mixed, index, area, self._bbox = cutmix_batch(
            inputs, rows, alpha=self.alpha, uniform_sampling=self.uniform_sampling, generator=generator
        )
        assert isinstance(index, Tensor)
        state.batch_set_item(self.input_key, mixed)
        return area, index

    def softened(self, logits: Tensor, target: Tensor) -> Tensor:
        if is_image_like(target, self._image):
            return paste(target, take_rows(target, self._index), self._bbox)
        return super().softened(logits, target)
