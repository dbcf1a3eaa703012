"""The stream of metrics: what is recorded reaches the run history and every logger.

Algorithms and monitors call `log_metrics`; epoch means come through `record`. A logger is any object with `log_metrics(metrics,
step=...)`, or a sink with `scalar(tag, value)` such as the `Recorder`. `StepLosses` sends means inside an epoch: losses stay on
the device, sums are computed over the data ranks there, and the logbook reads the quotient when it has arrived.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.context.state import State
from drivetrain.core.time import Clock, Interval
from drivetrain.core.types import StateDict
from drivetrain.module.accumulation import Count
from drivetrain.runtime.collectives import all_gather_values, start_agree_any
from drivetrain.runtime.device import AsyncReadback
from drivetrain.runtime.hangs import RankWatch, hang_limit
from drivetrain.runtime.ranks import get_num_processes, num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.train.agreement import Agreement
from drivetrain.train.callbacks.base import TrainerCallback
from drivetrain.train.callbacks.monitors import LRMonitor, learning_rates
from drivetrain.train.items import LossCounting
from drivetrain.train.run_history import RunHistory
from drivetrain.train.tracking import LossTracker, load_means, of_data_ranks, sum_over_ranks

if TYPE_CHECKING:
    from drivetrain.train.run import Run


class Logbook:
    """Writes to the run history and the loggers of one trainer."""

    def __init__(self, history: RunHistory, clock: Clock, loggers: Collection[Any]):
        run = current_run()
        recorder = None if run is None else run.recorder  # inside an experiment metrics go to its recorder too
        self.history = history  # where values are recorded; another one may take its place
        self._clock = clock
        self._readback = AsyncReadback()
        self._arriving: dict[str, float] = {}
        self.loggers = [*loggers, *([recorder] if recorder is not None and recorder not in loggers else [])]

    def record(self, name: str, value: object) -> None:
        """Record one value of an epoch: in the history under its prefixed name, and with every logger."""
        self.wait_for_steps()
        self.history.update_metric(name, value)
        self._send({f"{self.history.metric_name_prefix}{name}": value})

    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Record current values. Tensors stay on the device until a logger reads them."""
        for name, value in metrics.items():
            self.history.update_metric(name, value.detach() if isinstance(value, Tensor) else value)
        self._send(metrics, step)

    def log_step(self, metrics: Mapping[str, Count]) -> None:
        """Send values of one step to the loggers only: a history of every step would grow without limit.

        A sink reads a device by itself, later. Any other logger gets numbers, with their step, when they have arrived.
        """
        step = self._clock.batch
        sinks = [logger for logger in self.loggers if hasattr(logger, "scalar")]
        self._send(metrics, step, sinks)
        if len(sinks) < len(self.loggers):
            self._readback.max_lag = 2 * len(metrics)
            for place, (name, value) in enumerate(metrics.items(), start=1):
                self._readback.push(value, (step, name, place == len(metrics)))
            self._deliver(self._readback.poll())

    def wait_for_steps(self) -> None:
        """Send pending values to the loggers. This synchronizes the host."""
        self._deliver(self._readback.drain())

    def _deliver(self, arrived: list[tuple[Any, float]]) -> None:
        for (step, name, is_last), value in arrived:
            self._arriving[name] = value
            if is_last:
                metrics, self._arriving = self._arriving, {}
                self._send(metrics, step, [logger for logger in self.loggers if not hasattr(logger, "scalar")])

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """Send the settings of the run to the loggers."""
        for logger in self.loggers:
            for method in ("log_hyperparameters", "params"):
                if hasattr(logger, method):
                    getattr(logger, method)(dict(hyperparameters))
                    break

    def log_images(self, images: object, name: str = "images", step: int | None = None) -> None:
        """Send images to the loggers that support them."""
        for logger in self.loggers:
            if hasattr(logger, "log_images"):
                logger.log_images(images, name=name, step=step)
            elif hasattr(logger, "image"):
                logger.image(name, images)

    def flush(self) -> None:
        """Flush every logger."""
        self.wait_for_steps()
        for logger in self.loggers:
            if callable(getattr(logger, "flush", None)):
                logger.flush()

    def _send(
        self, metrics: Mapping[str, object], step: int | None = None, loggers: Collection[object] | None = None
    ) -> None:
        loggers = self.loggers if loggers is None else loggers
        if not loggers:
            return
        step = self._clock.batch if step is None else step
        for logger in loggers:
            if hasattr(logger, "log_metrics"):
                logger.log_metrics(dict(metrics), step=step)
            elif hasattr(logger, "scalar"):
                if hasattr(logger, "count"):
                    logger.count = step
                for name, value in metrics.items():
                    logger.scalar(name, value)


