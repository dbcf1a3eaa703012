"""Prediction: the model's outputs for a dataset, in its order, each sample once on any number of processes."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import BatchOutputError, DrivetrainWarning
from drivetrain.core.event import Event
from drivetrain.runtime.ranks import is_distributed
from drivetrain.train import loaders
from drivetrain.train.batches import _like, find_form, find_inputs, join_outputs
from drivetrain.train.evaluation import evaluating_optimizer, kept_modes, own_events


def run_prediction(trainer: Any, loader: Any, to_cpu: bool) -> Any:
    """Turn the prediction loop and join its outputs."""
    state, fire, parts = trainer.state, trainer._fire, []
    move = loaders.mover(trainer, loader)
    with (
        own_events(trainer, Event.PREDICT_AFTER_FORWARD),
        _without_targets(trainer),
        kept_modes(trainer.model),
        evaluating_optimizer(trainer),
    ):
        if isinstance(trainer.model, nn.Module):
            trainer.model.eval()
        fire.predict_start()
        with torch.no_grad():
            for batch in loader:
                state.batch = batch if move is None else move(batch)
                fire.predict_batch_start()
                fire.predict_before_forward()
                output = trainer.calculate_predict_batch(state.batch)
                if not isinstance(output, dict) or "model_outputs" not in output:
                    raise BatchOutputError("calculate_predict_batch must return a dict with 'model_outputs'.")
                state.batch_output = output
                rows = join_outputs([_with_rows(output["model_outputs"], trainer.device)])
                rows = _in_dataset_order(trainer, loader, rows)
                parts.append(_to_cpu(rows) if to_cpu else rows)
                fire.predict_batch_end()
        fire.predict_end()
    if not parts:
        raise BatchOutputError("predict() was given no samples.")
    return _join(parts)


@contextmanager
def _without_targets(trainer: Any) -> Iterator[None]:
    """Let batches meet the model without targets, which predictions do not need."""
    trainer._find_form, trainer._form = find_inputs, None
    try:
        yield
    finally:
        trainer._find_form, trainer._form = find_form, None


def _in_dataset_order(trainer: Any, loader: Any, rows: Any) -> Any:
    """Join this batch's outputs of all data ranks: a global batch is contiguous, rank after rank, so joining keeps the order."""
    if not is_distributed():
        return rows
    return trainer._accelerator.gather(_no_rows(rows) if loaders.is_padding(loader) else rows)


def _no_rows(value: Any) -> Any:
    return _map_leaves(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, value)


def _with_rows(value: Any, device: Any) -> Any:
    """Give numbers and tensors without dimensions one row, so that a value per batch, such as a loss, is kept for every batch."""

    def row(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.dim() else leaf.reshape(1)
        return torch.tensor([leaf], device=device) if isinstance(leaf, bool | int | float) else leaf

    return _map_leaves(row, value)


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to what containers hold; they stay what they are."""
    if isinstance(value, Mapping):
        changed = {name: _map_leaves(function, item) for name, item in value.items()}
        return changed if type(value) is dict else _like(value, changed)
    if isinstance(value, list | tuple):
        items = [_map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def _join(parts: list[Any], place: str = "the output") -> Any:
    """Join the outputs of all batches along their first dimension; what has none and differs is named, not dropped in silence."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        joined = {name: _join([part[name] for part in parts], f"{place}[{name!r}]") for name in first}
        return joined if type(first) is dict else _like(first, joined)
    if isinstance(first, list | tuple):
        items = [_join(list(column), f"{place}[{k}]") for k, column in enumerate(zip(*parts))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if all(part is first or part == first for part in parts[1:]):
        return first
    warnings.warn(
        f"predict(): {place} (a value of type {type(first).__name__}) differs from batch to batch and cannot be joined, so it is None "
        "in the result. Override calculate_predict_batch to return what you need as tensors.",
        DrivetrainWarning,
        stacklevel=2,
    )
    return None


def _to_cpu(value: Any) -> Any:
    from drivetrain.context.moving import move_to_device

    return move_to_device("cpu", value)
