"""LossSpike: batches whose loss jumps far above the usual are not trained on.

How far is usual is measured by the median of recent losses and their median absolute deviation, which a few outliers do not move.
Large runs meet such spikes even with clipped gradients, and go on well from an earlier state with other batches (Chowdhery et al., 2022,
section 5.1).
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from drivetrain.core.arguments import check_choice, check_count, check_number
from drivetrain.module.finite import StepGuard
from drivetrain.runtime.ranks import is_distributed
from drivetrain.runtime.readback import AsyncReadback
from drivetrain.train.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer

_NORMAL = 0.6745  # the median absolute deviation of a standard normal distribution
_LEAST_DEVIATION = 1e-3  # of the median: losses that hardly differ are not spikes of each other


class LossSpike(TrainerCallback):
    """Leaves out updates whose loss lies more than `threshold` robust standard deviations above the median of the last `window` losses.

    `action="skip"` leaves the update out, `"rollback"` also returns to the last good state and passes over the next `pass_over` batches.
    The loss is the mean over all ranks, so all of them decide alike. Each spike is recorded in the history as `loss_spike`. Spikes count
    towards the limit of updates left out in a row (`train(nonfinite=...)`), so a loss that stays high ends the run.
    """

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
        """What leaves updates out; the Trainer sets it before its loop."""
        self.losses: deque[float] = deque(maxlen=window)
        self._limit = math.inf
        self._readback = AsyncReadback()

    @property
    def rolls_back(self) -> bool:
        """Whether a spike returns the run to the last good state."""
        return self.action == "rollback"

    def on_training_run_start(self, trainer: "Trainer", **kwargs: Any) -> None:
        """Begin with nothing on its way; the statistics of a resumed run go on."""
        self._trainer, self._readback = trainer, AsyncReadback()
        if trainer.state.clock.batch == 0:
            self.losses.clear()
        self._limit = self._find_limit()

    def after_loss(self, state: Any, logger: Any) -> None:
        """Compare the loss with the limit before its backward pass; on an accelerator nothing is waited for."""
        if self.guard is None:
            return
        loss = _mean_over_ranks(state.loss.detach())
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

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that the next one is compared with."""
        for (limit, batch), value in self._readback.drain():
            self._take(value, limit, batch)
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
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
            self.guard.to_pass_over = self.pass_over
        if self._trainer is not None:
            self._trainer.run_history.update_metric("loss_spike", value)
            self._trainer.print(f"batch {batch}: the loss {value:.6g} is a spike; the limit is {limit:.6g}.")

    def _find_limit(self) -> float:
        if len(self.losses) < min(self.min_losses, self.window):
            return math.inf
        middle = median(self.losses)
        deviation = median(abs(loss - middle) for loss in self.losses)
        return middle + self.threshold * max(deviation, _LEAST_DEVIATION * abs(middle)) / _NORMAL


def _mean_over_ranks(loss: Tensor) -> Tensor:
    if loss.ndim:
        loss = loss.mean()
    if not is_distributed():
        return loss
    import torch.distributed as dist

    total = loss.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
