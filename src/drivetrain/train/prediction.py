"""Prediction: the model's outputs for a dataset, in its order, each sample once on any number of processes."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import BatchOutputError, ConfigError, DrivetrainWarning
from drivetrain.core.event import Event
from drivetrain.runtime.ranks import is_distributed
from drivetrain.train import loaders
from drivetrain.train.accelerator import TrainerRuntime
from drivetrain.train.batches import _like, find_form, find_inputs, join_outputs
from drivetrain.train.evaluation import evaluating_optimizer, own_events, restored_modes
from drivetrain.train.run import LossStep
from drivetrain.train.tracking import of_data_ranks

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


def run_prediction(
    trainer: "Trainer", loader: Any, to_cpu: bool, padding_value: float | None = None, generates: bool = False
) -> Any:
    """Run the prediction loop and join its outputs, or what the model generates."""
    state, fire, parts = trainer.state, trainer.run.fire, []
    move = loaders.mover(trainer.device, loader)
    with (
        own_events(trainer, Event.PREDICT_AFTER_FORWARD),
        _without_targets(trainer.run.loss),
        restored_modes(trainer.model),
        evaluating_optimizer(trainer.optimizer),
    ):
        if isinstance(trainer.model, nn.Module):
            trainer.model.eval()
        fire.predict_start()
        with torch.no_grad():
            for batch in loader:
                state.batch = batch if move is None else move(batch)
                fire.predict_batch_start()
                fire.predict_before_forward()
                if generates:
                    output: Any = {"model_outputs": trainer.calculate_generation_batch(state.batch)}
                else:
                    output = trainer.calculate_predict_batch(state.batch)
                if not isinstance(output, dict) or "model_outputs" not in output:
                    raise BatchOutputError("calculate_predict_batch must return a dict with 'model_outputs'.")
                state.batch_output = output
                rows = join_outputs([_with_rows(output["model_outputs"], trainer.device)])
                rows = _in_dataset_order(trainer.runtime, loader, rows)
                parts.append(_to_cpu(rows) if to_cpu else rows)
                fire.predict_batch_end()
        fire.predict_end()
    if not parts:
        raise ConfigError("predict() has no samples: dataset is empty, or limit_batches leaves nothing of it.")
    return _join(parts, padding_value)


@contextmanager
def _without_targets(step: LossStep) -> Iterator[None]:
    """Take batches without targets, which predictions do not need."""
    step.find_form, step.form = find_inputs, None
    try:
        yield
    finally:
        step.find_form, step.form = find_form, None


def _in_dataset_order(runtime: TrainerRuntime, loader: object, rows: object) -> Any:
    """Join this batch's outputs of all data ranks: a global batch is contiguous, rank after rank, so joining keeps the order."""
    if not is_distributed():
        return rows
    own = _no_rows(rows) if loaders.is_padding(loader) else rows
    shapes = of_data_ranks([tuple(leaf.shape) for leaf in _leaves(own)])
    if all(shape[1:] == first[1:] for of_rank in shapes for shape, first in zip(of_rank, shapes[0])):
        return runtime.gather(own)
    # Rows of different shapes travel padded to the largest, and are cut to their own shapes afterwards.
    largest = [tuple(map(max, zip(*(shape[1:] for shape in of_leaf)))) for of_leaf in zip(*shapes)]
    sizes = iter(largest)
    gathered = runtime.gather(_map_tensors(lambda leaf: _padded(leaf, next(sizes), 0), own))
    of_leaves = iter(list(zip(*shapes)))
    return _map_tensors(lambda leaf: _cut(leaf, next(of_leaves)), gathered)


def _leaves(value: object) -> list[Tensor]:
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    if values is None:
        return [value] if isinstance(value, Tensor) else []
    return [leaf for item in values for leaf in _leaves(item)]


def _map_tensors(function: Callable[[Tensor], Any], value: object) -> Any:
    return _map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _padded(rows: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """Return rows of a larger shape, filled with a value."""
    if tuple(rows.shape[1:]) == shape:
        return rows
    filled = rows.new_full((len(rows), *shape), value)
    filled[(slice(None), *(slice(size) for size in rows.shape[1:]))] = rows
    return filled


class _Rows(list[Tensor]):
    """Rows of different shapes, one tensor each."""


def _cut(rows: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor | _Rows:
    """Give the rows of each rank their own shape back."""
    if all(shape[1:] == shapes[0][1:] for shape in shapes):
        return rows
    parts = rows.split([shape[0] for shape in shapes])
    return _Rows(row[tuple(slice(size) for size in shape[1:])] for part, shape in zip(parts, shapes) for row in part)


def _no_rows(value: object) -> Any:
    return _map_leaves(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, value)


def _with_rows(value: Any, device: Any) -> Any:
    """Give numbers and tensors without dimensions one row, so that a value per batch, such as a loss, is kept for every batch."""

    def row(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.dim() else leaf.reshape(1)
        return torch.tensor([leaf], device=device) if isinstance(leaf, bool | int | float) else leaf

    return _map_leaves(row, value)


def _map_leaves(function: Callable[[Any], Any], value: object) -> Any:
    """Apply a function to what containers hold; they stay what they are."""
    if isinstance(value, Mapping):
        changed = {name: _map_leaves(function, item) for name, item in value.items()}
        return changed if type(value) is dict else _like(value, changed)
    if isinstance(value, list | tuple):
        items = [_map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def _join(parts: list[Any], padding_value: float | None = None, place: str = "the output") -> Any:
    """Join the outputs of all batches along their first dimension; what has none and differs is named, not dropped silently.

    Rows of different shapes become a list with one tensor for each sample, or are padded.
    """
    first = parts[0]
    if isinstance(first, Tensor | _Rows):
        return _join_rows(parts, padding_value)
    if isinstance(first, Mapping):
        joined = {name: _join([part[name] for part in parts], padding_value, f"{place}[{name!r}]") for name in first}
        return joined if type(first) is dict else _like(first, joined)
    if isinstance(first, list | tuple):
        items = [_join(list(column), padding_value, f"{place}[{k}]") for k, column in enumerate(zip(*parts))]
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


def _join_rows(parts: list[Any], padding_value: float | None) -> Tensor | list[Tensor]:
    if all(isinstance(part, Tensor) and part.shape[1:] == parts[0].shape[1:] for part in parts):
        return torch.cat(parts)
    rows = [row for part in parts for row in part]
    if padding_value is None or len({row.ndim for row in rows}) != 1:
        return rows
    largest = tuple(map(max, zip(*(row.shape for row in rows))))
    return torch.cat([_padded(row.unsqueeze(0), largest, padding_value) for row in rows])


def _to_cpu(value: object) -> Any:
    from drivetrain.context.moving import move_to_device

    return move_to_device("cpu", value)
