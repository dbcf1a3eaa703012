"""Prediction: the model's outputs for a dataset, in its order, each sample once on any number of processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import BatchOutputError
from drivetrain.core.event import Event
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.train import loaders
from drivetrain.train.batches import find_form, find_inputs, join_outputs
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
                rows = join_outputs([output["model_outputs"]])
                rows = _in_dataset_order(trainer, loader, rows)
                parts.append(_to_cpu(rows) if to_cpu else rows)
                fire.predict_batch_end()
        fire.predict_end()
    if not parts:
        raise BatchOutputError("predict() was given no samples.")
    return join_outputs(parts)


@contextmanager
def _without_targets(trainer: Any) -> Iterator[None]:
    """Let batches meet the model without targets, which predictions do not need."""
    trainer._find_form, trainer._form = find_inputs, None
    try:
        yield
    finally:
        trainer._find_form, trainer._form = find_form, None


def _in_dataset_order(trainer: Any, loader: Any, rows: Any) -> Any:
    """Join this batch's outputs of all ranks: a global batch is contiguous, rank after rank, so joining keeps the order."""
    if get_num_processes() == 1:
        return rows
    sizes = all_gather_values(0 if loaders.is_padding(loader) else 1)
    if not sizes[trainer._accelerator.process_index]:
        rows = _no_rows(rows)
    return trainer._accelerator.gather(rows)


def _no_rows(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value[:0]
    if isinstance(value, dict):
        return type(value)({name: _no_rows(item) for name, item in value.items()})
    return type(value)(map(_no_rows, value)) if isinstance(value, (list, tuple)) else value


def _to_cpu(value: Any) -> Any:
    from drivetrain.context.moving import move_to_device

    return move_to_device("cpu", value)
