"""What a sweep found: its trials, the best one, those that failed, as a table, a CSV file and a picture."""

import csv
import io
import math
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from drivetrain.core.display import printable, spreadsheet_cell
from drivetrain.core.errors import ExperimentError
from drivetrain.core.files import PRIVATE_FILE, replacing
from drivetrain.core.secret import masked
from drivetrain.experiment.run_folder import plain
from drivetrain.experiment.sweeps.journal import read_journal
from drivetrain.experiment.sweeps.trial import FAILED, Trial

__all__ = ["SweepResult", "Trial", "read_sweep"]


class SweepResult(Sequence[Trial]):
    """The trials of a sweep, in the order they were asked for."""

    def __init__(
        self,
        trials: Sequence[Trial],
        *,
        direction: str = "min",
        folder: Path | None = None,
        secrets: Container[str] = (),
    ):
        self._trials, self.direction, self.folder, self._secrets = list(trials), direction, folder, secrets

    @overload
    def __getitem__(self, place: int) -> Trial: ...
    @overload
    def __getitem__(self, place: slice) -> list[Trial]: ...
    def __getitem__(self, place: int | slice) -> Trial | list[Trial]:
        return self._trials[place]

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials)

    def shown(self, trial: Trial) -> dict[str, Any]:
        """Return the parameters of a trial in plain values, with secrets masked."""
        return {name: plain(masked(value, is_secret=name in self._secrets)) for name, value in trial.params.items()}

    @property
    def ranked(self) -> list[Trial]:
        """The trials, best first; those without a value come last."""
        return sorted(self._trials, key=lambda trial: (self._place(trial), trial.index))

    def _place(self, trial: Trial) -> float:
        if trial.value is None or math.isnan(trial.value):
            return math.inf
        return trial.value if self.direction == "min" else -trial.value

    @property
    def best(self) -> Trial:
        """The trial with the best value."""
        good = [trial for trial in self.ranked if trial.value is not None and not math.isnan(trial.value)]
        if not good:
            raise ExperimentError(
                "no trial of this sweep has a value. Let the experiment return a number, or return a dict and name the entry "
                "with objective='...'."
            )
        return good[0]

    @property
    def failed(self) -> list[Trial]:
        """The trials that failed."""
        return [trial for trial in self._trials if trial.status == FAILED]

    @property
    def varied(self) -> list[str]:
        """The names of parameters that differ between trials."""
        names = list(dict.fromkeys(name for trial in self._trials for name in trial.params))
        return [
            name for name in names if len({repr(plain(trial.params.get(name))) for trial in self._trials}) > 1
        ] or names

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dict per trial, best first: index, status, value, varied parameters, seconds, attempts, run folder."""
        return [
            {
                "trial": trial.index,
                "status": trial.status,
                "value": trial.value,
                **{name: self.shown(trial).get(name) for name in self.varied},
                "seconds": round(trial.seconds, 2),
                "attempts": trial.attempts,
                "run": None if trial.run_dir is None else str(trial.run_dir),
                "error": trial.error,
            }
            for trial in self.ranked
        ]

    def table(self) -> str:
        """Return a table of all trials, best first."""
        hidden = ("run", "attempts") + (() if self.failed else ("error",))
        rows = [{name: _cell(value) for name, value in row.items() if name not in hidden} for row in self.rows()]
        if not rows:
            return "no trials"
        widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
        lines = ["  ".join(f"{name:<{width}}" for name, width in widths.items())]
        lines += ["  ".join(f"{row[name]:<{width}}" for name, width in widths.items()) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def to_csv(self, path: str | Path) -> Path:
        """Write all trials, best first, with every parameter and metric; text that looks like a formula gets an apostrophe."""
        params = list(dict.fromkeys(name for trial in self._trials for name in trial.params))
        metrics = list(dict.fromkeys(name for trial in self._trials for name in trial.metrics))
        fixed = ["trial", "status", "value", "seconds", "attempts", "run", "error"]
        with replacing(Path(path), mode=PRIVATE_FILE) as raw:
            stream = io.TextIOWrapper(raw, encoding="utf-8", newline="")
            writer = csv.writer(stream)
            writer.writerow([*fixed, *(f"params.{name}" for name in params), *(f"metrics.{name}" for name in metrics)])
            for trial in self.ranked:
                own = [
                    trial.index,
                    trial.status,
                    trial.value,
                    trial.seconds,
                    trial.attempts,
                    trial.run_dir,
                    trial.error,
                ]
                values = [self.shown(trial).get(name) for name in params]
                cells = [*own, *values, *(trial.metrics.get(name) for name in metrics)]
                writer.writerow([spreadsheet_cell(value) for value in cells])
            stream.flush()
            stream.detach()  # `replacing` closes the file beneath it
        return Path(path)

    def plot(self, path: str | Path) -> Path:
        """Draw value against each varied parameter, and all of them side by side, into a PNG file."""
        from drivetrain.experiment.sweeps.plotting import plot_sweep

        return plot_sweep(self, Path(path))

    def __repr__(self) -> str:
        return f"SweepResult({len(self)} trials, {len(self.failed)} failed)"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else printable(str(value).partition("\n")[0])
    return text if len(text) <= 48 else text[:45] + "..."


def read_sweep(folder: str | Path) -> SweepResult:
    """Read what a sweep has done so far, from its folder."""
    header, trials = read_journal(Path(folder))
    return SweepResult(trials, direction=str(header.get("direction", "min")), folder=Path(folder))
