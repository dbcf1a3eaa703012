"""A trainer whose optimizer can be replaced, and runs that are broken off and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.train.closures import WindowRepeat
from drivetrain.train.optimizer_factory import make_optimizer
from drivetrain.train.trainer import Trainer
from tests.algorithms.tasks import ConvNet, PullPlug, image_data, train, weights


class ReadyTrainer(Trainer):
    """A trainer that gives algorithms the optimizer factory and repeats an update's passes for optimizers that ask."""

    def _create_callback_handler(self, callbacks: Any) -> Any:
        self.state.make_optimizer = make_optimizer
        self._repeat = self.state.window_batches = WindowRepeat(self)
        return super()._create_callback_handler(callbacks)

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self._repeat.prepare()

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        if self._repeat.is_wanted:
            self._repeat.remember(batch)
        super()._perform_forward_and_backward_passes(batch, step)

    def optimizer_step(self) -> None:
        if self._repeat.is_wanted:
            self._repeat.step()
        else:
            super().optimizer_step()


def conv_run(*algorithms: Any, optimizer: str = "SGD", callbacks: Any = (), **kwargs: Any) -> Trainer:
    """Return a trainer of a small convolution net with batch norm and dropout."""
    torch.manual_seed(0)
    model = ConvNet()
    settings = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}}[optimizer]
    made = getattr(torch.optim, optimizer)(model.parameters(), **settings)
    kwargs.setdefault("seed", 7)
    cls = kwargs.pop("trainer_class", ReadyTrainer)
    return cls(model, nn.CrossEntropyLoss(), made, callbacks, algorithms=algorithms, **kwargs)


def resumed_equals_uninterrupted(make: Any, folder: Path, at: int = 6, **kwargs: Any) -> bool:
    """Break a run off before batch `at`, resume it with a new trainer, and compare it with one that was left alone."""
    kwargs = {"num_epochs": 3, **kwargs}
    whole = make()
    train(whole, image_data(), **kwargs)
    kept = {"checkpoint_dir": folder, "checkpoint_every": "1ba", "async_checkpoint": False, **kwargs}
    with pytest.raises(RuntimeError, match="plug"):
        train(make(callbacks=[PullPlug(at)]), image_data(), **kept)
    again = make()
    train(again, image_data(), resume_from="auto", **kept)
    assert again.state.clock.batch == whole.state.clock.batch
    return all(map(torch.equal, weights(again.model), weights(whole.model)))
