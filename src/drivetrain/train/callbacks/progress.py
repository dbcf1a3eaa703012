"""Progress in the terminal: a bar, or a plain line at intervals, and printed metrics; nothing on other processes.

A step only counts and reads the clock. The display uses values that the host already has: the loss that was last read back, the
learning rate of the first group, the samples counted by the run's clock.
"""

import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO, cast

from torch import Tensor

from drivetrain.context.state import State
from drivetrain.core.arguments import check_number
from drivetrain.core.display import SafeOutput, print_if_possible
from drivetrain.core.plugin import Logger
from drivetrain.runtime.device import AsyncReadback
from drivetrain.runtime.ranks import get_local_rank, num_data_ranks
from drivetrain.train.callbacks.base import TrainerCallback
from drivetrain.train.loaders import length
from drivetrain.train.run import Measures
from drivetrain.train.run_history import format_metric

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from drivetrain.train.trainer import Trainer


class ProgressBarCallback(TrainerCallback):
    """Shows each training and evaluation epoch with loss, learning rate, samples per second and the time left.

    The bar is redrawn at most `refresh_per_second` times a second. When the output is not a terminal, a line is
    printed every `plain_interval` seconds and at the end of each phase. NO_COLOR is respected.
    """

    reads = ("loss", "timestamp")

    def __init__(self, refresh_per_second: float = 4, plain_interval: float = 30):
        self.refresh_per_second = check_number("refresh_per_second", refresh_per_second, above=0)
        self.plain_interval = check_number("plain_interval", plain_interval, above=0)
        self._measures, self._optimizers = Measures(), tuple[Any, ...]()
        self._display: _Display | None = None
        self._phases: list[_Phase] = []  # an evaluation inside an epoch comes after the epoch
        self._epoch_began = 0  # the number of the epoch's first batch in the run
        self._next = float("inf")
        self._readback = AsyncReadback()

    def on_train_epoch_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Start a training epoch at the position of a resumed run."""
        clock, epoch, config = trainer.state.clock, trainer.run_history.current_epoch, trainer.run.config
        name = f"epoch {epoch}"
        if config is not None and config.num_epochs is not None:
            earlier = epoch - 1 - clock.epoch  # epochs of runs before this one that the history still holds
            name += f"/{config.num_epochs + earlier}"
        self._epoch_began = clock.batch - clock.batch_in_epoch
        self._begin(trainer, _Phase(name, length(trainer.run.data.train), clock.batch_in_epoch, clock.sample))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count a training batch, and refresh the display if it is due."""
        if time.perf_counter() < self._next:
            return
        phase = self._phases[-1]
        phase.done, phase.samples = state.clock.batch - self._epoch_began, state.clock.sample
        self._show(phase)

    def on_train_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        if self._phases:
            phase, clock = self._phases[-1], trainer.state.clock
            phase.done, phase.samples = clock.batch - self._epoch_began, clock.sample
            self._end(phase)

    def on_eval_epoch_start(self, trainer: "Trainer", **kwargs: object) -> None:
        state = trainer.state
        name = "evaluation" if state.dataloader_label == "eval" else f"evaluation on {state.dataloader_label}"
        self._begin(trainer, _Phase(name, length(state.dataloader), 0, 0, trains=False))

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Count an evaluation batch, and refresh the display if it is due."""
        if not self._phases:
            return
        phase = self._phases[-1]
        phase.done += 1
        size = state.batch_output["batch_size"]
        phase.samples += size * num_data_ranks() if isinstance(size, int) else 0
        if time.perf_counter() >= self._next:
            self._show(phase)

    def on_eval_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        if self._phases:
            self._end(self._phases[-1])

    def close(self, *_: object, **kwargs: object) -> None:
        """Restore the terminal, also after a stop or an error."""
        if self._display is not None:
            self._display.close()
        self._display, self._next = None, float("inf")
        self._phases.clear()

    on_training_run_end = on_stop_training_error = on_exception = close

    def _begin(self, trainer: "Trainer", phase: "_Phase") -> None:
        if get_local_rank() != 0:
            return
        self._measures, self._optimizers = trainer.run.measures, trainer.state.optimizers
        self._phases.append(phase)
        if self._display is None:
            self._display = _make_display()
        self._display.begin(phase)
        self._wait()

    def _show(self, phase: "_Phase") -> None:
        if self._display is not None:
            self._request_loss(phase)
            self._display.draw(phase, self._figures(phase))
        self._wait()

    def _end(self, phase: "_Phase") -> None:
        if self._display is not None:
            self._request_loss(phase)
            self._take(self._readback.drain())
            self._display.draw(phase, self._figures(phase), is_end=True)
        self._phases.pop()
        if not self._phases:
            self.close()
        else:
            self._phases[-1].started += phase.seconds()  # an epoch's speed is that of its own batches
            self._wait()

    def _wait(self) -> None:
        has_bars = isinstance(self._display, _BarDisplay)
        self._next = time.perf_counter() + (1 / self.refresh_per_second if has_bars else self.plain_interval)

    def _request_loss(self, phase: "_Phase") -> None:
        """Request the newest loss where it is on a device; it is shown when it has arrived, and nothing waits for it."""
        self._take(self._readback.poll())
        unread = self._measures.tracker.unread if phase.trains else None
        if unread is not None and self._readback.is_idle:
            self._readback.push(unread)

    def _take(self, values: list[tuple[object, float]]) -> None:
        for _, value in values:
            self._measures.tracker.latest_known = value

    def _figures(self, phase: "_Phase") -> str:
        """Return loss, learning rate and speed as a short text."""
        loss = self._measures.tracker.latest_known
        figures = [] if loss is None else [f"loss {loss:.4g}"]
        groups = getattr(self._optimizers[0], "param_groups", None) if self._optimizers and phase.trains else None
        rate = groups[0].get("lr") if isinstance(groups, list) and groups else None
        is_on_device = isinstance(rate, Tensor) and rate.device.type != "cpu"  # reading it would make the host wait
        if rate is not None and not is_on_device:
            figures.append(f"lr {float(rate):.3g}")
        if speed := phase.samples_per_second():
            figures.append(f"{_short(speed)} samples/s")
        return "  ".join(figures)


class _Phase:
    """One epoch of training or evaluation: its name, how far it is, and since when."""

    def __init__(self, name: str, total: int | None, done: int, samples: int, trains: bool = True):
        self.name, self.total, self.done, self.samples, self.trains = name, total, done, samples, trains
        self.first, self.first_sample = done, samples
        self.started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def samples_per_second(self) -> float:
        return (self.samples - self.first_sample) / max(self.seconds(), 1e-9)

    def seconds_left(self) -> float | None:
        here = self.done - self.first
        return None if self.total is None or here <= 0 else self.seconds() / here * (self.total - self.done)


class _Display:
    """Plain lines: for a file, a pipe or a scheduler's log."""

    def begin(self, phase: _Phase) -> None:
        """Print nothing yet."""

    def draw(self, phase: _Phase, figures: str, is_end: bool = False) -> None:
        """Print one line, with the time left or, at the end, the time it took."""
        left, when = phase.seconds_left(), ""
        if is_end:
            when = f"took {_clock(phase.seconds())}"
        elif left is not None:
            when = f"{_clock(left)} left"
        of = f"{phase.done}/{phase.total}" if phase.total is not None else str(phase.done)
        print_if_possible("  ".join(part for part in (phase.name, of, figures, when) if part), flush=True)

    def close(self) -> None:
        """Nothing to close."""


