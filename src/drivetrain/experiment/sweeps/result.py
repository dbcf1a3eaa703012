"""What a sweep found: its trials, the best one, those that failed, as a table, a CSV file and a picture."""

import csv
import functools
import io
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.core.display import aligned, printable, shortened, spreadsheet_cell
from drivetrain.core.errors import ExperimentError, needs_package
from drivetrain.core.files import PRIVATE_FILE, atomic_write
from drivetrain.core.plain import plain
from drivetrain.core.types import Settings
from drivetrain.experiment.sweeps.trial import (
    FAILED,
    INTERRUPTED,
    RUNNING,
    TIMED_OUT,
    Trial,
    read_journal,
    without_secrets,
)

OWN_COLUMNS = ("trial", "status", "value", "seconds", "attempts", "run", "error")
"""Columns of every result."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a sweep looks for: one objective or several, each with its direction."""

    names: tuple[str, ...] = ()
    """Entries of the returned dict, or of the Recorder's summary; none: the returned number."""
    directions: tuple[str, ...] = ("min",)

    @property
    def is_single(self) -> bool:
        """Whether trials can be ranked by one number."""
        return len(self.directions) == 1

    @property
    def is_consistent(self) -> bool:
        """Whether each objective has one direction that is known; a damaged journal may hold anything."""
        return len(self.directions) == max(1, len(self.names)) and {*self.directions} <= {"min", "max"}

    @property
    def as_data(self) -> dict[str, str | list[str] | None]:
        """What a journal holds: text for one objective, lists for several."""
        if self.is_single:
            return {"objective": self.names[0] if self.names else None, "direction": self.directions[0]}
        return {"objective": list(self.names), "direction": list(self.directions)}

    @classmethod
    def from_data(cls, objective: object, direction: object) -> "Goal":
        """Return the goal that a journal holds."""
        as_tuple = lambda given: tuple(map(str, given)) if isinstance(given, list | tuple) else (str(given),)
        return cls(names=() if objective is None else as_tuple(objective), directions=as_tuple(direction or "min"))

    def beats(self, one: Trial, other: Trial) -> bool:
        """Return whether a trial is at least as good as another in every objective, and better in one."""
        pairs = [
            (a, b) if good == "min" else (-a, -b)
            for a, b, good in zip(one.objectives, other.objectives, self.directions, strict=True)
        ]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


