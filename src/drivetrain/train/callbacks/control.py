"""Callbacks that change how a run works: where modules are, how many batches it takes, how often it evaluates, how strict it is."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from drivetrain.context.state import State
from drivetrain.core.arguments import check_count
from drivetrain.core.errors import ConfigError, DrivetrainWarning, warn
from drivetrain.core.plugin import Logger
from drivetrain.runtime.ranks import is_distributed, num_data_ranks
from drivetrain.train.callbacks.base import TrainerCallback
from drivetrain.train.callbacks.progress import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from drivetrain.train.callbacks.stopping import TerminateOnNaNCallback
from drivetrain.train.loaders import DataLoaderSlice, limit_from_environment, map_loaders

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class MoveModulesToDeviceCallback(TrainerCallback):
    """Moves further modules of the trainer, such as a loss with weights, to the device."""

    writes = ("settings",)

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Move before training, and before an evaluation outside it."""
        for held in (*vars(trainer).values(), trainer.loss_func):
            if isinstance(held, nn.Module) and held is not trainer.model:
                held.to(trainer.device)

    on_evaluation_run_start = on_training_run_start


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Makes batch norms use the statistics of all processes, before the model is wrapped."""

    writes = ("model",)

    def before_load(self, state: State, logger: Logger) -> None:
        """Convert the model before it is wrapped. The optimizer's parameters stay the same objects."""
        if not is_distributed():
            return
        if torch.device(state.device).type == "cpu":
            warn(
                "ConvertSyncBatchNormCallback has no effect on a CPU: torch synchronises batch statistics on accelerators only."
            )
            return
        state.model = nn.SyncBatchNorm.convert_sync_batchnorm(state.model)


