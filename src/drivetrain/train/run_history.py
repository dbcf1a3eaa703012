"""The history of a run: metric values with the epoch and step they belong to.

Numbers are stored in arrays (`Series`), and a checkpoint refers to an append-only file of them (`history_file`), so neither
memory nor a save has a Python object for each value.
"""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from drivetrain.core.containers import with_attributes
from drivetrain.core.errors import needs_package, unknown_name, warn
from drivetrain.core.time import Clock
from drivetrain.core.types import StateDict
from drivetrain.record.buffer import PLACES, Arrival, BufferSlot, DeviceBuffer
from drivetrain.train.history_file import DTYPES, HistoryFile, Reference, Series, read_history

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-not-found,import-untyped,unused-ignore]


WIDTH = 80
"""Columns of a printed history."""
ROWS_AT_START, ROWS_AT_END = 3, 7
"""How many rows of a long history are printed."""
_PHASES = ("train_", "eval_", "intermediate_eval_", "evaluation_")
_NOTHING = Series()
Moment = tuple[int, int]
"""When a value was recorded: the epoch, and the number of batches trained on until then, in all runs that the history holds."""


class RunHistory(ABC):
    """The interface of a run's history: named lists of values, and the number of the epoch.

    A metric of an epoch has one value per epoch. An evaluation inside an epoch records metrics of its own, whose names begin with
    `intermediate_eval_`; `get_metric_steps` returns the batch after which each value was recorded.
    """

    @abstractmethod
    def get_metric_names(self) -> Iterable[str]:
        """Return the names of all recorded metrics."""

    @abstractmethod
    def get_metric_values(self, metric_name: str) -> list[Any]:
        """Return all values of a metric, oldest first."""

    @abstractmethod
    def get_latest_metric(self, metric_name: str) -> Any:
        """Return the last value of a metric."""

    @abstractmethod
    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Add a prefix to every name that is recorded from now on."""

    @property
    @abstractmethod
    def metric_name_prefix(self) -> str:
        """The prefix of recorded names."""

    @abstractmethod
    def update_metric(self, metric_name: str, metric_value: object) -> None:
        """Record a value."""

    @abstractmethod
    def delete_metric(self, metric_name: str) -> None:
        """Remove a metric and all its values."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """The epoch in progress, counted from 1."""

    @abstractmethod
    def _increment_epoch(self) -> None:
        """Go to the next epoch."""

    def _set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a resumed run does."""
        while self.current_epoch < epoch:
            self._increment_epoch()
        if self.current_epoch != epoch:
            raise NotImplementedError(
                f"{type(self).__name__} cannot return from epoch {self.current_epoch} to {epoch}; define "
                "_set_epoch(epoch)."
            )

    @abstractmethod
    def reset(self) -> None:
        """Remove all values and return to the first epoch."""

    def get_metric_steps(self, metric_name: str) -> list[int]:
        """Return for each value of a metric the number of batches trained on when it was recorded."""
        return [step for _, step in self._moments(metric_name)]

    def _moments(self, metric_name: str) -> list[Moment]:
        """Return when each value was recorded; a history that does not keep this counts values."""
        return [(count, count) for count, _ in enumerate(self.get_metric_values(metric_name), start=1)]

    def _num_values(self, metric_name: str) -> int:
        """Return how many values a metric has."""
        return len(self.get_metric_values(metric_name)) if metric_name in self.get_metric_names() else 0

    def _counts(self) -> dict[str, int]:
        """Return how many values each metric has."""
        return {name: self._num_values(name) for name in self.get_metric_names()}

    def _follow(self, clock: Clock, starts_over: bool = False) -> None:  # noqa: B027
        """Read the number of batches from this clock, which `starts_over` in a new run; a history that does not keep it ignores this."""

    def snapshot(self) -> "RunHistory":
        """Return a copy that later runs do not change. A class that does not define this returns itself."""
        return self

    # ------------------------------------------------------------------ views: a table, a DataFrame, a picture

    def to_dataframe(self) -> "DataFrame":
        """Return a pandas DataFrame: a row per moment, with its epoch and step, and a column per metric."""
        with needs_package("pandas", None, "history.to_dataframe()"):
            import pandas
        rows = [{name: _plain(value) for name, value in row.items()} for row in self._rows()]
        return pandas.DataFrame(rows, columns=["epoch", "step", *self.get_metric_names()])

    def plot(self, metric_names: Iterable[str] | None = None, path: str | None = None) -> "Figure":
        """Draw metrics over steps with matplotlib, training and evaluation in one plot. With a path, save it as PNG."""
        with needs_package("matplotlib", "demo", "history.plot()"):
            from matplotlib.figure import Figure
        recorded, quantities = list(self.get_metric_names()), dict[str, list[str]]()
        for name in recorded if metric_names is None else metric_names:
            if name not in recorded:
                raise ValueError(unknown_name("metric", name, recorded or ["none recorded yet"], where="run history"))
            quantities.setdefault(_quantity(name), []).append(name)
        figure = Figure(figsize=(7, 3 * max(1, len(quantities))), layout="constrained")
        if not quantities:
            return figure
        for axes, (quantity, members) in zip(figure.subplots(len(quantities), squeeze=False).flat, quantities.items()):
            for name in members:
                values = [_plain(value) for value in self.get_metric_values(name)]
                axes.plot(self.get_metric_steps(name), values, marker="." if len(values) < 50 else None, label=name)
            axes.set(xlabel="step (batches)", ylabel=quantity)
            axes.legend()
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def __repr__(self) -> str:
        """Return a table that fits a terminal: a row per moment, with the middle of a long history omitted."""
        shown: list[dict[str, object] | None] = [*self._rows()]
        hidden, title = len(shown) - ROWS_AT_START - ROWS_AT_END, type(self).__name__
        if not shown:
            return f"{title}: nothing recorded yet"
        if hidden > 1:
            title += f": {len(shown)} rows, {hidden} not shown"
            shown[ROWS_AT_START:-ROWS_AT_END] = [None]
        columns, width, left_out = [], 0, list[str]()
        names = sorted(self.get_metric_names(), key=lambda metric: "intermediate_eval_" in metric)  # epochs first
        for index, name in enumerate(["epoch", "step", *names]):
            cells = [name, *("…" if row is None else format_metric(row.get(name, "")) for row in shown)]
            width += max(map(len, cells)) + 2
            if index > 2 and width > WIDTH:
                left_out = names[index - 2 :]
                break
            columns.append([cell.rjust(max(map(len, cells))) for cell in cells])
        lines = [title, *("  ".join(cells).rstrip() for cells in zip(*columns))]
        if left_out:
            lines.append(f"and {len(left_out)} more: {', '.join(left_out)}")
        return "\n".join(lines)

    def _rows(self) -> list[dict[str, object]]:
        """Return what was recorded, by moment; a metric recorded twice at one moment gets a second row."""
        table: dict[tuple[int, int, int], dict[str, object]] = {}
        for name in self.get_metric_names():
            seen: Counter[Moment] = Counter()
            for moment, value in zip(self._moments(name), self.get_metric_values(name)):
                row = table.setdefault((*moment, seen[moment]), {"epoch": moment[0], "step": moment[1]})
                row[name] = value
                seen[moment] += 1
        return [table[key] for key in sorted(table)]