class _BarDisplay(_Display):
    """One live display of `rich` with a bar for each phase that is open."""

    def __init__(self, console: "Console"):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self._progress = Progress(
            "{task.description}",
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[times]}", style="progress.elapsed"),
            TextColumn("{task.fields[figures]}", style="progress.data.speed"),
            console=console,
            auto_refresh=False,  # no second thread: a step redraws when it is time
            expand=True,
        )
        self._tasks: dict[int, TaskID] = {}
        self._progress.start()

    def begin(self, phase: _Phase) -> None:
        self._tasks[id(phase)] = self._progress.add_task(
            phase.name, total=phase.total, completed=phase.done, times="", figures=""
        )
        self._progress.refresh()

    def draw(self, phase: _Phase, figures: str, is_end: bool = False) -> None:
        """Redraw the bar. At its end a bar above another one is removed."""
        left, times = phase.seconds_left(), _clock(phase.seconds())
        if left is not None and not is_end:
            times += f" < {_clock(left)}"
        task = self._tasks[id(phase)]
        self._progress.update(task, completed=phase.done, times=times, figures=figures, refresh=True)
        if is_end:
            del self._tasks[id(phase)]
            if self._tasks:
                self._progress.remove_task(task)

    def close(self) -> None:
        self._progress.stop()


