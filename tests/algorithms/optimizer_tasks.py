"""Runs with replaced optimizers that are broken off and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.train.trainer import Trainer
from tests.algorithms.tasks import ConvNet, PullPlug, image_data, train, weights


def conv_run(*algorithms: Any, optimizer: str = "SGD", callbacks: Any = (), **kwargs: Any) -> Trainer:
    """Return a trainer of a small convolution net with batch norm and dropout."""
    torch.manual_seed(0)
    model = ConvNet()
    settings = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}}[optimizer]
    made = getattr(torch.optim, optimizer)(model.parameters(), **settings)
    kwargs.setdefault("seed", 7)
    cls = kwargs.pop("trainer_class", Trainer)
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
