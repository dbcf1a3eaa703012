"""Callbacks that prepare modules before the first step."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.core.errors import DrivetrainWarning
from drivetrain.runtime.ranks import is_distributed
from drivetrain.train.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class MoveModulesToDeviceCallback(TrainerCallback):
    """Moves modules that the trainer holds next to its model, such as a loss with weights, to the device."""

    writes = ("settings",)

    def on_training_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Move before training."""
        self._move(trainer)

    def on_evaluation_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Move before an evaluation outside training."""
        self._move(trainer)

    def _move(self, trainer: "Trainer") -> None:
        for held in (*vars(trainer).values(), trainer.loss_func):
            if isinstance(held, nn.Module) and held is not trainer.model:
                held.to(trainer.device)


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Makes batch norms use the statistics of all processes, before the model is wrapped."""

    writes = ("model",)

    def before_load(self, state: Any, logger: Any) -> None:
        """Convert while the model is still plain; the optimizer's parameters stay the same objects."""
        if not is_distributed():
            return
        if torch.device(state.device).type == "cpu":
            warnings.warn(
                "ConvertSyncBatchNormCallback has no effect on a CPU: torch synchronises batch statistics on "
                "accelerators only.",
                DrivetrainWarning,
                stacklevel=2,
            )
            return
        state.model = nn.SyncBatchNorm.convert_sync_batchnorm(state.model)
