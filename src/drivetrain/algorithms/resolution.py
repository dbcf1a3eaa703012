"""Train small, test larger (Touvron et al., 2019, arXiv 1906.06423): objects look larger in training crops than in test images."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain.algorithms.utils.parts import check_floating, check_images, draw_integer, map_tensors
from drivetrain.algorithms.utils.run import has_reached
from drivetrain.context.batch import BatchKey
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger, Time, TimeUnit, ensure_time
from drivetrain.core.arguments import check_counts


def resize_shorter_side(x: Tensor, size: int) -> Tensor:
    """Return images whose shorter side has `size` pixels, bilinear and antialiased."""
    check_images(x, "Resolution")
    check_floating(x, "Resolution")
    height, width = x.shape[-2:]
    shorter = min(height, width)
    if shorter == size:
        return x
    sides = [max(size, round(side * size / shorter)) for side in (height, width)]
    planes = x if x.ndim == 4 else x.reshape(-1, 1, height, width)  # torch takes (N, C, H, W) only
    small = F.interpolate(planes, size=sides, mode="bilinear", align_corners=False, antialias=True)
    return small if x.ndim == 4 else small.view(*x.shape[:-2], *sides)


def crop(x: Tensor, size: int, top: int, left: int) -> Tensor:
    """Return a square window."""
    return x[..., top : top + size, left : left + size]


class Resolution(Algorithm):
    """Trains on images of one size, or of a growing one, and evaluates on a centre crop of larger ones.

    `schedule` lists moments and sizes, `[("0dur", 128), ("0.4dur", 160)]`, and replaces `train_crop`.
    """

    allow_multiple = False
    events = frozenset({Event.AFTER_DATALOADER, Event.EVAL_BATCH_START})
    reads, writes = ("batch",), ("batch",)
    tags = frozenset({"augment"})
    conflicts = {
        "ProgressiveResizing": "both set the size of training images. Use schedule=, or only the other algorithm"
    }

    def __init__(
        self,
        train_crop: int = 176,
        eval_resize: int = 232,
        eval_crop: int = 224,
        schedule: Sequence[tuple[str | Time, int]] | None = None,
        input_key: BatchKey = 0,
    ):
        check_counts("Resolution", 1, train_crop=train_crop, eval_resize=eval_resize, eval_crop=eval_crop)
        if eval_crop > eval_resize:
            raise ConfigError(
                f"Resolution(eval_crop={eval_crop}, eval_resize={eval_resize}): the crop must fit into the image."
            )
        self.train_crop, self.eval_resize, self.eval_crop = train_crop, eval_resize, eval_crop
        self.input_key = input_key
        self._sizes = [(ensure_time(moment, TimeUnit.BATCH), size) for moment, size in schedule or ()]
        for _, size in self._sizes:
            check_counts("Resolution(schedule)", 1, size=size)

    def count_shapes(self) -> int:
        """Return how many sizes training goes through, which is how often a compiled model is compiled."""
        return len({size for _, size in self._sizes}) or 1

    def size_at(self, state: State) -> int:
        """Return the size of training images now: that of the last moment reached."""
        reached = [size for moment, size in self._sizes if has_reached(moment, state, str(self))]
        return reached[-1] if reached else self._sizes[0][1] if self._sizes else self.train_crop

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        images = state.batch_get_item(self.input_key)
        if event is Event.EVAL_BATCH_START:
            state.batch_set_item(self.input_key, map_tensors(self._centre, images))
            return
        size, generator = self.size_at(state), state.rng(type(self).__name__)
        drawn: dict[torch.Size, list[int]] = {}  # images of one size are cropped alike

        def window(x: Tensor) -> Tensor:
            small = resize_shorter_side(x, size)
            sides = small.shape[-2:]
            if sides not in drawn:
                drawn[sides] = [draw_integer(0, side - size + 1, generator) if side > size else 0 for side in sides]
            return crop(small, size, *drawn[sides])

        state.batch_set_item(self.input_key, map_tensors(window, images))

    def _centre(self, x: Tensor) -> Tensor:
        whole = resize_shorter_side(x, self.eval_resize)
        top, left = ((side - self.eval_crop) // 2 for side in whole.shape[-2:])
        return crop(whole, self.eval_crop, top, left)