class SweepResult(list[Trial]):
    """The trials of a sweep, in the order of the sampler."""

    def __init__(
        self,
        trials: Iterable[Trial],
        *,
        goal: Goal | None = None,
        folder: Path | None = None,
        secrets: Collection[str] = (),
        total: int | None = None,
        slots: int = 1,
    ):
        super().__init__(trials)
        self.goal, self.folder, self._secrets = goal or Goal(), folder, secrets
        self.total, self.slots = total, slots
        """Total number of trials (None if unknown), and how many run in parallel."""

    @property
    def direction(self) -> str | tuple[str, ...]:
        """`"min"` or `"max"`, one for each objective where there are several."""
        return self.goal.directions[0] if self.goal.is_single else self.goal.directions

    def shown(self, trial: Trial) -> Settings:
        """Return the parameters of a trial in plain values, with secrets masked."""
        return plain(without_secrets(trial.params, self._secrets))

    @property
    def ranked(self) -> list[Trial]:
        """The trials, best first; those without a value come last.

        With several objectives: the front, then those that few others beat, each group by its first objective.
        """
        beaten = {} if self.goal.is_single else self._count_dominating_trials
        sign = 1 if self.goal.directions[0] == "min" else -1

        def place(trial: Trial) -> tuple[bool, int, float, int]:
            first = sign * trial.objectives[0] if trial.objectives else 0.0
            return not trial.objectives, beaten.get(trial.index, 0), first, trial.index

        return sorted(self, key=place)

    @functools.cached_property
    def _count_dominating_trials(self) -> dict[int, int]:
        valued = [trial for trial in self if trial.objectives]
        return {trial.index: sum(self.goal.beats(other, trial) for other in valued) for trial in valued}

    @property
    def front(self) -> list[Trial]:
        """The trials that no other beats: the Pareto front of several objectives, of one the best."""
        if self.goal.is_single:
            return [trial for trial in self.ranked if trial.objectives and trial.objectives == self.best.objectives]
        return [trial for trial in self.ranked if self._count_dominating_trials.get(trial.index) == 0]

    @property
    def best(self) -> Trial:
        """The trial with the best value."""
        if not self.goal.is_single:
            raise ExperimentError(
                f"a sweep with the objectives {', '.join(self.goal.names)} has no single best trial. result.front holds the "
                "Pareto front."
            )
        good = [trial for trial in self.ranked if trial.objectives]
        if not good:
            raise ExperimentError(
                "no trial of this sweep has a value. Let the experiment return a number, or return a dict and name the entry "
                "with objective='...'."
            )
        return good[0]

    @property
    def seconds_left(self) -> float | None:
        """How long the rest of the sweep will take from this moment on; None where no trial has ended or the total is unknown.

        A trial is expected to take as long as the mean of those that ended and of those that run longer than that.
        """
        done = [trial.seconds for trial in self if trial.is_over]
        running = [trial.elapsed for trial in self if trial.status == RUNNING]
        if self.total is None or not done:
            return None
        mean = sum(done) / len(done)
        longer = [seconds for seconds in running if seconds > mean]
        mean = (sum(done) + sum(longer)) / (len(done) + len(longer))
        rest = [max(0.0, mean - seconds) for seconds in running]
        waiting = max(0, self.total - len(done) - len(running))
        return max((sum(rest) + waiting * mean) / self.slots, max(rest, default=0.0))

    @property
    def failed(self) -> list[Trial]:
        """The trials that failed or were ended at `trial_timeout`."""
        return [trial for trial in self if trial.status in (FAILED, TIMED_OUT)]

    def without_running(self) -> "SweepResult":
        """Return the result of a sweep that no process runs: trials that were running are interrupted."""
        trials = [replace(trial, status=INTERRUPTED) if trial.status == RUNNING else trial for trial in self]
        return SweepResult(trials, goal=self.goal, folder=self.folder, secrets=self._secrets, total=self.total)

    @property
    def varied(self) -> list[str]:
        """The names of parameters that differ between trials."""
        names = list(dict.fromkeys(name for trial in self for name in trial.params))
        return [name for name in names if len({repr(plain(trial.params.get(name))) for trial in self}) > 1] or names

    def rows(self) -> list[Settings]:
        """Return one flat dict per trial, best first: index, status, objectives, varied parameters, seconds, attempts, run folder.

        An objective or parameter with the name of another column has `value.` or `params.` in front of it.
        """
        names = self.goal.names
        columns = ["value"] if self.goal.is_single else [f"value.{n}" if n in OWN_COLUMNS else n for n in names]
        taken = {*OWN_COLUMNS, *columns}
        varied = {name: f"params.{name}" if name in taken else name for name in self.varied}
        return [
            {
                "trial": trial.index,
                "status": trial.status,
                **dict(zip(columns, self._values(trial))),
                **{column: self.shown(trial).get(name) for name, column in varied.items()},
                "seconds": round(trial.seconds, 2),
                "attempts": trial.attempts,
                "run": None if trial.run_dir is None else str(trial.run_dir),
                "error": trial.error,
            }
            for trial in self.ranked
        ]

    def _values(self, trial: Trial) -> list[float | None]:
        return [trial.value] if self.goal.is_single else [trial.values.get(name) for name in self.goal.names]

    def table(self) -> str:
        """Return a table of all trials, best first."""
        hidden = ("run", "attempts") + (() if self.failed else ("error",))
        rows = [{name: value for name, value in row.items() if name not in hidden} for row in self.rows()]
        if not rows:
            return "no trials"
        return "\n".join(aligned([[*rows[0]], *(list(map(_cell, row.values())) for row in rows)]))

    def to_csv(self, path: str | Path) -> Path:
        """Write all trials, best first, with every parameter and metric; text that looks like a formula gets an apostrophe."""
        params = list(dict.fromkeys(name for trial in self for name in trial.params))
        metrics = list(dict.fromkeys(name for trial in self for name in trial.metrics))
        values = ["value"] if self.goal.is_single else [f"value.{name}" for name in self.goal.names]
        fixed = ["trial", "status", *values, "seconds", "attempts", "run", "error"]
        with atomic_write(Path(path), mode=PRIVATE_FILE) as raw:
            stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", newline="")
            writer = csv.writer(stream)
            writer.writerow([*fixed, *(f"params.{name}" for name in params), *(f"metrics.{name}" for name in metrics)])
            for trial in self.ranked:
                cells: list[object] = [trial.index, trial.status, *self._values(trial)]
                cells += [trial.seconds, trial.attempts, trial.run_dir, trial.error]
                cells += [self.shown(trial).get(name) for name in params]
                cells += [trial.metrics.get(name) for name in metrics]
                writer.writerow([spreadsheet_cell(value) for value in cells])
            stream.flush()
            stream.detach()  # `atomic_write` closes the file beneath it
        return Path(path)

    def plot(self, path: str | Path) -> Path:
        """Draw value against each varied parameter, and all of them side by side, into a PNG file."""
        return plot_sweep(self, Path(path))

    def __repr__(self) -> str:
        return f"SweepResult({len(self)} trials, {len(self.failed)} failed)"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else shortened(printable(str(value).partition("\n")[0]), 48)


