"""Callbacks that save: the best model, the whole state of a run at intervals, and the ends of a WSD schedule."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.context.state import State
from drivetrain.core.arguments import check_count
from drivetrain.core.errors import warn
from drivetrain.core.plugin import Logger
from drivetrain.core.types import StateDict
from drivetrain.runtime.collectives import agree_any
from drivetrain.train.callbacks.base import TrainerCallback, is_fresh_run
from drivetrain.train.run_history import format_metric
from drivetrain.train.tracking import MetricWatch

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


_LOADED: tuple[str, ...] = ("model", "optimizers", "schedulers")


@dataclass(eq=False, repr=False)
class SaveBestModelCallback(TrainerCallback):
    """Saves the model whenever a metric reaches its best value of the run, and loads the best model at the end.

    The value is stored in the file under the metric's name. A file that this callback has not written is never loaded.

    Args:
        save_path: the file.
        watch_metric: a name in the history, such as `"eval_accuracy_epoch"`.
        greater_is_better: whether the metric should grow.
        reset_on_train: forget the best value when `train()` starts.
        save_optimizer: save the optimizer's state too.
        save_scheduler: save the scheduler's state too.
        load_saved_checkpoint: load the best model at the end of the run.

    >>> SaveBestModelCallback("best.pt", watch_metric="eval_f1_epoch", greater_is_better=True).save_path
    'best.pt'
    """

    writes = _LOADED

    save_path: str | Path = "best_model.pt"
    watch_metric: str = "eval_loss_epoch"
    greater_is_better: bool = False
    reset_on_train: bool = True
    save_optimizer: bool = True
    save_scheduler: bool = True
    load_saved_checkpoint: bool = True

    def __post_init__(self) -> None:
        self.best_metric_epoch: int | None = None
        self.best_metric_step: int | None = None
        self._watch = MetricWatch(self.watch_metric, self.greater_is_better)

    @property
    def best_metric(self) -> float | None:
        """The best value so far; None until a model was saved."""
        return self._watch.best

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Reset the best value if that is requested, unless this run is resumed."""
        self._watch.start(trainer.run_history, forget=self.reset_on_train and is_fresh_run(trainer))

    def on_training_run_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Save if the latest value is the best. On several processes rank 0's value decides, because all of them save."""
        self._save_if_best(trainer, self._watch.agreed_value(trainer))

    def on_intermediate_evaluation_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Do the same after an evaluation inside an epoch."""
        self._save_if_best(trainer, self._watch.agreed_value(trainer, inside_epoch=True))

    def _save_if_best(self, trainer: "Trainer", value: float | None) -> None:
        if value is None or not self._watch.improvement(value) > 0 or not trainer.writes_files:
            return
        clock, self._watch.best = trainer.state.clock, value
        self.best_metric_epoch, self.best_metric_step = clock.epoch + (clock.batch_in_epoch > 0), clock.batch
        trainer.save_checkpoint(
            save_path=self.save_path,
            checkpoint_kwargs={self.watch_metric: value},
            save_optimizer=self.save_optimizer,
            save_scheduler=self.save_scheduler,
        )

    def on_training_run_end(self, trainer: "Trainer", **kwargs: object) -> None:
        if not self.load_saved_checkpoint or self.best_metric is None or not trainer.writes_files:
            return
        if agree_any(not Path(self.save_path).exists()):  # loading needs all ranks
            warn(
                f"the best model was saved to {self.save_path}, which no longer exists; the trainer keeps the last weights."
            )
            return
        trainer.print(
            f"Loading the model with {self.watch_metric} {format_metric(self.best_metric)} from epoch {self.best_metric_epoch}, "
            f"batch {self.best_metric_step} of the run"
        )
        trainer.load_checkpoint(self.save_path)

    def state_dict(self) -> StateDict:
        best = {"best_metric_epoch": self.best_metric_epoch, "best_metric_step": self.best_metric_step}
        return {"watch": self._watch.state_dict(), **best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(state["watch"])
        self.best_metric_epoch = state["best_metric_epoch"]
        self.best_metric_step = state.get("best_metric_step")


@dataclass(eq=False, repr=False)
class SaveTrainingStateCallback(TrainerCallback):
    """Saves everything a run needs to continue, every few epochs or updates and at the end.

    Folders are named `epoch_N`, `step_N` and `final`. Of the first two at most `max_checkpoints` are kept: an old one
    is removed when a newer one is complete.
    """

    save_dir: str | Path = "training_states"
    save_every_n_epochs: int | None = None
    save_every_n_steps: int | None = None
    save_at_end: bool = True
    max_checkpoints: int | None = None

    def __post_init__(self) -> None:
        for name in ("save_every_n_epochs", "save_every_n_steps", "max_checkpoints"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), hint=", or None")
        if self.save_every_n_epochs is None and self.save_every_n_steps is None and not self.save_at_end:
            text = "SaveTrainingStateCallback saves nothing: give save_every_n_epochs, save_every_n_steps or save_at_end=True."
            warn(text)
        self.save_dir, self._saved_checkpoints = Path(self.save_dir), list[Path]()

    def on_train_step_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Remove states that the last save has replaced."""
        if self.max_checkpoints is not None and len(self._saved_checkpoints) > self.max_checkpoints:
            self._remove_old(trainer)

    def on_train_step_end(
        self, trainer: "Trainer", batch: object = None, batch_output: object = None, **kwargs: object
    ) -> None:
        """Request a save after this step's update if it is due."""
        update = update_in_progress(trainer)
        if update is not None and self.save_every_n_steps is not None and update % self.save_every_n_steps == 0:
            self._save(trainer, f"step_{update}")

    def on_training_run_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Save a finished epoch if it is due."""
        epoch = trainer.state.clock.epoch
        if self.save_every_n_epochs is not None and epoch and epoch % self.save_every_n_epochs == 0:
            self._save(trainer, f"epoch_{epoch}")
        self._remove_old(trainer)

    def on_training_run_end(self, trainer: "Trainer", **kwargs: object) -> None:
        if self.save_at_end:
            trainer.save_training_state(Path(self.save_dir) / "final")
        self._remove_old(trainer)

    def state_dict(self) -> StateDict:
        """Return which states exist, so that a resumed run removes the right ones."""
        return {"saved": [str(path) for path in self._saved_checkpoints]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved_checkpoints = [Path(path) for path in state["saved"]]

    def _save(self, trainer: "Trainer", name: str) -> None:
        path = Path(self.save_dir) / name
        self._saved_checkpoints = [*(other for other in self._saved_checkpoints if other != path), path]
        trainer.save_training_state(path)

    def _remove_old(self, trainer: "Trainer") -> None:
        saved = self._saved_checkpoints
        if self.max_checkpoints is None or not saved or not saved[-1].exists():
            return
        while len(saved) > self.max_checkpoints:
            old = saved.pop(0)
            if trainer.runtime.is_main_process:
                shutil.rmtree(old, ignore_errors=True)


class WSDCheckpointCallback(TrainerCallback):
    """Saves before and after every decay of a `WSDLrScheduler`, and starts a continuation from such a checkpoint.

    `checkpoint_N_wsd_pre_decay` is a state folder to continue from as if the decay had not been (WSD), and
    `checkpoint_N_wsd_post_decay.pt` the model to use, or to continue from (WSD-S).
    """

    writes = _LOADED

    def __init__(
        self,
        save_dir: str | Path = "checkpoints",
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        initial_checkpoint: str | Path | None = None,
    ):
        self.save_dir, self.save_optimizer, self.save_scheduler = Path(save_dir), save_optimizer, save_scheduler
        self.initial_checkpoint = None if initial_checkpoint is None else Path(initial_checkpoint)
        self.checkpoint_steps: set[int] = set()
        self.pre_decay_steps: set[int] = set()
        self._post_decay_step: int | None = None

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Read the steps from the schedule and load the checkpoint to continue from."""
        scheduler = trainer.scheduler
        if not hasattr(scheduler, "get_checkpoint_steps"):
            raise ValueError(
                "WSDCheckpointCallback needs a scheduler with get_checkpoint_steps(), but the trainer has "
                f"{type(scheduler).__name__}. Train with create_scheduler_fn=WSDLrScheduler.create_scheduler_fn(...)."
            )
        self._trainer, self._post_decay_step = trainer, None
        if self.initial_checkpoint is not None and is_fresh_run(trainer):
            self._continue_from(trainer, self.initial_checkpoint)
        self.checkpoint_steps = set(scheduler.get_checkpoint_steps())
        self.pre_decay_steps = {info["pre_decay_step"] for info in scheduler.get_decay_info() if info["decay_steps"]}

    def on_train_step_end(
        self, trainer: "Trainer", batch: object = None, batch_output: object = None, **kwargs: object
    ) -> None:
        """Request the saves that are due after this step's update."""
        update = update_in_progress(trainer)
        if update in self.pre_decay_steps:
            entries = {"step": update, "checkpoint_type": "wsd_pre_decay"}
            trainer.save_training_state(self.save_dir / f"checkpoint_{update}_wsd_pre_decay", entries)
        if update in self.checkpoint_steps:
            self._post_decay_step = update

    def batch_end(self, state: State, logger: Logger) -> None:
        """Save a model whose decay is complete."""
        if self._post_decay_step is None:
            return
        step, self._post_decay_step = self._post_decay_step, None
        assert self._trainer is not None
        self._trainer.save_checkpoint(
            self.save_dir / f"checkpoint_{step}_wsd_post_decay.pt",
            checkpoint_kwargs={"step": step, "checkpoint_type": "wsd_post_decay"},
            save_optimizer=self.save_optimizer,
            save_scheduler=self.save_scheduler,
        )

    def _continue_from(self, trainer: "Trainer", path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"initial_checkpoint={str(path)!r} does not exist.")
        if path.is_dir():  # model, optimizers and schedulers, but not the position: the new run has its own
            from drivetrain.checkpoint.store import load_checkpoint
            from drivetrain.context.context import Context

            state = trainer.state
            part = Context(model=state.model, optimizers=state.optimizers, schedulers=state.schedulers)
            part.load_state_dict(load_checkpoint(path, map_location=state.device), strict=False)
        else:
            trainer.load_checkpoint(path)
        if trainer.scheduler.is_continuation_from_checkpoint:
            trainer.scheduler.restart()
        trainer.print(f"Continuing from {path}")


def update_in_progress(trainer: "Trainer") -> int | None:
    """Return the number of the update that the current batch completes, from 1; None inside an accumulation window."""
    return trainer.state.clock.step + 1 if trainer.run.stepper.window.closes else None
