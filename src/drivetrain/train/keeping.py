"""When a run is saved: at intervals, at its end, and when somebody asked during a step."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DrivetrainWarning, NonFiniteStateError
from drivetrain.core.intervals import Interval
from drivetrain.train import loaders
from drivetrain.train.settings import TrainSettings, parse_time


def prepare_checkpoints(settings: TrainSettings, own_folders: set[Path], until_end: ExitStack) -> None:
    """Test and lock the checkpoint folder before a run begins; checkpoints of another run are an error unless the run goes on from them.

    `own_folders` are those that earlier runs of the same Trainer have written to, and that its later runs may write to again. `until_end`
    is closed when the run has ended, and releases the lock.
    """
    if settings.checkpoint_dir is None:
        return
    from drivetrain.checkpoint.folder import prepare_folder

    folder = Path(settings.checkpoint_dir)
    is_new = settings.resume_from is None and not settings.overwrite_checkpoints and folder.resolve() not in own_folders
    until_end.enter_context(prepare_folder(folder, fresh=is_new))
    own_folders.add(folder.resolve())


class Keeper:
    """Saves the trainer's state at the boundaries where it is whole.

    Inside an epoch that is after a batch, with an open accumulation window's gradients as part of the state; at an epoch's end
    it is after evaluation. What callbacks ask for in the middle of a step waits for the next boundary with a closed window.
    """

    def __init__(self, trainer: Any, settings: TrainSettings):
        self._trainer = trainer
        self._waiting: list[Callable[[], None]] = []
        self._saved_at: tuple[int, int] | None = None
        self.checkpointer: Any = None
        self._every: Interval | None = None
        self.saves_inside_epochs = False
        if settings.checkpoint_dir is None:
            return
        from drivetrain.checkpoint.checkpointer import Checkpointer

        self.checkpointer = Checkpointer(
            trainer.state,
            keep=settings.keep_checkpoints,
            dir=settings.checkpoint_dir,
            async_save="auto" if settings.async_checkpoint else False,
            signals=False,  # the trainer acts on them
        )
        if settings.checkpoint_every is not None:
            every = parse_time("checkpoint_every", settings.checkpoint_every)
            self._every = Interval(every, trainer.state.max_duration, loaders.length(trainer._train_dataloader))
            self.saves_inside_epochs = not self._every.is_per_epoch

    def start(self) -> None:
        """Count intervals from where the run stands."""
        if self._every is not None:
            self._every.reset(self._trainer.state.clock)

    def when_whole(self, save: Callable[[], None]) -> None:
        """Save as soon as the state is whole."""
        self._waiting.append(save)
        self._trainer._boundary_work = True

    def at_batch_end(self, run_ends: bool) -> None:
        """Save what is due between two batches."""
        if self._waiting and self._trainer._gradients.window.count == 0:
            waiting, self._waiting = self._waiting, []
            for save in waiting:
                save()
        if self._every is None:
            return
        if run_ends or (not self._every.is_per_epoch and self._every.due(self._trainer.state.clock)):
            self.save()

    def at_epoch_end(self, run_ends: bool) -> None:
        """Save what is due after an epoch and its evaluation."""
        if self._every is None:
            return
        due = self._every.due(self._trainer.state.clock) if self._every.is_per_epoch else False
        if due or run_ends:
            self.save()

    def save(self, final: bool = False) -> None:
        """Write a checkpoint of this moment, unless one was just written; a final one raises if it cannot be."""
        clock = self._trainer.state.clock
        keeper = self.checkpointer
        if keeper is None or (self._saved_at == (clock.epoch, clock.batch) and keeper.last_failure is None):
            return
        self._saved_at = (clock.epoch, clock.batch)
        name = f"ep{clock.epoch}-ba{clock.batch}"
        try:
            self._trainer.last_checkpoint = keeper.save(id=name, metrics=self._metrics(), final=final)
        except NonFiniteStateError as error:
            if not self._goes_on_after(error, final):
                raise
        else:
            if self._trainer._good is not None:
                self._trainer._good.take()

    def _goes_on_after(self, error: NonFiniteStateError, final: bool) -> bool:
        """Return whether the run goes on although its state is not finite; all ranks come here together."""
        trainer = self._trainer
        if trainer._good is not None:
            trainer._good.restore()
            trainer.print(f"{error} Rolled back to the state after update {trainer._good.step}.")
            return True
        if final or trainer.settings.nonfinite.action == "ignore":
            warnings.warn(str(error), DrivetrainWarning, stacklevel=3)
            return True
        trainer._has_agreed = True
        return False

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def finish(self) -> None:
        """Wait for the last save of the run; raise if it failed."""
        if self.checkpointer is not None:
            self.checkpointer.finish()

    def settle(self) -> None:
        """Wait for the save in flight without raising, after another error."""
        if self.checkpointer is not None:
            self.checkpointer.settle()

    def _metrics(self) -> dict[str, float]:
        history = self._trainer.run_history
        latest = {name: history.get_latest_metric(name) for name in history.get_metric_names()}
        return {name: float(value) for name, value in latest.items() if isinstance(value, int | float)}