def read_sweep(folder: str | Path) -> SweepResult:
    """Read what a sweep has done so far, from its folder."""
    header, trials = read_journal(Path(folder))
    goal = Goal.from_data(header.get("objective"), header.get("direction"))
    if not goal.is_consistent:
        raise ExperimentError(
            f"the journal in {folder} has the objectives {header.get('objective')!r} with the directions {header.get('direction')!r}. "
            "Each objective needs one direction, 'min' or 'max': the file is damaged."
        )
    count = len(goal.directions)
    for trial in trials:
        if trial.objectives and len(trial.objectives) != count:
            raise ExperimentError(
                f"the journal in {folder} has {count} objectives, but trial {trial.index} has {len(trial.objectives)} values."
            )
    return SweepResult(trials, goal=goal, folder=Path(folder))


def plot_sweep(result: SweepResult, path: Path) -> Path:
    """Draw the sweep into a PNG file; neither a display nor pyplot's global state is needed."""
    with needs_package("matplotlib", "demo", "a picture of a sweep"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    if not result.goal.is_single:
        raise ExperimentError(
            "a sweep with several objectives has no single value to plot. result.front holds its best trials."
        )
    trials = [trial for trial in result if trial.value is not None]
    if not trials:
        raise ExperimentError("no trial of this sweep has a value, so there is nothing to draw.")
    names = result.varied
    figure = Figure(figsize=(max(6.0, 3.2 * len(names)), 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, max(1, len(names)))
    values = [float(trial.value or 0.0) for trial in trials]
    for column, name in enumerate(names):
        axes = figure.add_subplot(grid[0, column])
        places, labels, is_log = _places([result.shown(trial).get(name) for trial in trials])
        axes.scatter(places, values, c=values, cmap="viridis", edgecolors="none")
        axes.set(xlabel=name, ylabel="value" if column == 0 else "")
        if labels is not None:
            axes.set_xticks(range(len(labels)), labels)
        elif is_log:
            axes.set_xscale("log")
    _draw_lines(figure.add_subplot(grid[1, :]), result, trials, names, values)
    figure.savefig(path)
    return path


def _draw_lines(axes: Any, result: SweepResult, trials: list[Trial], names: list[str], values: list[float]) -> None:
    """Draw parallel coordinates: each axis scaled to its own range, the value last."""
    from matplotlib import colormaps

    columns = []
    for name in names:
        places, _, is_log = _places([result.shown(trial).get(name) for trial in trials])
        columns.append(_scaled([math.log(place) for place in places] if is_log else places))
    columns.append(_scaled(values))
    for row, shade in zip(zip(*columns, strict=True), columns[-1], strict=True):
        axes.plot(range(len(row)), row, color=colormaps["viridis"](shade), alpha=0.8)
    axes.set_xticks(range(len(columns)), [*names, "value"])
    axes.set_yticks([])


def _places(values: Sequence[object]) -> tuple[list[float], list[str] | None, bool]:
    """Return where values lie on an axis, the labels of values that are no numbers, and whether a log axis suits them."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        return numbers, None, min(numbers) > 0 and max(numbers) / min(numbers) >= 30
    labels = list(dict.fromkeys(str(value) for value in values))
    return [float(labels.index(str(value))) for value in values], labels, False


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [0.5 if high == low else (value - low) / (high - low) for value in values]