def _make_display() -> _Display:
    """Return bars on a terminal, else plain lines."""
    if sys.stdout is None:
        return _Display()
    from rich.console import Console

    console = Console(file=cast(TextIO, SafeOutput(sys.stdout)))
    has_bars = console.is_terminal and not console.is_dumb_terminal
    if console.is_jupyter:  # rich draws bars there with ipywidgets, and nothing at all without
        has_bars = find_spec("ipywidgets") is not None
    return _BarDisplay(console) if has_bars else _Display()


def _short(number: float) -> str:
    """Return a number with three digits and a unit: 950, 1.24k, 31.2k, 4.1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _clock(seconds: float) -> str:
    """Return seconds as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class LogMetricsCallback(TrainerCallback):
    """Prints the latest metrics: those of training after the training epoch, all others after an evaluation.

    Override `log_metrics` to send them somewhere else.
    """

    _recorded_before: Mapping[str, int] = {}

    def on_train_epoch_end(self, trainer: "Trainer", **kwargs: object) -> None:
        self._log(trainer, [name for name in trainer.run_history.get_metric_names() if name.startswith("train")])

    def on_eval_epoch_start(self, trainer: "Trainer", **kwargs: object) -> None:
        """Record which metrics existed before this evaluation."""
        self._recorded_before = trainer.run_history._counts()

    def on_eval_epoch_end(self, trainer: "Trainer", is_intermediate: bool = False, **kwargs: object) -> None:
        """Print the other metrics. For an evaluation inside an epoch, or one of several evaluation sets, print only its own."""
        counts = {name: count for name, count in trainer.run_history._counts().items() if not name.startswith("train")}
        if is_intermediate or trainer.state.dataloader_label != "eval":
            self._log(trainer, [name for name in counts if counts[name] != self._recorded_before.get(name, 0)])
        else:
            self._log(trainer, [name for name in counts if "intermediate_eval_" not in name])

    def log_metrics(self, trainer: "Trainer", metrics: Mapping[str, object]) -> None:
        """Print each metric once per node."""
        for name, value in metrics.items():
            trainer.print(f"{name}: {format_metric(value)}")

    def _log(self, trainer: "Trainer", names: list[str]) -> None:
        self.log_metrics(trainer, {name: trainer.run_history.get_latest_metric(name) for name in names})


class PrintProgressCallback(TrainerCallback):
    """Prints when runs and epochs begin and end."""

    def on_training_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        trainer.print("Starting training run")

    def on_train_epoch_start(self, trainer: "Trainer", **kwargs: object) -> None:
        trainer.print(f"\nStarting epoch {trainer.run_history.current_epoch}")

    def on_eval_epoch_start(self, trainer: "Trainer", **kwargs: object) -> None:
        label = trainer.state.dataloader_label
        trainer.print("Starting evaluation" if label == "eval" else f"Starting evaluation on {label}")

    def on_training_run_end(self, trainer: "Trainer", **kwargs: object) -> None:
        trainer.print("\nFinishing training run")

    def on_evaluation_run_start(self, trainer: "Trainer", **kwargs: object) -> None:
        trainer.print("Starting evaluation run")

    def on_evaluation_run_end(self, trainer: "Trainer", **kwargs: object) -> None:
        trainer.print("Finishing evaluation run")