class StepBasedEvaluationCallback(TrainerCallback):
    """Evaluates after every n-th batch of the run. Callbacks that watch an epoch's metric ignore these evaluations.

    `train(eval_interval="100ba")` makes evaluations that count.
    """

    reads = ("timestamp",)

    writes = ("model", "batch", "outputs", "loss")

    def __init__(self, eval_every_n_steps: int):
        self.eval_every_n_steps = check_count("eval_every_n_steps", eval_every_n_steps)

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Raise if the run has no evaluation data."""
        if trainer.run.data.evaluation is None:
            raise ConfigError(
                "StepBasedEvaluationCallback has nothing to evaluate on: train() got no eval_dataset. Pass one, or "
                "remove the callback."
            )
        self._trainer = trainer

    def batch_end(self, state: State, logger: Logger) -> None:
        """Evaluate after every n-th batch."""
        if state.clock.batch % self.eval_every_n_steps == 0:
            trainer = self._trainer
            assert trainer is not None
            trainer.print(f"Evaluating after {state.clock.batch} batches")
            trainer.evaluate_between_steps()


class _EvalSlice(DataLoaderSlice):
    """A loader whose length `LimitEvalStepsCallback` sets."""

    def __init__(self, dl: object):
        super().__init__(dl, None)


class LimitEvalStepsCallback(TrainerCallback):
    """Evaluates on fewer batches: `num_eval_steps` in total, divided over the processes.

    The evaluation loader is wrapped in a slice once, whose size is set for each evaluation.
    """

    writes = ("dataloader",)

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True):
        self.num_eval_steps = check_count("num_eval_steps", num_eval_steps)
        self.limit_intermediate_only = limit_intermediate_only

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Wrap the loader in a slice."""
        processes = num_data_ranks()  # those that share samples take one step together
        if self.num_eval_steps < processes:
            raise ConfigError(
                f"num_eval_steps={self.num_eval_steps} is divided over {processes} processes, and some would have no "
                f"step. Use at least {processes}."
            )
        if trainer.run.data.evaluation is not None:
            trainer.run.data.evaluation = map_loaders(_EvalSlice, trainer.run.data.evaluation)

    on_evaluation_run_start = on_training_run_start

    def on_eval_epoch_start(self, trainer: "Trainer", is_intermediate: bool = False, **kwargs: object) -> None:
        """Limit this evaluation."""
        if is_intermediate or not self.limit_intermediate_only:
            self._limit(trainer, self.num_eval_steps // num_data_ranks())

    def on_eval_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Remove the limit."""
        self._limit(trainer, None)

    def _limit(self, trainer: "Trainer", size: int | None) -> None:
        if isinstance(loader := trainer.state.dataloader, _EvalSlice):
            loader.slice_size = size


class LimitBatchesCallback(TrainerCallback):
    """Ends every training and evaluation epoch after a number of batches.

    The loaders are cut as soon as they are made, so that the run's configuration and its schedule count the batches
    that are really run.
    """

    writes = ("dataloader",)
    custom_events = frozenset({"on_loaders_made"})

    def __init__(self, num_batches: int):
        self.num_batches = check_count("num_batches", num_batches)

    def on_loaders_made(self, trainer: "Trainer", **kwargs: object) -> None:
        """Limit both loaders of a training run."""
        trainer.run.data.train = self._cut(trainer.run.data.train)
        trainer.run.data.evaluation = self._cut(trainer.run.data.evaluation)

    on_training_run_start = on_loaders_made  # of a trainer that makes loaders without announcing them

    def on_evaluation_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        trainer.run.data.evaluation = self._cut(trainer.run.data.evaluation)

    def _cut(self, loaders: object) -> object:
        def cut(loader: object) -> object:
            size = loader.slice_size if isinstance(loader, DataLoaderSlice) else None
            is_cut = size is not None and size <= self.num_batches
            return loader if loader is None or is_cut else DataLoaderSlice(loader, self.num_batches)

        return map_loaders(cut, loaders)


def with_limit_from_environment(callbacks: Iterable[object]) -> tuple[object, ...]:
    """Return the callbacks, with a limit first if the environment sets one and the user has not."""
    callbacks, limit = tuple(callbacks), limit_from_environment()
    has_own = any(isinstance(one, LimitBatchesCallback) or one is LimitBatchesCallback for one in callbacks)
    return callbacks if limit is None or has_own else (LimitBatchesCallback(limit), *callbacks)


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """Return the default callbacks of a Trainer, with or without the progress bar."""
    bar = (ProgressBarCallback,) if progress_bar else ()
    return (MoveModulesToDeviceCallback, TerminateOnNaNCallback, PrintProgressCallback, *bar, LogMetricsCallback)


DEFAULT_CALLBACKS = get_default_callbacks()

WARM_UP = 3  # the first steps allocate and initialise, which waits


@contextmanager
def warnings_as_errors(is_strict: bool) -> Iterator[None]:
    """Raise Drivetrain's own warnings inside the block, if strict. Warnings of torch and others stay warnings."""
    with warnings.catch_warnings() if is_strict else nullcontext():
        if is_strict:
            warnings.simplefilter("error", DrivetrainWarning)
        yield


class StrictSteps(TrainerCallback):
    """Raises for a host synchronization inside a step, and for a trainable parameter without a gradient in the first window."""

    is_watched = False  # it watches itself, and only reads

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        self._steps_seen, self._first_window = 0, True

    def batch_start(self, state: State, logger: Logger) -> None:
        """Forbid host synchronization until the end of the batch; float16's scaler is the known exception."""
        self._steps_seen += 1
        if state.device.type == "cuda" and state.scaler is None and self._steps_seen > WARM_UP:
            torch.cuda.set_sync_debug_mode("error")

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Check the first complete gradients."""
        if not self._first_window or not isinstance(state.model, nn.Module):
            return
        self._first_window = False
        missing = [name for name, p in state.model.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
            raise ConfigError(
                f"strict: {len(missing)} trainable parameters got no gradient in the first window: {shown}. Does the loss depend on "
                "them? Set requires_grad=False for parameters that it does not use."
            )

    def allow_waiting(self, *_: object, **__: object) -> None:
        """Allow host synchronization between steps, where evaluation and saving happen, and after a stop or an error."""
        if torch.cuda.is_initialized():
            torch.cuda.set_sync_debug_mode("default")

    batch_end = on_stop_training_error = on_exception = allow_waiting
