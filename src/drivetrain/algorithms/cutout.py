"""CutOut (DeVries & Taylor, 2017, arXiv 1708.04552): blank a random square of the images."""

from torch import Tensor

from drivetrain.algorithms.utils.parts import Generator, draw_box, first_image, map_tensors, warn_of_small_sides
from drivetrain.algorithms.utils.primitives import Image, is_pil, on_tensor
from drivetrain.context.batch import BatchKey
from drivetrain.context.state import State
from drivetrain.core import Algorithm, Event, Logger
from drivetrain.core.arguments import check_counts, check_fractions


def cutout_batch(
    input: object,
    num_holes: int = 1,
    length: float = 0.5,
    uniform_sampling: bool = False,
    *,
    generator: Generator = None,
) -> Image:
    """Return images with `num_holes` squares set to zero, the same ones for the whole batch.

    A square's side is `length` times the shorter side of the images. A PIL image comes back as one.
    """
    check_counts("cutout_batch", 0, num_holes=num_holes)
    check_fractions("cutout_batch", length=length)
    if is_pil(input):
        return on_tensor(lambda x: cutout_batch(x, num_holes, length, uniform_sampling, generator=generator), input)
    first = first_image(input, "CutOut")
    height, width = first.shape[-2:]
    side = int(min(height, width) * length)
    if length and side < 2:
        warn_of_small_sides(first, "CutOut")
    boxes = [draw_box((height, width), (side, side), uniform_sampling, generator) for _ in range(num_holes)]

    def cut(x: Tensor) -> Tensor:
        holed = x.clone()
        for top, left, bottom, right in boxes:
            holed[..., top:bottom, left:right] = 0
        return holed

    return map_tensors(cut, input)


class CutOut(Algorithm):
    """Blanks random squares in every batch of images."""

    events = frozenset({Event.AFTER_DATALOADER})
    reads, writes = ("batch",), ("batch",)
    tags = frozenset({"augment"})

    def __init__(
        self, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False, input_key: BatchKey = 0
    ):
        check_counts("CutOut", 0, num_holes=num_holes)
        check_fractions("CutOut", length=length)
        self.num_holes, self.length, self.uniform_sampling = num_holes, length, uniform_sampling
        self.input_key = input_key

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        images = state.batch_get_item(self.input_key)
        generator = state.rng(type(self).__name__)
        holed = cutout_batch(images, self.num_holes, self.length, self.uniform_sampling, generator=generator)
        state.batch_set_item(self.input_key, holed)