class InMemoryRunHistory(RunHistory):
    """Keeps everything in memory. Reading never creates a metric, and the prefix applies only to writing.

    A number takes 16 bytes. One in a tensor on an accelerator is copied there, and the host reads it later, together with others; it comes
    back as a tensor on the CPU.

    >>> history = InMemoryRunHistory()
    >>> history.update_metric("train_loss_epoch", 0.5)
    >>> history.get_latest_metric("train_loss_epoch"), history.get_metric_values("accuracy")
    (0.5, [])
    """

    def __init__(self) -> None:
        self._current_epoch = 1
        self._series: dict[str, Series] = {}
        self._prefix = ""
        self._clock: Clock | None = None
        self._batches_before = 0  # of runs before this one
        self._files: dict[Path, HistoryFile] = {}
        self._reference: Reference | None = None  # what a checkpoint that is being saved says about the values
        self._folder: Path | None = None  # where the checkpoint that is being loaded is
        self._buffer: DeviceBuffer | None = None
        self._unread: list[tuple[Series, int, BufferSlot, torch.dtype]] = []
        self._on_the_way: tuple[list[tuple[Series, int, BufferSlot, torch.dtype]], Arrival] | None = None

    def get_metric_names(self) -> Iterable[str]:
        """Return the recorded names as a set that keeps their order."""
        return dict.fromkeys(self._series).keys()

    def get_metric_values(self, metric_name: str) -> list[Any]:
        """Return all values of a metric, oldest first; empty for an unknown name. Waits for values on a device."""
        self._read(wait=True)
        return self._series.get(metric_name, _NOTHING).values()

    def get_latest_metric(self, metric_name: str) -> Any:
        """Return the last value of a metric. Waits for values on a device."""
        self._read(wait=True)
        series = self._series.get(metric_name)
        if series is None:
            names = self.get_metric_names() or ["none recorded yet"]
            raise ValueError(unknown_name("metric", metric_name, names, where="run history"))
        return series.value(len(series) - 1)

    def update_metric(self, metric_name: str, metric_value: object) -> None:
        """Record a value under the prefixed name. This does not wait for a device."""
        name = f"{self._prefix}{metric_name}"
        if (series := self._series.get(name)) is None:
            series = self._series[name] = Series()
        step = self._batches_before + (0 if self._clock is None else self._clock.batch)
        if isinstance(metric_value, Tensor) and _is_device_number(metric_value):
            if self._buffer is None:
                self._buffer = DeviceBuffer()
            self._unread.append((series, len(series), self._buffer.put(metric_value), metric_value.dtype))
            series.append(0.0, self._current_epoch, step)
            if len(self._unread) >= PLACES:
                self._read(wait=False)
        else:
            series.append(metric_value, self._current_epoch, step)

    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Add a prefix to every name that is recorded from now on. `reset` keeps it."""
        self._prefix = prefix

    def delete_metric(self, metric_name: str) -> None:
        if metric_name not in self._series:
            raise KeyError(unknown_name("metric", metric_name, self.get_metric_names(), where="run history"))
        del self._series[metric_name]

    @property
    def metric_name_prefix(self) -> str:
        return self._prefix

    @property
    def current_epoch(self) -> int:
        return self._current_epoch

    def _increment_epoch(self) -> None:
        self._current_epoch += 1

    def _set_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def reset(self) -> None:
        self._current_epoch = 1
        self._series, self._batches_before = {}, 0

    def _moments(self, metric_name: str) -> list[Moment]:
        return self._series.get(metric_name, _NOTHING).moments()

    def _num_values(self, metric_name: str) -> int:
        return len(self._series.get(metric_name, _NOTHING))

    def _follow(self, clock: Clock, starts_over: bool = False) -> None:
        self._clock = clock
        if starts_over:
            self._batches_before = max((max(series.steps) for series in self._series.values()), default=0)

    def snapshot(self) -> Self:
        """Return a copy that later runs do not change."""
        self._read(wait=True)
        copied = copy.copy(self)
        copied._clock = None
        copied._series = {name: series.copy() for name, series in self._series.items()}
        return copied

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy needs; files and buffers belong to this object."""
        self._read(wait=True)
        state = {**self.__dict__, "_buffer": None, "_unread": [], "_on_the_way": None}
        return {**state, "_files": {}, "_reference": None, "_folder": None}

    def state_dict(self) -> StateDict:
        """Return epoch, prefix and values in plain containers. During a checkpoint, return a reference to the file of values."""
        state = {"current_epoch": self._current_epoch, "prefix": self._prefix, "batches_before": self._batches_before}
        if self._reference is not None:
            return {**state, "file": asdict(self._reference)}
        self._read(wait=True)
        return {
            **state,
            "metrics": {name: series.values() for name, series in self._series.items()},
            "recorded_at": {name: series.moments() for name, series in self._series.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the result of `state_dict`, or the file that a checkpoint refers to."""
        if "file" in state:
            series = self._referred(Reference.from_state(state["file"]))
        else:
            series = _series_of(state["metrics"], state.get("recorded_at", {}))
        self._series, self._unread, self._on_the_way = series, [], None
        self._current_epoch, self._prefix = state["current_epoch"], state["prefix"]
        self._batches_before = state.get("batches_before", 0)

    def prepare_side_file(self, folder: Path) -> tuple[Reference, Callable[[], None]]:
        """Return the reference for a checkpoint in this folder, and what must write the values before that becomes valid."""
        self._read(wait=True)
        file = self._files.setdefault(folder.absolute(), HistoryFile(folder.absolute()))
        return file.prepare(self._series), file.commit

    def referring_to(self, reference: Reference) -> AbstractContextManager[None]:
        """Make `state_dict` return a reference instead of values."""
        return with_attributes(self, _reference=reference)

    def reading_from(self, folder: Path) -> AbstractContextManager[None]:
        """Make `load_state_dict` look for the file that a checkpoint in this folder refers to."""
        return with_attributes(self, _folder=folder.absolute())

    def _referred(self, reference: Reference) -> dict[str, Series]:
        folder = self._folder
        series = None if folder is None else read_history(folder, reference)
        if series is None or folder is None:
            where = "it was loaded without its folder" if folder is None else f"which is not in {folder}"
            warn(
                f"the checkpoint keeps its history in {reference.name}, {where}: the history is empty, and everything else is restored. "
                "Copy the file together with its checkpoints."
            )
            return {}
        counts = {name: (values, len(values)) for name, values in series.items()}
        self._files[folder] = HistoryFile(folder, reference.size, reference.name, counts)
        return series

    def _read(self, wait: bool) -> None:
        """Take in values that have arrived from a device, and send those that have collected; `wait` waits for all of them."""
        while self._unread or self._on_the_way is not None:
            if self._on_the_way is None:
                assert self._buffer is not None
                self._on_the_way, self._unread = (self._unread, self._buffer.send()), []
            values, arrival = self._on_the_way
            if wait:
                arrival.wait()
            elif not arrival.is_ready():
                return
            for series, position, slot, dtype in values:
                series.put(position, slot.read(), dtype)
            arrival.release()
            self._on_the_way = None
            if not wait:
                return


def _is_device_number(value: Tensor) -> bool:
    return not value.is_cpu and value.numel() == 1 and value.dtype in DTYPES and not hasattr(value, "full_tensor")


def _series_of(values: Mapping[str, list[object]], moments: Mapping[str, list[Moment]]) -> dict[str, Series]:
    """Return series of plain lists; values without moments are counted."""
    found: dict[str, Series] = {}
    for name, listed in values.items():
        times = moments.get(name, [])
        times = times if len(times) == len(listed) else [(count, count) for count in range(1, len(listed) + 1)]
        if listed:
            found[name] = Series()
        for value, (epoch, step) in zip(listed, times):
            found[name].append(value, epoch, step)
    return found


def format_metric(value: object) -> str:
    """Return a value in readable form: six significant digits, whole numbers in full.

    >>> [format_metric(value) for value in (0.30000001192092896, 1.5e-07, 12345678, 0.1 + 0.2)]
    ['0.3', '1.5e-07', '12345678', '0.3']
    """
    value = _plain(value)
    if isinstance(value, bool | int) or not isinstance(value, Real):
        return str(value)
    number = float(value)
    return f"{number:.0f}" if 1e6 <= abs(number) < 1e15 else f"{number:.6g}"


def _quantity(name: str) -> str:
    """Return what a metric measures, without the phase it was measured in.

    >>> _quantity("train_loss_epoch"), _quantity("intermediate_eval_loss"), _quantity("lr/group0")
    ('loss', 'loss', 'lr/group0')
    """
    phase = next((phase for phase in _PHASES if name.startswith(phase)), "")
    return name.removeprefix(phase).removesuffix("_epoch")


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
