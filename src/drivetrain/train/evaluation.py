"""Stepping out of training to look at the model, and stepping back in as if nothing had happened."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from drivetrain.core.event import Event
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.train.failures import explain_failure
from drivetrain.train.plain_hooks import PlainHooks, find_plain_hooks
from drivetrain.train.tracking import InMemoryRunHistory, LossTracker


@contextmanager
def evaluation_mode(trainer: Any, is_intermediate: bool, loader: Any, set_name: str | None) -> Iterator[None]:
    """Give an evaluation its own loss tracker and events; put modes, batch and random numbers back, also after an error."""
    state, tracker, logged = trainer.state, trainer._loss_tracker, trainer._logged
    training_data = (state.dataloader, state.dataloader_label, state.dataloader_len)
    before = (state.batch, state.batch_output, state.outputs, state.loss, state.is_intermediate)
    was_evaluating, generators = trainer.evaluating, capture_rng()
    trainer._loss_tracker, trainer._logged, trainer.evaluating = LossTracker(), {}, True
    trainer._eval_metrics.reset()
    state.is_intermediate = is_intermediate
    state.set_dataloader(loader, set_name or "eval")
    try:
        with own_events(trainer, Event.EVAL_AFTER_FORWARD), kept_modes(trainer.model), evaluating_optimizer(trainer):
            yield
    finally:
        trainer._loss_tracker, trainer._logged, trainer.evaluating = tracker, logged, was_evaluating
        state.batch, state.batch_output, state.outputs, state.loss, state.is_intermediate = before
        state.set_dataloader(*training_data)
        restore_rng(generators)


@contextmanager
def errors_told(trainer: Any) -> Iterator[None]:
    """Let every guest know of an error and close what it holds; the error goes on unchanged."""
    try:
        yield
    except BaseException as error:
        explained = explain_failure(error, trainer.get_model(), trainer.loss_func, 0)
        trainer._close_after(explained)
        if explained is error:
            raise
        raise explained from error


@contextmanager
def own_events(trainer: Any, after_forward: Event) -> Iterator[None]:
    """Let `forward` fire the event of this phase, and the loss fire none."""
    before, plain = (trainer._after_forward, trainer._before_loss), trainer._plain
    trainer._after_forward, trainer._before_loss, trainer._plain = after_forward.value, False, PlainHooks()
    try:
        yield
    finally:
        trainer._after_forward, trainer._before_loss = before
        trainer._plain = plain if plain == PlainHooks() else find_plain_hooks(trainer)  # guests may have come meanwhile


@contextmanager
def kept_modes(model: Any) -> Iterator[None]:
    """Put every module's training flag back."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating_optimizer(trainer: Any) -> Iterator[None]:
    """Show an optimizer with modes (schedule-free) that the weights are looked at, not trained."""
    optimizer = trainer.optimizer
    has_modes = callable(getattr(type(optimizer), "eval", None)) and callable(getattr(type(optimizer), "train", None))
    was_training = getattr(optimizer, "training", True)
    if has_modes:
        optimizer.eval()
    try:
        yield
    finally:
        if has_modes and was_training:
            optimizer.train()


@contextmanager
def kept_history(trainer: Any) -> Iterator[None]:
    """Use a history that is thrown away afterwards."""
    history = trainer.run_history
    trainer.run_history = InMemoryRunHistory()
    try:
        yield
    finally:
        trainer.run_history = history
