"""Callbacks that evaluate more often, or less of the data."""

from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError
from drivetrain.runtime.ranks import num_data_ranks
from drivetrain.train.batch_limits import DataLoaderSlice
from drivetrain.train.callbacks.base import TrainerCallback
from drivetrain.train.loaders import map_loaders

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class StepBasedEvaluationCallback(TrainerCallback):
    """Evaluates after every n-th finished batch of the run, as a look in between that callbacks watching an epoch's metric do not count.

    `train(eval_interval="100ba")` makes evaluations that count.
    """

    writes = ("model", "batch", "outputs", "loss")

    def __init__(self, eval_every_n_steps: int):
        if eval_every_n_steps < 1:
            raise ConfigError(f"eval_every_n_steps={eval_every_n_steps}: expected at least 1.")
        self.eval_every_n_steps = eval_every_n_steps

    def on_training_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Refuse a run that has nothing to evaluate on."""
        if trainer.run.data.evaluation is None:
            raise ConfigError(
                "StepBasedEvaluationCallback has nothing to evaluate on: train() got no eval_dataset. Pass one, or "
                "remove the callback."
            )
        self._trainer = trainer

    def batch_end(self, state: Any, logger: Any) -> None:
        """Evaluate when the batch that has just ended is an n-th one."""
        if state.clock.batch % self.eval_every_n_steps == 0:
            trainer = self._trainer
            assert trainer is not None
            trainer.print(f"Evaluating after {state.clock.batch} batches")
            trainer._run_intermediate_evaluation()


class LimitEvalStepsCallback(TrainerCallback):
    """Evaluates on fewer batches: `num_eval_steps` in all, shared by the processes.

    The evaluation loader is put behind a slice once, and the slice is opened and closed per evaluation.
    """

    writes = ("dataloader",)

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True):
        if num_eval_steps < 1:
            raise ConfigError(f"num_eval_steps={num_eval_steps}: expected at least 1.")
        self.num_eval_steps = num_eval_steps
        self.limit_intermediate_only = limit_intermediate_only
        self._slices: list[DataLoaderSlice] = []

    def on_training_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Put the loader behind a slice."""
        self._prepare(trainer)

    def on_evaluation_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Put the loader behind a slice."""
        self._prepare(trainer)

    def on_eval_epoch_start(self, trainer: "Trainer", is_intermediate: bool = False, **kwargs: Any) -> None:
        """Close the slice where this evaluation is limited."""
        if is_intermediate or not self.limit_intermediate_only:
            self._set_size(self.num_eval_steps // num_data_ranks())

    def on_eval_epoch_end(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Open the slice."""
        self._set_size(None)

    def on_exception(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Open the slice also when an evaluation has failed."""
        self.on_eval_epoch_end(trainer)

    def _prepare(self, trainer: "Trainer") -> None:
        processes = num_data_ranks()  # those that share samples take one step together
        if self.num_eval_steps < processes:
            raise ConfigError(
                f"num_eval_steps={self.num_eval_steps} is shared by {processes} processes and leaves some without a "
                f"step. Use at least {processes}."
            )
        if trainer.run.data.evaluation is not None:
            self._slices = []
            trainer.run.data.evaluation = map_loaders(self._sliced, trainer.run.data.evaluation)

    def _sliced(self, loader: Any) -> DataLoaderSlice:
        self._slices.append(DataLoaderSlice(loader, None))
        return self._slices[-1]

    def _set_size(self, size: int | None) -> None:
        for one in self._slices:
            one.slice_size = size
