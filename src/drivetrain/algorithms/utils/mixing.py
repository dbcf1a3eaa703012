"""What MixUp and CutMix share: inputs are mixed before the model, targets or losses in the same proportion around the loss.

With soft targets, the loss sees `w y + (1 - w) y[index]` and the true targets are back right after it, so that metrics count them.
With interpolated losses, the loss that is trained on becomes `w L(y) + (1 - w) L(y[index])` at AFTER_LOSS, before anybody tracks it.
"""

import torch
from torch import Tensor

from drivetrain.algorithms.utils.losses import check_loss_is_outside, check_soft_targets, logits_for, loss_with_targets
from drivetrain.algorithms.utils.parts import map_tensors, take_rows
from drivetrain.context.batch import BatchKey, ensure_targets_one_hot
from drivetrain.context.state import State
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Logger
from drivetrain.core.types import Batch

SOFT = frozenset({Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS})
INTERPOLATED = frozenset({Event.BEFORE_FORWARD, Event.AFTER_LOSS})


class PairMixing(Algorithm):
    """Mixes each sample with another one of its batch; a subclass says how inputs are mixed."""

    allow_multiple = False
    reads = ("batch", "outputs", "loss")

    def __init__(self, interpolate_loss: bool, input_key: BatchKey, target_key: BatchKey):
        self.interpolate_loss, self.input_key, self.target_key = interpolate_loss, input_key, target_key
        self.events = INTERPOLATED if interpolate_loss else SOFT
        self.writes = ("batch", "loss") if interpolate_loss else ("batch",)
        self.tags = frozenset({"augment", "interpolates_loss" if interpolate_loss else "soft_targets"})
        if interpolate_loss:
            self.before = ("#soft_targets",)  # the second loss must see targets as soft as the first one's
        self._own_weight = 1.0
        self._index: Tensor | None = None
        self._true: object = None
        self._is_checked = False

    def mix_inputs(self, state: State) -> tuple[float, Tensor]:
        """Replace the inputs by mixed ones; return the weight of each sample's own target, and the other samples' rows."""
        raise NotImplementedError

    def mix_targets(self, logits: object, targets: object) -> Batch:
        """Return targets mixed as the inputs were."""
        own = self._own_weight

        def mixed(one: Tensor, target: Tensor) -> Tensor:
            dense = ensure_targets_one_hot(one, target)
            return torch.lerp(take_rows(dense, self._rows), dense, own)

        return map_tensors(mixed, logits, targets)

    @property
    def _rows(self) -> Tensor:
        assert self._index is not None
        return self._index

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BEFORE_FORWARD:
            self._own_weight, self._index = self.mix_inputs(state)
        elif event is Event.BEFORE_LOSS:
            self._true = state.batch_get_item(self.target_key)
            state.batch_set_item(self.target_key, self._soft_targets(state))
        elif self.interpolate_loss:
            self._interpolate_loss(state)
        else:
            state.batch_set_item(self.target_key, self._true)
            self._true = None

    def _soft_targets(self, state: State) -> object:
        logits = logits_for(state.outputs, self._true, str(self))
        mixed = self.mix_targets(logits, self._true)
        if not self._is_checked:
            check_soft_targets(state, logits, mixed, str(self))
            self._is_checked = True
        return mixed

    def _interpolate_loss(self, state: State) -> None:
        if not self._is_checked:
            check_loss_is_outside(state, str(self))
            self._is_checked = True
        own = self._own_weight
        if own < 1:
            others = take_rows(state.batch_get_item(self.target_key), self._rows)
            state.loss = state.loss * own + loss_with_targets(state, self.target_key, others) * (1 - own)
