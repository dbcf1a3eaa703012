"""Test-time flips: evaluate an image and its mirror image, and average the model's outputs for both.

As old as AlexNet (Krizhevsky et al., 2012). With `shift` also the images moved by a pixel or so along the diagonal
count, in the weighting of Jordan's airbench (2024, arXiv 2404.00498): the two unshifted views have half of the weight.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drivetrain.algorithms.random_translation import reflected
from drivetrain.algorithms.utils.parts import check_images, first_tensor, map_tensors
from drivetrain.algorithms.utils.passes import autocast_of, call_model
from drivetrain.context.batch import BatchKey, batch_set
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.core.arguments import check_counts


def views_of(shift: int) -> list[tuple[float, int, bool]]:
    """Return for each view its weight, by how much it is moved and whether it is mirrored; the images themselves come first.

    >>> [weight for weight, _, _ in views_of(1)]
    [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    """
    sides = [(0.25, 0), (0.125, -shift), (0.125, shift)] if shift else [(0.5, 0)]
    return [(weight, by, is_flipped) for weight, by in sides for is_flipped in (False, True)]


def view(x: Tensor, by: int, is_flipped: bool) -> Tensor:
    """Return images (..., H, W) moved down and right by some pixels, their edges reflected, and mirrored if asked for."""
    check_images(x, "TestTimeFlip")
    for dimension in (-2, -1) if by else ():
        size = x.shape[dimension]
        x = x.index_select(dimension, reflected(torch.arange(size, device=x.device) - by, size))
    return x.flip(-1) if is_flipped else x


def turned_back(output: Tensor, images: Tensor, by: int, is_flipped: bool) -> Tensor:
    """Return a map over the pixels, as of segmentation, in the place of the unmoved images; other outputs as they are."""
    output = _wide(output)
    if output.ndim != images.ndim:
        return output
    if by and output.shape[-2:] != images.shape[-2:]:
        raise ConfigError(
            f"TestTimeFlip(shift={abs(by)}): the outputs {tuple(output.shape)} are maps of another size than the images "
            f"{tuple(images.shape)}, so a shift by pixels cannot be undone. Use shift=0."
        )
    return view(output.flip(-1) if is_flipped else output, -by, False)


def average_flips(model: Callable[[Tensor], Tensor], x: Tensor, shift: int = 0) -> Tensor:
    """Return the weighted mean of a model's outputs over the views of images; maps over the pixels are turned back."""
    check_counts("average_flips", 0, shift=shift)
    seen = [
        weight * turned_back(model(view(x, by, is_flipped)), x, by, is_flipped)
        for weight, by, is_flipped in views_of(shift)
    ]
    return torch.stack(seen).sum(0)


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
        batch = state.batch
        is_bare = isinstance(batch, Tensor)  # prediction takes inputs without targets
        images = batch if is_bare else state.batch_get_item(self.input_key)
        first, ((weight, *_), *others) = first_tensor(images, str(self)), views_of(self.shift)
        total = map_tensors(lambda output: weight * _wide(output), state.outputs)
        for weight, by, is_flipped in others:
            seen = map_tensors(partial(view, by=by, is_flipped=is_flipped), images)
            changed = seen if is_bare else batch_set(copy.copy(batch), self.input_key, seen)
            with torch.no_grad(), autocast_of(state):  # the size stays, so nothing is compiled again
                outputs = call_model(state, changed)
            outputs = map_tensors(partial(turned_back, images=first, by=by, is_flipped=is_flipped), outputs)
            total = map_tensors(partial(torch.add, alpha=weight), total, outputs)
        state.outputs = total
