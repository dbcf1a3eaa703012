"""Small models and data that the trainer tests share."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer


def make_data(rows: int = 24, features: int = 6, classes: int = 3, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, features, generator=generator, dtype=dtype)
    y = torch.randint(0, classes, (rows,), generator=generator)
    return TensorDataset(x, y)


def make_model(
    features: int = 6, classes: int = 3, dtype: torch.dtype = torch.float32, dropout: float = 0.0
) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(features, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, classes)]
    return nn.Sequential(*layers).to(dtype)


def make_trainer(
    model: nn.Module | None = None, lr: float = 0.1, cls: type[Trainer] = Trainer, **kwargs: Any
) -> Trainer:
    model = make_model() if model is None else model
    kwargs.setdefault("callbacks", ())
    optimizer = kwargs.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return cls(model, nn.CrossEntropyLoss(), optimizer, **kwargs)


def train(trainer: Trainer, data: Any = None, **kwargs: Any) -> Any:
    kwargs.setdefault("num_epochs", 1)
    kwargs.setdefault("per_device_batch_size", 8)
    kwargs.setdefault("train_dataloader_kwargs", {"shuffle": False})
    return trainer.train(make_data() if data is None else data, **kwargs)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def calls_of(function: Callable[[], object]) -> int:
    """Count the functions of Python and C that `function` calls: what it costs, on every machine alike."""
    calls: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        function()
    finally:
        sys.setprofile(before)
    return sum(event in ("call", "c_call") for event in calls) - 2  # without `function` itself and `setprofile`


class Losses(TrainerCallback):
    """Keeps every step's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.values.append(batch_output["loss"].item())


class Lines:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.lines.append((step, metrics))

    def series(self, name: str) -> list[tuple[int | None, Any]]:
        return [(step, metrics[name]) for step, metrics in self.lines if name in metrics]
