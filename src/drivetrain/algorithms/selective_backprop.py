"""Selective backprop (Jiang et al., 2019, arXiv 1910.00762): score a batch without gradients, train on its hard part."""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from drivetrain.algorithms.utils.losses import logits_of, losses_of_samples, mean_per_sample, per_sample
from drivetrain.algorithms.utils.parts import Generator, device_of, first_tensor, map_tensors, take_rows
from drivetrain.algorithms.utils.passes import autocast_of, call_model, preserve_buffers_and_rng
from drivetrain.algorithms.utils.run import elapsed_fraction
from drivetrain.context.batch import BatchKey, batch_set
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Logger
from drivetrain.core.arguments import check_counts, check_fractions, check_number
from drivetrain.core.containers import leaves
from drivetrain.core.types import Batch
from drivetrain.runtime.device import copy_to

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Return whether to select at this moment: between `start` and `end`, but every `interrupt`-th batch is used whole.

    >>> [should_selective_backprop(0.6, batch) for batch in range(4)]
    [True, False, True, False]
    """
    return start <= current_duration < end and (interrupt == 0 or (batch_idx + 1) % interrupt != 0)


def select_using_loss(
    input: object,
    target: object,
    model: Callable[[Batch], object],
    loss_fun: object,
    keep: float = 0.5,
    scale_factor: float = 1,
    *,
    generator: Generator = None,
) -> tuple[Batch, Batch]:
    """Return the samples, and their targets, that a draw by loss selects: `max(1, int(keep N))` of N.

    Samples are ranked by loss, and rank r of N is drawn with a weight of ((r + 0.5) / N) ** (1 / keep - 1). `loss_fun` takes
    `reduction="none"`, or is a torch loss. `scale_factor` below 1 scores smaller images. The model runs as it is: use
    the class, or restore buffers yourself, where batch norm must not see the batch twice.
    """
    _check(keep, scale_factor, "select_using_loss")
    losses_of = per_sample(loss_fun, "select_using_loss")
    chosen = choose_rows(input, lambda x: losses_of(model(x), target), keep, scale_factor, generator)
    return take_rows(input, chosen), take_rows(target, chosen)


@torch.no_grad()
def choose_rows(
    input: object, losses_of: Callable[[Batch], Tensor], keep: float, scale_factor: float, generator: Generator
) -> Tensor:
    """Return the rows of the input that a draw by their losses selects, in the order of the draw."""
    count = first_tensor(input, "select_using_loss").shape[0]
    scaled = map_tensors(lambda x: _downscaled(x, scale_factor), input)
    losses = mean_per_sample(losses_of(scaled), count)
    # Ranks are drawn on the host, the order is found on the device, and neither waits for the other.
    return losses.argsort()[copy_to(losses.device, draw_ranks(count, keep, generator))]


def draw_ranks(count: int, keep: float, generator: Generator = None) -> Tensor:
    """Return ranks drawn without replacement, high ranks preferred."""
    percentiles = (torch.arange(count, dtype=torch.float64, device=device_of(generator)) + 0.5) / count
    weights = percentiles.pow(1 / keep - 1).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.multinomial(weights, max(1, int(keep * count)), replacement=False, generator=generator)


def _check(keep: float, scale_factor: float, who: str) -> None:
    for name, value in (("keep", keep), ("scale_factor", scale_factor)):
        check_number(name, value, above=0, at_most=1, owner=who, hint=", so that samples are left")


def _downscaled(x: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return x
    if x.ndim not in _INTERPOLATION:
        raise ConfigError(
            f"scale_factor={scale}: an input of shape {tuple(x.shape)} has no size to scale; expected 3, 4 or 5 dimensions. Use 1."
        )
    return F.interpolate(x, scale_factor=scale, mode=_INTERPOLATION[x.ndim], align_corners=False)


class SelectiveBackprop(Algorithm):
    """Trains on the hard part of each batch between two moments of the run.

    The scoring pass uses the model in its present mode and the run's precision; it leaves buffers and generators as they were. Losses
    per sample come from the Trainer's loss function, or from the model's own `loss(outputs, batch, reduction="none")`.
    """

    allow_multiple = False
    events = frozenset({Event.INIT, Event.AFTER_DATALOADER})
    reads, writes = ("model", "batch"), ("batch",)
    before = ("#augment",)

    def __init__(
        self,
        start: float = 0.5,
        end: float = 0.9,
        keep: float = 0.5,
        scale_factor: float = 1.0,
        interrupt: int = 2,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ):
        check_fractions("SelectiveBackprop", start=start, end=end)
        _check(keep, scale_factor, "SelectiveBackprop")
        check_counts("SelectiveBackprop", 0, interrupt=interrupt)
        if start > end:
            raise ConfigError(f"SelectiveBackprop(start={start}, end={end}): it would end before it starts.")
        self.start, self.end, self.keep = start, end, keep
        self.scale_factor, self.interrupt = scale_factor, interrupt
        self.input_key, self.target_key = input_key, target_key

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.INIT:
            losses_of_samples(state, str(self))  # a loss without a reduction is rejected before any work
            return
        elapsed = elapsed_fraction(state, str(self))
        batch_index = state.clock.batch_in_epoch
        if self.keep == 1 or not should_selective_backprop(elapsed, batch_index, self.start, self.end, self.interrupt):
            return
        inputs, targets = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        losses_of = losses_of_samples(state, str(self))

        def scores(x: Batch) -> Tensor:
            with preserve_buffers_and_rng(state), autocast_of(state):
                return losses_of(self._outputs(state, x), targets)

        chosen = choose_rows(inputs, scores, self.keep, self.scale_factor, state.rng(type(self).__name__))
        self._take_other_rows(state, inputs, targets, chosen)
        state.batch_set_item(self.input_key, take_rows(inputs, chosen))
        state.batch_set_item(self.target_key, take_rows(targets, chosen))

    def _outputs(self, state: State, inputs: object) -> object:
        """Return what the loss compares, for other inputs than the batch's."""
        batch = state.batch
        if self.scale_factor != 1:
            batch = batch_set(copy.copy(batch), self.input_key, inputs)
        outputs = call_model(state, batch)
        takes_logits = isinstance(state.batch, Mapping) and state.loss_fn is not None
        return logits_of(outputs, str(self)) if takes_logits else outputs

    def _take_other_rows(self, state: State, inputs: object, targets: object, chosen: Tensor) -> None:
        """Select the same rows of what else the batch holds for each sample: masks, weights, document numbers."""
        batch = state.batch
        if not isinstance(batch, Mapping | list | tuple):
            return
        selected = {id(tensor) for part in (inputs, targets) for tensor in leaves(part, Tensor)}
        count = first_tensor(inputs, str(self)).shape[0]
        for key, value in list(batch.items() if isinstance(batch, Mapping) else enumerate(batch)):
            if isinstance(value, Tensor) and id(value) not in selected and value.ndim and value.shape[0] == count:
                state.batch_set_item(key, take_rows(value, chosen))
