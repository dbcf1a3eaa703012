"""The loss inside an epoch, for loggers: the mean over every few updates, each named loss as a series of its own.

Losses stay on the device. Where a mean is due, sums are added up over the data ranks and divided on the device, and the logbook reads
the quotient when it has arrived. Without a logger none of this is attached to the run.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from drivetrain.core.intervals import Interval
from drivetrain.module.accumulation import Count
from drivetrain.runtime.collectives import all_gather_values, start_agree_any
from drivetrain.runtime.ranks import num_data_ranks
from drivetrain.train import loaders
from drivetrain.train.callbacks.base import TrainerCallback
from drivetrain.train.callbacks.monitors import LRMonitor, learning_rates
from drivetrain.train.items import LossCounting
from drivetrain.train.logbook import Logbook
from drivetrain.train.tracking import LossTracker, load_sums, of_data_ranks


class StepLosses(TrainerCallback):
    """Sends the mean loss of each interval to the loggers, with the learning rates.

    A mean is over the items of all batches of the interval on all data ranks. Of losses that are sums it is the mean over updates.
    """

    def __init__(
        self, interval: Interval, counting: LossCounting, is_padding: Callable[[], bool] | None, plugins: Iterable[Any]
    ):
        self._interval, self._counting, self._is_padding = interval, counting, is_padding
        self._logs_rates = not any(isinstance(plugin, LRMonitor) for plugin in plugins)
        self._means: dict[str, LossTracker] = {}
        self._logged_at = 0  # the number of updates then
        self._shared: set[str] = set()  # the names that all ranks know of
        self._has_new_name: Callable[[], bool] = lambda: True

    def after_loss(self, state: Any, logger: Logbook) -> None:
        """Keep the losses of a batch, or of a micro-batch, by name."""
        output = state.batch_output
        size = 0 if self._is_padding is not None and self._is_padding() else output["batch_size"]
        weight = output.get("num_items", size) if size else 0
        self._keep("loss", state.loss, weight)
        for name, value in (output.get("losses") or state.losses or {}).items():
            if name != "loss" and isinstance(value, Tensor | float | int):
                self._keep(name, value, weight)

    def batch_end(self, state: Any, logger: Logbook) -> None:
        """Log when it is due."""
        if self._interval.due(state.clock):
            metrics: dict[str, Any] = {f"train_{name}_step": mean for name, mean in self._take(state).items()}
            logger.log_step(metrics | (learning_rates(state.optimizers) if self._logs_rates else {}))

    def epoch_end(self, state: Any, logger: Logbook) -> None:
        """Log when an interval in epochs is due."""
        self.batch_end(state, logger)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next mean has of every data rank so far; all ranks must call this."""
        sums = {name: mean.state_dict() for name, mean in self._means.items()}
        return {"interval": self._interval.state_dict(), "logged_at": self._logged_at, "ranks": of_data_ranks(sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the mean of a saved run; on another number of data ranks, the first takes all sums."""
        self._interval.resume(state["interval"])
        self._logged_at = state["logged_at"]
        for name in sorted({name for of_rank in state["ranks"] for name in of_rank}):
            mean = self._means[name] = LossTracker()
            nothing = mean.state_dict()
            load_sums(mean, [of_rank.get(name, nothing) for of_rank in state["ranks"]])

    def _keep(self, name: str, value: Tensor | float, weight: Count) -> None:
        mean = self._means.get(name)
        if mean is None:
            mean = self._means[name] = LossTracker()
        mean.update(value, weight)

    def _take(self, state: Any) -> dict[str, Count]:
        """Return the means since the last time by name, on their device, and start again."""
        if num_data_ranks() > 1:
            self._agree_on_names()
        names = [name for name in self._means if num_data_ranks() == 1 or name in self._shared]
        sums = [value for name in names for value in self._means[name].unread_sums()]
        if num_data_ranks() > 1:
            sums = loaders.sum_over_ranks(sums, state.device)
        updates, self._logged_at = max(1, state.clock.step - self._logged_at), state.clock.step
        for name in names:
            self._means[name].reset()
        found = {name: (sums[2 * k], sums[2 * k + 1]) for k, name in enumerate(names)}
        return {
            name: total / (updates if self._counting.is_sum else count)
            for name, (total, count) in found.items()
            if isinstance(count, Tensor) or count
        }

    def _agree_on_names(self) -> None:
        """Let all ranks add up the same losses; one that is new on some rank keeps its sums until all know of it."""
        if self._has_new_name():
            everywhere = {name for names in all_gather_values(sorted(self._means)) for name in names}
            self._means = {name: self._means.get(name) or LossTracker() for name in sorted(everywhere)}
            self._shared = everywhere
        self._has_new_name = start_agree_any(not self._shared.issuperset(self._means))