class StepLosses(TrainerCallback):
    """Sends the mean loss of each interval to the loggers, with the learning rates.

    A mean is over the items of all batches of the interval on all data ranks. Of losses that are sums it is the mean over updates.
    """

    reads = ("loss", "timestamp")

    def __init__(
        self,
        interval: Interval,
        counting: LossCounting,
        is_padding: Callable[[], bool] | None,
        plugins: Iterable[object],
    ):
        self._interval, self._counting, self._is_padding = interval, counting, is_padding
        self._logs_rates = not any(isinstance(plugin, LRMonitor) for plugin in plugins)
        self._means: dict[str, LossTracker] = {}
        self._logged_at = 0  # the number of updates then
        self._shared: set[str] = set()  # the names that all ranks know of
        self._has_new_name: Callable[[], bool] = lambda: True

    def after_loss(self, state: State, logger: Logbook) -> None:
        """Add the losses of a batch, or of a micro-batch, by name."""
        output = state.batch_output
        size = 0 if self._is_padding is not None and self._is_padding() else output["batch_size"]
        weight = output.get("num_items", size) if size else 0
        self._keep("loss", state.loss, weight)
        for name, value in (output.get("losses") or state.losses or {}).items():
            if name != "loss" and isinstance(value, Tensor | float | int):
                self._keep(name, value, weight)

    def batch_end(self, state: State, logger: Logbook) -> None:
        """Log when it is due."""
        if self._interval.due(state.clock):
            metrics: dict[str, Count] = {f"train_{name}_step": mean for name, mean in self._take(state).items()}
            logger.log_step(metrics | (learning_rates(state.optimizers) if self._logs_rates else {}))

    epoch_end = batch_end  # for an interval in epochs

    def state_dict(self) -> StateDict:
        """Return the partial sums of every data rank. All ranks must call this."""
        sums = {name: mean.state_dict() for name, mean in self._means.items()}
        return {"interval": self._interval.state_dict(), "logged_at": self._logged_at, "ranks": of_data_ranks(sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the mean of a saved run. On another number of data ranks, the first takes all sums."""
        self._interval.resume(state["interval"])
        self._logged_at = state["logged_at"]
        self._means = load_means(state["ranks"])

    def _keep(self, name: str, value: Tensor | float, weight: Count) -> None:
        mean = self._means.get(name)
        if mean is None:
            mean = self._means[name] = LossTracker()
        mean.update(value, weight)

    def _take(self, state: State) -> dict[str, Count]:
        """Return the means since the last time by name, on their device, and start again."""
        if num_data_ranks() > 1:
            self._agree_on_names()
        names = [name for name in self._means if num_data_ranks() == 1 or name in self._shared]
        sums = [value for name in names for value in self._means[name].unread_sums()]
        if num_data_ranks() > 1:
            sums = sum_over_ranks(sums, state.device)
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


# ---------------------------------------------------------------------- the watch over ranks
# What a run shows to `runtime/hangs.py`: how far it is, and how long this rank's own part of a step takes.

SAMPLED = 10
"""On a CUDA device every tenth batch is timed there too, since the host runs ahead of it."""


class StepTimes(TrainerCallback):
    """Measures a step up to its backward pass: the wait for data and the forward pass, before ranks wait for each other.

    After the backward pass the steps of all ranks have taken equally long. Sharded parameters are gathered during the forward pass, so
    with them only the wait for data is a rank's own.
    """

    reads = ("timestamp",)

    def __init__(self, clock: Clock, agreement: Agreement, device: torch.device | str):
        self._clock, self._agreement = clock, agreement
        self._on_cuda = torch.device(device).type == "cuda"
        self._began: float | None = None
        self._own: float | None = None
        self._totals = (0, 0.0, 0.0)  # replaced as a whole, because another thread reads it
        self._begins_on_device: torch.cuda.Event | None = None
        self._on_its_way: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._own_on_device = 0.0
        self.watch: RankWatch | None = None

    def before_dataloader(self, state: object, logger: object) -> None:
        """Start a step. Time between two steps belongs to neither."""
        self._began, self._own = perf_counter(), None
        if self._on_cuda and self._clock.batch % SAMPLED == 0 and self._on_its_way is None:
            self._begins_on_device = torch.cuda.Event(enable_timing=True)
            self._begins_on_device.record()

    def before_backward(self, state: object, logger: object) -> None:
        """End this rank's own part at the first backward pass of the step."""
        if self._own is None and self._began is not None:
            self._own = perf_counter() - self._began
            if self._begins_on_device is not None:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                self._on_its_way, self._begins_on_device = (self._begins_on_device, end), None

    def batch_end(self, state: State, logger: Logbook) -> None:
        """Count the step, and record a slow rank that the watch has found."""
        if self._began is not None and self._own is not None:
            if self._on_its_way is not None and self._on_its_way[1].query():  # does not wait
                begin, end = self._on_its_way
                self._own_on_device, self._on_its_way = begin.elapsed_time(end) / 1000, None
            batches, own, whole = self._totals
            seconds = max(self._own, self._own_on_device)
            self._totals = (batches + 1, own + seconds, whole + perf_counter() - self._began)
        watch = self.watch
        if watch is not None and (slow := watch.straggler) is not None:
            watch.straggler = None
            logger.log_step({"straggler/rank": slow.rank, "straggler/delay": slow.seconds - slow.others})

    def position(self) -> tuple[int, ...]:
        """Return the batch and, on several processes, the number of votes; each evaluation batch has one."""
        vote = self._agreement.vote
        return self._clock.batch, self._clock.epoch, 0 if vote is None else vote.count

    def describe(self) -> str:
        """Return where the run is."""
        clock = self._clock
        return f"epoch {clock.epoch}, batch {clock.batch} of the run ({clock.batch_in_epoch} of the epoch)"

    def times(self) -> tuple[int, float, float]:
        """Return the number of batches, the seconds of this rank's own part of them, and all their seconds."""
        return self._totals


@contextmanager
def watched_ranks(
    run: "Run", clock: Clock, device: torch.device | str, update_plugins: Callable[[], object]
) -> Iterator[None]:
    """Watch a run for a rank that hangs. On several processes also time the steps, to find a slow one."""
    given = run.require_settings().hang_timeout
    times = StepTimes(clock, run.agreement, device)
    watch = RankWatch(times, hang_limit(None if given is None else float(given.value)))
    if get_num_processes() > 1:
        times.watch, run.measures.step_times = watch, times
        update_plugins()
    try:
        with watch:
            yield
    finally:
        run.measures.step_times = None
