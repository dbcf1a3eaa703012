"""Test-time flips: evaluate an image and its mirror image, and average the model's outputs for both.

As old as AlexNet (Krizhevsky et al., 2012). With `shift` also the images moved by a pixel or so along the diagonal
count, in the weighting of Jordan's airbench (2024, arXiv 2404.00498): the two unshifted views have half of the weight.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from drivetrain.algorithms.random_translation import reflected
from drivetrain.algorithms.utils.parts import check_images, first_tensor, map_tensors
from drivetrain.algorithms.utils.passes import autocast_of, call_model
from drivetrain.context.batch import BatchKey
from drivetrain.context.state import State
from drivetrain.core import Algorithm, Event, Logger
from drivetrain.core.arguments import check_counts


def flip_views(x: Tensor, shift: int = 0) -> Iterator[tuple[float, Tensor]]:
    """Yield the views of images (..., H, W), the images themselves first, each with its weight; the weights sum to one.

    >>> [weight for weight, _ in flip_views(torch.zeros(1, 1, 4, 4), shift=1)]
    [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    """
    check_images(x, "flip_views")
    check_counts("flip_views", 0, shift=shift)
    sides = [(0.25, x), (0.125, _moved(x, -shift)), (0.125, _moved(x, shift))] if shift else [(0.5, x)]
    for weight, side in sides:
        yield weight, side
        yield weight, side.flip(-1)


def average_flips(model: Callable[[Tensor], Tensor], x: Tensor, shift: int = 0) -> Tensor:
    """Return the weighted mean of a model's outputs over the views of images."""
    return torch.stack([weight * _wide(model(view)) for weight, view in flip_views(x, shift)]).sum(0)


def _moved(x: Tensor, by: int) -> Tensor:
    """Return images moved down and right by some pixels, their edges reflected."""
    for dimension in (-2, -1):
        size = x.shape[dimension]
        x = x.index_select(dimension, reflected(torch.arange(size, device=x.device) - by, size))
    return x


def _wide(output: Tensor) -> Tensor:
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output


class TestTimeFlip(Algorithm):
    """Averages the model's outputs over mirrored (and, with `shift`, moved) images in evaluation and prediction."""

    __test__ = False  # no test class, whatever its name says to pytest
    allow_multiple = False
    events = frozenset({Event.EVAL_AFTER_FORWARD, Event.PREDICT_AFTER_FORWARD})
    reads, writes = ("batch", "model"), ("outputs",)

    def __init__(self, shift: int = 0, input_key: BatchKey = 0):
        check_counts("TestTimeFlip", 0, shift=shift)
        self.shift, self.input_key = shift, input_key

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        is_bare = isinstance(state.batch, Tensor)  # prediction takes inputs without targets
        images = state.batch if is_bare else state.batch_get_item(self.input_key)
        views = flip_views(first_tensor(images, str(self)), self.shift)
        weight, _ = next(views)
        total = map_tensors(lambda output: weight * _wide(output), state.outputs)
        batch = state.batch
        try:
            for weight, view in views:
                if is_bare:
                    state.batch = view
                else:
                    state.batch_set_item(self.input_key, view)
                with torch.no_grad(), autocast_of(state):  # the size stays, so nothing is compiled again
                    outputs = call_model(state, state.batch)
                total = map_tensors(partial(_add, weight), total, outputs)
        finally:
            if is_bare:
                state.batch = batch
            else:
                state.batch_set_item(self.input_key, images)
        state.outputs = total


def _add(weight: float, total: Tensor, output: Tensor) -> Tensor:
    return total.add(_wide(output), alpha=weight)
