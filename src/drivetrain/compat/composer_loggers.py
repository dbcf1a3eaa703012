"""Composer's loggers: a base to derive from, and one that keeps everything in memory."""

from collections.abc import Mapping
from typing import Any

from drivetrain.core.plugin import Callback, Phase


class LoggerDestination(Callback):
    """Receives what a run logs; define the methods you need, and give it to `Trainer(loggers=[...])`."""

    phase: Phase = "sink"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Receive named values."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Receive the settings of the run."""

    def log_images(self, images: Any, name: str = "images", step: int | None = None) -> None:
        """Receive images."""


class InMemoryLogger(LoggerDestination):
    """Keeps every value with its step: `data["loss/train/total"]` is a list of `(step, value)`."""

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[int | None, Any]]] = {}
        self.most_recent_values: dict[str, Any] = {}
        self.hyperparameters: dict[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep values; tensors stay where they are until they are read."""
        for name, value in metrics.items():
            self.data.setdefault(name, []).append((step, value))
        self.most_recent_values.update(metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Keep the settings of the run."""
        self.hyperparameters.update(hyperparameters)
