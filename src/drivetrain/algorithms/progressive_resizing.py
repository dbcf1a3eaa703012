"""Progressive resizing (fast.ai DAWNBench, 2018; Touvron et al., 2019, arXiv 1906.06423): small images first, full size at the end."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from drivetrain.algorithms.utils.parts import Generator, draw_integer, first_image, first_tensor, map_tensors
from drivetrain.algorithms.utils.run import elapsed_fraction
from drivetrain.context.batch import BatchKey
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, ConfigTypeError, Event, Logger
from drivetrain.core.arguments import check_choice, check_counts, check_fractions, check_number
from drivetrain.core.types import Batch, StateDict
from drivetrain.runtime.device import wide_dtype

Mode = Literal["resize", "crop"]


def resize_batch(
    input: object,
    target: object,
    scale_factor: float,
    mode: Mode = "resize",
    resize_targets: bool = False,
    *,
    generator: Generator = None,
) -> tuple[Batch, Batch]:
    """Return a batch of smaller images, and targets that are resized with them if `resize_targets` is set.

    "resize" takes the nearest pixels, "crop" one random window for the whole batch. A factor of 1 or more changes nothing.
    """
    check_choice("mode", mode, ("resize", "crop"), owner="resize_batch")
    check_number("scale_factor", scale_factor, above=0, owner="resize_batch")
    if scale_factor >= 1:
        return input, target
    first = first_image(input, "ProgressiveResizing", same_size=False)
    if resize_targets:
        map_tensors(_check_target, target)
    if mode == "resize":
        change = partial(_resized, scale=scale_factor)
    else:
        sides = first.shape[-2:]
        place = tuple(draw_integer(0, side - _smaller(side, scale_factor) + 1, generator) for side in sides)
        change = partial(_cropped, scale=scale_factor, place=place, image=sides)
    return map_tensors(change, input), map_tensors(change, target) if resize_targets else target


def _smaller(side: int, scale: float) -> int:
    return max(1, int(side * scale))


def _check_target(target: Tensor) -> None:
    if target.ndim < 3:
        raise ConfigTypeError(
            f"resize_targets=True: a target of shape {tuple(target.shape)} has no height and width. Use resize_targets=False."
        )


def _resized(x: Tensor, scale: float) -> Tensor:
    """Return the nearest pixels; whole numbers take the way over wide floats, which torch can interpolate."""
    planes = x.unsqueeze(1) if x.ndim == 3 else x
    values = planes if planes.is_floating_point() else planes.to(wide_dtype(planes.device))
    whole = values.shape[2:-2]  # the frames of a video
    if min(int(side * scale) for side in values.shape[-2:]) < 1:
        size = [*whole, *(_smaller(side, scale) for side in values.shape[-2:])]
        small = F.interpolate(values, size=size, mode="nearest")
    else:
        factors = (1.0,) * len(whole) + (scale, scale)
        small = F.interpolate(values, scale_factor=factors, mode="nearest", recompute_scale_factor=False)
    return small.to(x.dtype).squeeze(1) if x.ndim == 3 else small.to(x.dtype)


def _cropped(x: Tensor, scale: float, place: tuple[int, ...], image: Sequence[int]) -> Tensor:
    """Return the window at `place`, which is given in pixels of the images."""
    height, width = x.shape[-2:]
    top, left = int(height / image[0] * place[0]), int(width / image[1] * place[1])
    return x[..., top : top + _smaller(height, scale), left : left + _smaller(width, scale)]


class ProgressiveResizing(Algorithm):
    """Trains on small images first and lets them grow to full size before the end.

    Until `delay_fraction` of the run they have `initial_scale` of their size, in the last `finetune_fraction` all of it, and in
    between they grow linearly. Widths are multiples of `size_increment`.
    """

    allow_multiple = False
    events = frozenset({Event.AFTER_DATALOADER})
    reads, writes = ("batch",), ("batch",)
    tags = frozenset({"augment"})

    def __init__(
        self,
        mode: Mode = "resize",
        initial_scale: float = 0.5,
        finetune_fraction: float = 0.2,
        delay_fraction: float = 0.5,
        size_increment: int = 4,
        resize_targets: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ):
        who = "ProgressiveResizing"
        check_choice("mode", mode, ("resize", "crop"), owner=who)
        check_fractions(
            who, initial_scale=initial_scale, finetune_fraction=finetune_fraction, delay_fraction=delay_fraction
        )
        check_counts(who, 1, size_increment=size_increment)
        if round(delay_fraction + finetune_fraction, 9) > 1:
            raise ConfigError(
                f"{who}(delay_fraction={delay_fraction}, finetune_fraction={finetune_fraction}): together they are more than the whole "
                "run. Expected a sum of at most 1."
            )
        self.mode: Mode = mode
        self.initial_scale, self.size_increment, self.resize_targets = initial_scale, size_increment, resize_targets
        self.finetune_fraction, self.delay_fraction = finetune_fraction, delay_fraction
        self.input_key, self.target_key = input_key, target_key
        self._logged: tuple[int, int] | None = None

    def scale_at(self, elapsed: float) -> float:
        """Return the scale at a fraction of the run, before it is pinned to whole increments."""
        if elapsed < self.delay_fraction:
            return self.initial_scale
        growing = 1 - self.finetune_fraction - self.delay_fraction
        grown = min(1.0, (elapsed - self.delay_fraction) / growing) if growing > 1e-9 else 1.0
        return self.initial_scale + (1 - self.initial_scale) * grown

    def pinned(self, scale: float, width: int) -> float:
        """Return the scale that makes the width the nearest multiple of the increment."""
        pixels = max(self.size_increment, round(width * scale / self.size_increment) * self.size_increment)
        exact = pixels / width
        # Rounded down by a hair, the factor would lose a pixel: 22 * (15 / 22) is less than 15.
        return exact if int(width * exact) == pixels else math.nextafter(exact, math.inf)

    def count_shapes(self, width: int = 224) -> int:
        """Return how many sizes images of a width go through, which is how often a compiled model is compiled."""
        return len({self.pinned(self.scale_at(step / 1000), width) for step in range(1001)})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        images = state.batch_get_item(self.input_key)
        first = first_image(images, str(self), same_size=False)
        scale = self.scale_at(elapsed_fraction(state, str(self)))
        factor = self.pinned(scale, first.shape[-1])
        if factor < 1:
            target = state.batch_get_item(self.target_key) if self.resize_targets else None
            generator = state.rng(type(self).__name__)
            images, target = resize_batch(images, target, factor, self.mode, self.resize_targets, generator=generator)
            state.batch_set_item(self.input_key, images)
            if self.resize_targets:
                state.batch_set_item(self.target_key, target)
            first = first_tensor(images, str(self))
        height, width = first.shape[-2:]
        if (height, width) != self._logged:  # once per size: a history of every step would grow without end
            self._logged = (height, width)
            sizes = {"height": height, "width": width, "scale_factor": scale}
            logger.log_metrics({f"progressive_resizing/{name}": value for name, value in sizes.items()})

    def state_dict(self) -> StateDict:
        return {"logged": self._logged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._logged = None if state["logged"] is None else tuple(state["logged"])
