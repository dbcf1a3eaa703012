"""Random translation: each image is moved by a few pixels, its edges reflected, on the device where the batch is.

The augmentation of residual networks on CIFAR (He et al., 2015, arXiv 1512.03385), with reflection instead of black
borders and one gather for the whole batch, as in Jordan's airbench (2024, arXiv 2404.00498).
"""

import torch
from torch import Tensor

from drivetrain.algorithms.utils.parts import Generator, device_of, first_image, map_tensors, warn_of_images_left
from drivetrain.context.batch import BatchKey
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.core.arguments import check_counts
from drivetrain.core.containers import leaves
from drivetrain.core.types import Batch
from drivetrain.runtime.device import copy_to


def translate(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Return images (N, C, H, W) or (N, H, W), each moved by its own number of pixels; edges are filled with reflections.

    >>> row = torch.arange(4).view(1, 1, 1, 4).expand(2, 1, 1, 4)
    >>> translate(row, torch.zeros(2, dtype=torch.long), torch.tensor([1, -2]))[:, 0, 0].tolist()
    [[1, 0, 1, 2], [2, 3, 2, 1]]
    """
    sample = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    height, width = x.shape[-2:]
    rows = reflected(torch.arange(height, device=x.device) - down.view(-1, 1), height).unsqueeze(2)
    columns = reflected(torch.arange(width, device=x.device) - right.view(-1, 1), width).unsqueeze(1)
    if x.ndim == 3:
        return x[sample, rows, columns]
    # Indices around a slice put the channels last, in shape and in memory, which is the layout convolutions like best.
    moved = x[sample, :, rows, columns].permute(0, 3, 1, 2)
    return moved if x.is_contiguous(memory_format=torch.channels_last) else moved.contiguous()


def reflected(position: Tensor, size: int) -> Tensor:
    """Return positions inside 0..size-1 for those at most size-1 outside, as in a mirror at the first and the last one."""
    return (size - 1) - ((size - 1) - position.abs()).abs()


def translate_batch(x: object, pixels: int = 2, *, generator: Generator = None) -> Batch:
    """Return images, each moved by up to `pixels` in both directions, at random; several tensors alike."""
    check_counts("translate_batch", 0, pixels=pixels)
    first = first_image(x, "RandomTranslation", same_size=False)
    for images in leaves(x, Tensor):
        if images.ndim > 4 or pixels >= min(images.shape[-2:]):
            raise ConfigError(
                f"RandomTranslation(pixels={pixels}): the images have shape {tuple(images.shape)}; expected (N, C, H, W) or (N, H, W) "
                f"with sides above {pixels}."
            )
    shifts = torch.randint(-pixels, pixels + 1, (2, len(first)), generator=generator, device=device_of(generator))
    down, right = copy_to(first.device, shifts)
    return map_tensors(lambda images: translate(images, down, right), x)


class RandomTranslation(Algorithm):
    """Moves every image of a batch by up to `pixels` in both directions."""

    events = frozenset({Event.AFTER_DATALOADER})
    reads, writes = ("batch",), ("batch",)
    tags = frozenset({"augment"})

    def __init__(self, pixels: int = 2, input_key: BatchKey = 0):
        check_counts("RandomTranslation", 1, pixels=pixels)
        self.pixels, self.input_key = pixels, input_key
        self._has_looked = False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        images = state.batch_get_item(self.input_key)
        if not self._has_looked:
            self._has_looked = True
            warn_of_images_left(state.batch, images, str(self))
        moved = translate_batch(images, self.pixels, generator=state.rng(type(self).__name__))
        state.batch_set_item(self.input_key, moved)
