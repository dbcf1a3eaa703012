"""ColOut (MosaicML, 2021): drop random rows and columns of the images; they get smaller and training faster."""

from typing import Literal

import torch
from torch import Tensor, nn

from drivetrain.algorithms.utils.datasets import DatasetTransform
from drivetrain.algorithms.utils.parts import Generator, draw_subset, first_image, is_image_like, map_tensors
from drivetrain.algorithms.utils.primitives import Image, is_pil, on_tensor
from drivetrain.context.batch import BatchKey
from drivetrain.context.state import State
from drivetrain.core import ConfigError, Event, Logger
from drivetrain.core.arguments import check_fractions

ResizeTarget = bool | Literal["auto"]


def colout_batch(
    sample: Image,
    p_row: float = 0.15,
    p_col: float = 0.15,
    resize_target: ResizeTarget = "auto",
    *,
    generator: Generator = None,
) -> Image:
    """Return images without random rows and columns, the same ones for the whole batch.

    `sample` is images, or a pair `(images, targets)`, and so is the result. Targets lose the same rows and columns if
    `resize_target` is True, or "auto" and they have the images' height and width.
    """
    _check(p_row, p_col, resize_target, "colout_batch")
    is_pair = isinstance(sample, tuple)
    images, target = sample if is_pair else (sample, None)
    first = images[0] if isinstance(images, list) else images
    if is_pil(first):
        (width, height), device = first.size, torch.device("cpu")
    else:
        first = first_image(images, "ColOut")
        (height, width), device = first.shape[-2:], first.device
    rows = draw_subset(height, max(1, int((1 - p_row) * height)), device, generator)
    columns = draw_subset(width, max(1, int((1 - p_col) * width)), device, generator)
    images = _narrowed(images, rows, columns)
    if not is_pair:
        return images
    if resize_target is True or (resize_target == "auto" and _has_size(target, first)):
        target = _narrowed(target, rows, columns)
    return images, target


def _check(p_row: float, p_col: float, resize_target: object, who: str) -> None:
    check_fractions(who, p_row=p_row, p_col=p_col)
    if not isinstance(resize_target, bool) and resize_target != "auto":
        raise ConfigError(f"{who}(resize_target={resize_target!r}): expected True, False or 'auto'.")


def _has_size(target: Image, image: Image) -> bool:
    if is_pil(target):
        return is_pil(image) and target.size == image.size
    return isinstance(image, Tensor) and is_image_like(target, image)


def _narrowed(image: Image, rows: Tensor, columns: Tensor) -> Image:
    def narrow(x: Tensor) -> Tensor:
        return x.index_select(-2, rows).index_select(-1, columns)

    return on_tensor(narrow, image) if is_pil(image) else map_tensors(narrow, image)


class ColOutTransform(nn.Module):
    """Drops rows and columns of single images, for the transforms of a dataset."""

    def __init__(self, p_row: float = 0.15, p_col: float = 0.15, resize_target: ResizeTarget = "auto"):
        super().__init__()
        _check(p_row, p_col, resize_target, type(self).__name__)
        self.p_row, self.p_col, self.resize_target = p_row, p_col, resize_target

    def forward(self, sample: Image) -> Image:
        return colout_batch(sample, self.p_row, self.p_col, self.resize_target)


class ColOut(DatasetTransform):
    """Drops rows and columns of every batch, or, with `batch=False`, of every image on its own."""

    def __init__(
        self,
        p_row: float = 0.15,
        p_col: float = 0.15,
        batch: bool = True,
        resize_target: ResizeTarget = "auto",
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ):
        _check(p_row, p_col, resize_target, "ColOut")
        if resize_target is True and not batch:
            raise NotImplementedError(
                "ColOut(resize_target=True, batch=False): single images are changed inside the dataset, without access to their "
                "targets. Use batch=True."
            )
        self.p_row, self.p_col, self.batch, self.resize_target = p_row, p_col, batch, resize_target
        self.input_key, self.target_key = input_key, target_key
        if batch:
            self.events, self.reads, self.writes = frozenset({Event.AFTER_DATALOADER}), ("batch",), ("batch",)
        self._transform = ColOutTransform(p_row, p_col, resize_target)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START:
            return super().apply(event, state, logger)
        target = state.batch_get_item(self.target_key) if self.resize_target is not False else None
        sample, generator = (state.batch_get_item(self.input_key), target), state.rng(type(self).__name__)
        images, resized = colout_batch(sample, self.p_row, self.p_col, self.resize_target, generator=generator)
        state.batch_set_item(self.input_key, images)
        if resized is not target:
            state.batch_set_item(self.target_key, resized)
        return None
