"""The training data for a subclass that writes out the loop over its batches, as pytorch-accelerated's `_run_train_epoch` does.

Such a loop calls the hooks and the callbacks itself. What it cannot know of is done here, around each batch that it takes: moving the
batch to the device, the accumulation window, counting, checkpoints, evaluations inside the epoch, limits and signals.
"""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.train.loop import TrainerLoop


class OwnLoop:
    """A loader whose batches are counted as they are taken; everything else about it is the loader's."""

    def __init__(self, trainer: "TrainerLoop", loader: Any):
        self._trainer, self.loader = trainer, loader
        self._steps: Generator[Any, None, None] | None = None
        self._in_step = False
        self.ended = False
        """Whether a limit or a stop has ended the run."""

    def __iter__(self) -> Iterator[Any]:
        self._steps = self._take()
        return self._steps

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, as while a copy is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def close(self) -> None:
        """Count the batch at which the loop was left, where it was left early."""
        if self._steps is not None:
            self._steps.close()
        if self._in_step:
            self._finish()

    def _take(self) -> Generator[Any, None, None]:
        trainer, run = self._trainer, self._trainer.run
        state, clock, stepper = trainer.state, trainer.state.clock, run.stepper
        trainer._go_on_inside_epoch()
        for state.batch, last in trainer._batches(self.loader):
            run.inside_step = self._in_step = True
            state.batch_output = None
            if not stepper.is_simple:
                stepper.begin(last)
            yield state.batch
            if self._finish():
                break
        if not self.ended or clock.batch_in_epoch == run.data.batches_per_epoch:
            clock.next_epoch()

    def _finish(self) -> bool:
        trainer, self._in_step = self._trainer, False
        stepper = trainer.run.stepper
        closes = stepper.window.closes
        if closes and not stepper.is_simple:
            stepper.end()
        self.ended = trainer._finish_batch(closes)
        return self.ended
