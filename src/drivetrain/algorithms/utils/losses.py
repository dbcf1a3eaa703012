"""What algorithms need of losses: logits, a second loss for other targets, losses per sample, and what MixUp and CutMix share."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.algorithms.utils.parts import map_tensors, take_rows
from drivetrain.algorithms.utils.passes import autocast_of
from drivetrain.context.batch import BatchKey, ensure_targets_one_hot
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, ConfigTypeError, Event, Logger, PluginConflictError
from drivetrain.core.plain import plain_text
from drivetrain.core.types import Batch
from drivetrain.module.wrapping import own_loss


def logits_of(outputs: object, who: str) -> Tensor:
    """Return the model's logits: its outputs, or what they hold under that name."""
    logits = outputs if isinstance(outputs, Tensor) else _named_logits(outputs)
    if not isinstance(logits, Tensor):
        raise ConfigTypeError(
            f"{who} needs logits, one value per class in dimension 1; the model returned a {type(outputs).__name__} without them. "
            "Return a tensor, or an output with `logits`."
        )
    return logits


def logits_for(outputs: object, targets: object, who: str) -> Batch:
    """Return logits with targets: one tensor, or one for each of several targets."""
    if not isinstance(targets, list | tuple):
        return logits_of(outputs, who)
    if isinstance(outputs, list | tuple) and len(outputs) == len(targets):
        return [logits_of(output, who) for output in outputs]
    return [logits_of(outputs, who)] * len(targets)


def _named_logits(outputs: object) -> object:
    return outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)


def loss_with_targets(state: State, target_key: BatchKey, targets: object) -> Tensor:
    """Return the loss of the present outputs for other targets; the batch keeps its own."""
    own = state.batch_get_item(target_key)
    state.batch_set_item(target_key, targets)
    try:
        with autocast_of(state):
            if state.loss_fn is None:
                loss = own_loss(state.model)
                assert loss is not None  # asked for by check_loss_is_outside
                return _total(loss(state.outputs, state.batch))
            # Of a mapping's batch the loss function receives the logits, where the outputs have some.
            logits = _named_logits(state.outputs) if isinstance(state.batch, Mapping) else None
            return _total(state.loss_fn(state.outputs if logits is None else logits, targets))
    finally:
        state.batch_set_item(target_key, own)


def _total(loss: Any) -> Tensor:
    if isinstance(loss, Mapping):
        return loss["loss"] if "loss" in loss else sum(loss.values())  # type: ignore[return-value]
    return loss


def check_loss_is_outside(state: State, who: str) -> None:
    """Reject a loss that the model computes in `forward`: changed targets would come too late for it."""
    if state.loss_fn is None and own_loss(state.model) is None:
        raise ConfigError(
            f"{who} changes the targets between the model and its loss, but this model computes its loss itself. Give the Trainer a "
            "loss_func, or the model a method loss(outputs, batch)."
        )


def check_soft_targets(state: State, logits: object, targets: Any, who: str) -> None:
    """Reject a loss that only takes class indices, by a trial with two rows."""
    if state.loss_fn is None or not isinstance(logits, Tensor):
        return
    name = getattr(state.loss_fn, "__name__", type(state.loss_fn).__name__)
    try:
        with torch.no_grad(), autocast_of(state):
            state.loss_fn(logits[:2].detach(), targets[:2])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = next(iter(plain_text(error).splitlines()), type(error).__name__)
        raise PluginConflictError(
            f"{who} and the loss {name} cannot run together: {who} produces targets of shape {tuple(targets.shape)}, one weight per class, "
            f"and this loss rejects them: {reason}. Use a loss that takes such targets, such as cross_entropy (with ignored labels marked "
            "by -100), or let MixUp and CutMix mix losses with interpolate_loss=True."
        ) from error


def per_sample(loss_function: Any, who: str = "SelectiveBackprop") -> Callable[[Batch, Batch], Tensor]:
    """Return the loss function without its reduction: one loss, or several, for each sample."""
    if isinstance(loss_function, nn.Module) and isinstance(getattr(loss_function, "reduction", None), str):
        return partial(_unreduced, loss_function)
    target = loss_function.forward if isinstance(loss_function, nn.Module) else loss_function
    parameters = inspect.signature(target).parameters if callable(target) else {}
    if "reduction" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        name = getattr(loss_function, "__qualname__", type(loss_function).__name__)
        fault = "the model computes its loss in `forward`" if target is None else f"the loss {name} has no `reduction`"
        raise ConfigTypeError(
            f"{who} needs a loss for each sample, and {fault}. Give one like torch.nn.CrossEntropyLoss() or "
            "torch.nn.functional.cross_entropy, which accepts reduction='none', or give the model a method "
            "loss(outputs, batch, reduction='mean')."
        )
    return partial(loss_function, reduction="none")


