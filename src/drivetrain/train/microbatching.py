"""Finding the largest micro-batch that fits, by dry steps before training.

Starting from the whole batch, a step is tried; out of memory halves the size. All ranks use the smallest size any of them needs.
Weights, buffers, gradients and random numbers are restored, so the run that follows is the one that would have been without.
"""

from typing import TYPE_CHECKING

import torch

from drivetrain.core.errors import DeviceError
from drivetrain.module.probing import buffers_kept
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.ranks import is_distributed
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.train import loaders
from drivetrain.train.batches import batch_size_of, split_batch

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


def find_microbatch_size(trainer: "Trainer") -> int | None:
    """Return the number of rows that fit next to model and optimizer, or None when the whole batch does."""
    move, batch = loaders.mover(trainer.device, trainer.run.data.train), next(iter(trainer.run.data.train))
    batch = batch if move is None else move(batch)
    rows = size = batch_size_of(None, batch)
    generators = capture_rng()
    try:
        with buffers_kept(trainer.model):
            while not _fits_everywhere(trainer, batch, size):
                if size == 1:
                    raise DeviceError(
                        "microbatch_size='auto': not even one row fits on the device. Use a smaller model or activation checkpointing."
                    )
                size = (size + 1) // 2
    finally:
        trainer.optimizer_zero_grad()
        restore_rng(generators)
    return None if size == rows else size


def _fits_everywhere(trainer: "Trainer", batch: object, size: int) -> bool:
    fits = _fits(trainer, split_batch(batch, size)[0])
    return all(all_gather_values(fits)) if is_distributed() else fits


def _fits(trainer: "Trainer", part: object) -> bool:
    state = trainer.state
    try:
        state.batch = part
        with trainer.runtime.no_sync(trainer.model):
            output = trainer.calculate_train_batch_loss(part)
            output["loss"].backward()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        state.batch = state.outputs = state.batch_output = None
        trainer.model.zero_grad(set_to_none=True)
        trainer.runtime.free_memory()
