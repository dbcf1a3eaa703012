"""Fewer batches than the data has: to see in seconds whether a program runs."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError
from drivetrain.train.batch_limits import DataLoaderSlice, limit_from_environment
from drivetrain.train.callbacks.base import TrainerCallback
from drivetrain.train.loaders import map_loaders

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class LimitBatchesCallback(TrainerCallback):
    """Ends every training and evaluation epoch after so many batches.

    The loaders are cut as soon as they are made, so that the run's configuration and its schedule count the batches
    that are really run.
    """

    writes = ("dataloader",)
    custom_events = frozenset({"on_loaders_made"})

    def __init__(self, num_batches: int):
        if num_batches < 1:
            raise ConfigError(f"num_batches={num_batches}: expected at least 1.")
        self.num_batches = num_batches

    def on_loaders_made(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Cut both loaders of a training run."""
        trainer.run.data.train = self._cut(trainer.run.data.train)
        trainer.run.data.evaluation = self._cut(trainer.run.data.evaluation)

    def on_training_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Cut what a trainer made that does not announce its loaders."""
        self.on_loaders_made(trainer)

    def on_evaluation_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Cut the loader of a stand-alone evaluation."""
        trainer.run.data.evaluation = self._cut(trainer.run.data.evaluation)

    def _cut(self, loader: Any) -> Any:
        return map_loaders(self._cut_one, loader)

    def _cut_one(self, loader: Any) -> Any:
        is_cut = (
            isinstance(loader, DataLoaderSlice)
            and loader.slice_size is not None
            and loader.slice_size <= self.num_batches
        )
        return loader if loader is None or is_cut else DataLoaderSlice(loader, self.num_batches)


def with_limit_from_environment(callbacks: Iterable[Any]) -> tuple[Any, ...]:
    """Return the callbacks, with a limit in front where the environment sets one and the user has not."""
    callbacks, limit = tuple(callbacks), limit_from_environment()
    has_own = any(isinstance(one, LimitBatchesCallback) or one is LimitBatchesCallback for one in callbacks)
    return callbacks if limit is None or has_own else (LimitBatchesCallback(limit), *callbacks)