def losses_of_samples(state: State, who: str) -> Callable[[Batch, Batch], Tensor]:
    """Return the run's loss without its reduction, as a function of outputs and targets.

    That is the loss function's, or the model's own `loss(outputs, batch, reduction="none")` for the present batch.
    """
    own = own_loss(state.model)
    if state.loss_fn is not None or own is None:
        return per_sample(state.loss_fn, who)
    of_batch = per_sample(own, who)
    return lambda outputs, targets: _total(of_batch(outputs, state.batch))


def _unreduced(module: Any, outputs: Batch, targets: Batch) -> Tensor:
    reduction = module.reduction
    module.reduction = "none"
    try:
        return module(outputs, targets)
    finally:
        module.reduction = reduction


def mean_per_sample(losses: Tensor, count: int) -> Tensor:
    """Return one loss for each of `count` samples."""
    if losses.ndim == 0 or losses.shape[0] != count:
        raise ConfigError(
            f"the unreduced loss has shape {tuple(losses.shape)}, expected one loss, or several, for each of {count} samples."
        )
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


class SoftTargets(Algorithm):
    """Gives the loss soft targets; the true ones are back right after it, so that metrics count them."""

    allow_multiple = False
    events = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})
    reads: tuple[str, ...] = ("outputs", "batch")
    writes: tuple[str, ...] = ("batch",)
    tags = frozenset({"soft_targets"})

    def __init__(self, target_key: BatchKey):
        self.target_key = target_key
        self._true: object = None
        self._is_checked = False

    def softened(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return one weight per class for a target."""
        raise NotImplementedError

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.AFTER_LOSS:
            state.batch_set_item(self.target_key, self._true)
            self._true = None
            return
        if not self._is_checked:
            check_loss_is_outside(state, str(self))
        self._true = state.batch_get_item(self.target_key)
        logits = logits_for(state.outputs, self._true, str(self))
        soft = map_tensors(self.softened, logits, self._true)
        if not self._is_checked:
            check_soft_targets(state, logits, soft, str(self))
            self._is_checked = True
        state.batch_set_item(self.target_key, soft)


class PairMixing(SoftTargets):
    """Mixes each sample with another one of its batch; a subclass says how inputs are mixed.

    With soft targets, the loss sees `w y + (1 - w) y[index]`. With interpolated losses, the loss that is trained on becomes
    `w L(y) + (1 - w) L(y[index])` at AFTER_LOSS, before anybody tracks it.
    """

    reads = ("batch", "outputs", "loss")

    def __init__(self, interpolate_loss: bool, input_key: BatchKey, target_key: BatchKey):
        super().__init__(target_key)
        self.interpolate_loss, self.input_key = interpolate_loss, input_key
        events = {Event.BEFORE_FORWARD, Event.AFTER_LOSS}
        self.events = frozenset(events if interpolate_loss else events | {Event.BEFORE_LOSS})
        self.writes = ("batch", "loss") if interpolate_loss else ("batch",)
        self.tags = frozenset({"augment", "interpolates_loss" if interpolate_loss else "soft_targets"})
        if interpolate_loss:
            self.before = ("#soft_targets",)  # the second loss must see targets as soft as the first one's
        self._own_weight = 1.0
        self._index = torch.empty(0, dtype=torch.long)  # of the other samples

    def mix_inputs(self, state: State) -> tuple[float, Tensor]:
        """Replace the inputs by mixed ones; return the weight of each sample's own target, and the other samples' rows."""
        raise NotImplementedError

    def softened(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return a target mixed as the inputs were; numbers to predict and soft labels in their own shape."""
        dense = target if target.is_floating_point() else ensure_targets_one_hot(logits, target)
        return torch.lerp(take_rows(dense, self._index), dense, self._own_weight)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BEFORE_FORWARD:
            self._own_weight, self._index = self.mix_inputs(state)
        elif not self.interpolate_loss:
            super().apply(event, state, logger)
        else:
            check_loss_is_outside(state, str(self))
            own = self._own_weight
            if own < 1:
                others = take_rows(state.batch_get_item(self.target_key), self._index)
                state.loss = state.loss * own + loss_with_targets(state, self.target_key, others) * (1 - own)
