"""Callbacks that stop a run or skip updates: no progress, a loss that is not a number, a loss that jumps."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from drivetrain.context.state import State
from drivetrain.core.arguments import check_choice, check_count, check_number
from drivetrain.core.errors import NonFiniteLossError, StopTrainingError
from drivetrain.core.plugin import Logger
from drivetrain.core.types import StateDict
from drivetrain.module.finite import StepGuard
from drivetrain.runtime.device import AsyncReadback
from drivetrain.runtime.ranks import is_distributed
from drivetrain.train.batches import BatchOutput
from drivetrain.train.callbacks.base import TrainerCallback, is_fresh_run
from drivetrain.train.run_history import format_metric
from drivetrain.train.tracking import MetricWatch

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


@dataclass(eq=False, repr=False)
class EarlyStoppingCallback(TrainerCallback):
    """Stops when a metric has not improved by more than a threshold for some epochs.

    An improvement is measured against the best value so far, and a NaN is none. Where `eval_interval` evaluates inside epochs, patience
    counts those evaluations too.

    Args:
        early_stopping_patience: evaluations without improvement after which the run ends.
        early_stopping_threshold: the least improvement that counts.
        watch_metric: a name in the history, such as `"eval_accuracy_epoch"`.
        greater_is_better: whether the metric should grow.
        reset_on_train: forget the best value when `train()` starts.

    >>> EarlyStoppingCallback(3, watch_metric="eval_accuracy_epoch", greater_is_better=True).early_stopping_patience
    3
    """

    early_stopping_patience: int = 1
    early_stopping_threshold: float = 0.01
    watch_metric: str = "eval_loss_epoch"
    greater_is_better: bool = False
    reset_on_train: bool = True

    def __post_init__(self) -> None:
        check_number("early_stopping_patience", self.early_stopping_patience, at_least=1, infinite=True)
        check_number("early_stopping_threshold", self.early_stopping_threshold, at_least=0)
        self.early_stopping_patience_counter = 0
        self._watch = MetricWatch(self.watch_metric, self.greater_is_better)

    @property
    def best_metric(self) -> float | None:
        """The best value so far."""
        return self._watch.best

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Reset the count, unless the run is resumed."""
        forget = self.reset_on_train and is_fresh_run(trainer)
        self._watch.start(trainer.run_history, forget)
        if forget:
            self.early_stopping_patience_counter = 0

    def on_training_run_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Compare the latest value and stop if patience is exhausted."""
        self._compare(trainer, self._watch.new_value(trainer))

    def on_intermediate_evaluation_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Do the same with the value of an evaluation inside an epoch."""
        self._compare(trainer, self._watch.new_value(trainer, inside_epoch=True))

    def _compare(self, trainer: "Trainer", value: float | None) -> None:
        if value is None:
            return
        if self._watch.improvement(value) > self.early_stopping_threshold:
            self._watch.best, self.early_stopping_patience_counter = value, 0
            return
        self.early_stopping_patience_counter += 1
        count, patience = self.early_stopping_patience_counter, self.early_stopping_patience
        best = format_metric(self.best_metric)
        trainer.print(
            f"No improvement of {self.watch_metric}: {format_metric(value)}, best {best} ({count} of {patience})"
        )
        if count >= patience:
            raise StopTrainingError(
                f"{self.watch_metric} did not improve by more than {self.early_stopping_threshold} for {patience} "
                f"evaluations; the best value was {best}."
            )

    def state_dict(self) -> StateDict:
        return {"watch": self._watch.state_dict(), "counter": self.early_stopping_patience_counter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(state["watch"])
        self.early_stopping_patience_counter = state["counter"]


class TerminateOnNaNCallback(TrainerCallback):
    """Ends the run cleanly when a loss is NaN or infinite.

    On a CPU the loss is tested at once, before its backward. On a device it is read back without waiting and the answer
    is at most two steps late. What was read is also what the progress bar shows.
    """

    reads = ("loss",)

    def __init__(self, action: str = "raise"):
        self.action = check_choice("action", action, ("raise", "stop"), owner="TerminateOnNaNCallback")
        self.triggered = False
        self._readback = AsyncReadback()

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Start without pending losses."""
        self._trainer, self.triggered, self._readback = trainer, False, AsyncReadback()

    on_evaluation_run_start = on_training_run_start

    def after_loss(self, state: State, logger: Logger) -> None:
        self.check_for_nan_after_batch({"loss": state.loss}, step="training")

    def on_eval_step_end(self, trainer: "Trainer", batch: object, batch_output: BatchOutput, **kwargs: object) -> None:
        self._trainer = trainer
        self.check_for_nan_after_batch(batch_output, step="validation")

    def on_train_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        """Test the last losses of an epoch or an evaluation. Its mean has just been read, so this does not wait."""
        self._inspect(self._readback.drain())

    on_eval_epoch_end = on_train_epoch_end

    def check_for_nan_after_batch(self, batch_output: BatchOutput, step: str | None = None) -> None:
        """Send the loss to the host, and test those that have arrived."""
        loss = batch_output["loss"]
        if isinstance(loss, Tensor):
            if loss.ndim:
                loss = loss.detach().sum()  # not finite if any entry is not
            if loss.is_cpu and math.isfinite(loss.item()):
                return
        trainer, epoch, batch = self._trainer, None, None
        if trainer is not None:
            epoch, batch = trainer.run_history.current_epoch, trainer.state.clock.batch_in_epoch
        self._readback.push(loss, (step or "", epoch, batch))
        self._inspect(self._readback.poll())

    def _inspect(self, arrived: Iterable[tuple[tuple[str, int | None, int | None], float]]) -> None:
        for (where, epoch, step), value in arrived:
            if not math.isfinite(value):
                self._terminate(value, where, epoch, step)
            if where == "training" and self._trainer is not None:
                self._trainer.run.measures.tracker.latest_known = value

    def _terminate(self, value: float, where: str, epoch: int | None, step: int | None) -> None:
        self.triggered, self._readback = True, AsyncReadback()
        message = f"the loss is {value}" + (f" in {where}" if where else "")
        if where and epoch is not None:
            message += f", epoch {epoch}, batch {step}"
        if self.action == "stop":
            raise StopTrainingError(f"{message}.")
        last = getattr(self._trainer, "last_checkpoint", None)
        advice = f" The last checkpoint is {last}." if last is not None else ""
        raise NonFiniteLossError(
            f"{message}. Usual causes: a learning rate that is too high, float16 without scaling, an empty or masked-out batch, a log "
            f"or division of zero.{advice}",
            step=step,
            epoch=epoch,
            where=where or None,
            last_checkpoint=None if last is None else str(last),
        )


_NORMAL = 0.6745  # the median absolute deviation of a standard normal distribution
_LEAST_DEVIATION = 1e-3  # of the median: losses that hardly differ are not spikes of each other


class LossSpike(TrainerCallback):
    """Skips updates whose loss is more than `threshold` robust standard deviations above the median of the last `window` losses.

    Median and median absolute deviation are not moved by a few outliers. Large runs have such spikes even with clipped gradients,
    and recover from an earlier state with other batches (Chowdhery et al., 2022, section 5.1).

    `action="skip"` skips the update, `"rollback"` also returns to the last good state and skips the next `pass_over` batches.
    The loss is the mean over all ranks, so all of them decide alike. Each spike is recorded in the history as `loss_spike`. Spikes count
    towards the limit of consecutive skipped updates (`train(nonfinite=...)`), so a loss that stays high ends the run.
    """

    reads = ("loss",)

    rejects_batches = True

    def __init__(
        self,
        threshold: float = 8.0,
        window: int = 100,
        min_losses: int = 20,
        action: Literal["skip", "rollback"] = "skip",
        pass_over: int = 0,
    ):
        self.threshold = check_number("threshold", threshold, above=0, owner="LossSpike")
        self.window = check_count("window", window, owner="LossSpike")
        self.min_losses = check_count("min_losses", min_losses, at_least=2, owner="LossSpike")
        self.action = check_choice("action", action, ("skip", "rollback"), owner="LossSpike")
        self.pass_over = check_count("pass_over", pass_over, at_least=0, owner="LossSpike")
        self.guard: StepGuard | None = None
        """What skips updates; the Trainer sets it before its loop."""
        self.losses: deque[float] = deque(maxlen=window)
        self._limit = math.inf
        self._readback = AsyncReadback()

    @property
    def rolls_back(self) -> bool:
        """Whether a spike returns the run to the last good state."""
        return self.action == "rollback"

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Start without pending losses. A resumed run keeps its statistics."""
        self._trainer, self._readback = trainer, AsyncReadback()
        if is_fresh_run(trainer):
            self.losses.clear()
        self._limit = self._find_limit()

    def after_loss(self, state: State, logger: Logger) -> None:
        """Compare the loss with the limit before its backward pass. This does not synchronize an accelerator."""
        if self.guard is None:
            return
        loss = state.loss.detach()
        loss = loss.mean() if loss.ndim else loss
        if is_distributed():
            import torch.distributed as dist

            loss = loss.clone()
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        if loss.is_cpu:
            value = loss.item()
            self.guard.reject(value > self._limit)
            self._take(value, self._limit, state.clock.batch + 1)
            return
        if math.isfinite(self._limit):
            self.guard.reject(loss > self._limit)
        self._readback.push(loss, (self._limit, state.clock.batch + 1))
        for (limit, batch), value in self._readback.overdue():
            self._take(value, limit, batch)

    def state_dict(self) -> StateDict:
        """Return the losses that the next one is compared with."""
        for (limit, batch), value in self._readback.drain():
            self._take(value, limit, batch)
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.window)
        self._limit = self._find_limit()

    def _take(self, value: float, limit: float, batch: int) -> None:
        """Take a loss into the statistics, or record it as a spike."""
        if not math.isfinite(value):
            return  # the guard's own test
        if value <= limit:
            self.losses.append(value)
            self._limit = self._find_limit()
            return
        assert self.guard is not None
        if self.rolls_back:
            self.guard.batches_to_skip = self.pass_over
        if self._trainer is not None:
            self._trainer.run_history.update_metric("loss_spike", value)
            self._trainer.print(f"batch {batch}: the loss {value:.6g} is a spike; the limit is {limit:.6g}.")

    def _find_limit(self) -> float:
        if len(self.losses) < min(self.min_losses, self.window):
            return math.inf
        middle = median(self.losses)
        deviation = median(abs(loss - middle) for loss in self.losses)
        return middle + self.threshold * max(deviation, _LEAST_DEVIATION * abs(middle)) / _NORMAL
