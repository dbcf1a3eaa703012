"""Runs as verbs see them: found by folder or short id, and in one line each, without reading their metrics files whole."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from drivetrain.core.errors import ExperimentError, nearest_name
from drivetrain.core.types import Settings
from drivetrain.experiment.directions import direction_of, first_declared
from drivetrain.experiment.records import (
    RunRecord,
    find_runs,
    is_run,
    is_sweep,
    locate,
    read_remarks,
    read_run,
    run_around,
    short_id,
)
from drivetrain.experiment.reports.gather import common_objective, differing, distinguishing_parameters, main_metric
from drivetrain.experiment.summaries import MetricsSummary, summary_of


def find_run(given: str) -> RunRecord:
    """Return the run that a folder or short id names; a file or checkpoint inside it will do, too."""
    path = locate(given)
    if (folder := run_around(path)) is not None:
        return read_run(folder)
    if not os.path.exists(path):
        siblings = [entry.name for entry in path.parent.iterdir()] if os.path.isdir(path.parent) else []
        near = nearest_name(path.name, siblings)
        hint = f" Did you mean {path.parent / near}?" if near else ""
        raise ExperimentError(f"there is no run {given}: the path does not exist.{hint} `drivetrain ls` lists runs.")
    return read_run(path)  # which raises and names what is missing


def find_sweep(given: str) -> Path | None:
    """Return the folder of the sweep that a folder or short id names, None where it names something else."""
    path = locate(given)
    return path if is_sweep(path) else None


def find_all_runs(given: Sequence[str]) -> list[RunRecord]:
    """Return the runs named; a folder that holds runs, such as that of a sweep, means all of them."""
    found: dict[Path, RunRecord] = {}
    for name in given:
        path = locate(name)
        inside = list(find_runs(path)) if path.is_dir() and not is_run(path) else []
        for record in inside or [find_run(name)]:
            found.setdefault(record.folder.resolve(), record)
    return list(found.values())


class Objective(NamedTuple):
    """The number by which a run is judged."""

    tag: str
    last: float
    best: float | None
    """None if it is unknown whether smaller or larger values are better."""


@dataclass(frozen=True)
class RunLine:
    """A run in one line: its record, the summary of its metrics, its tags and note."""

    record: RunRecord
    summary: MetricsSummary
    tags: tuple[str, ...]
    note: str
    given_directions: Mapping[str, str]
    judged_by: str | None = None
    """The metric or result by which all listed runs are judged; None: the most informative of each."""

    @property
    def id(self) -> str:
        """The short id."""
        return short_id(self.record.folder)

    @property
    def age(self) -> float | None:
        """Seconds since the run began."""
        return max(0.0, time.time() - self.record.started) if self.record.started else None

    @cached_property
    def directions(self) -> dict[str, str]:
        """Declared directions: on the command line, else with the Recorder, else with the experiment."""
        return first_declared(self.given_directions, self.summary.directions, self.record.directions)

    @cached_property
    def results(self) -> dict[str, float]:
        """The numbers that the experiment returned."""
        return {name: float(value) for name, value in self.record.numbers.items()}

    def objective(self, name: str | None = None) -> Objective | None:
        """Return the metric or result of this name; without one the number to judge the run by."""
        tag = name or self.judged_by or main_metric(self.summary.tags) or main_metric(self.results)
        if tag in self.summary.tags:
            own = self.summary.tags[tag]
            return Objective(tag, own.last, own.best(tag, self.directions)[0])
        if tag in self.results:
            value = self.results[tag]
            return Objective(tag, value, value if direction_of(tag, self.directions) else None)
        return None

    def settings(self) -> Settings:
        """Return the parameters that can make a difference."""
        return distinguishing_parameters(self.record)

    def facts(self) -> Settings:
        """Return what `ls` shows of every run."""
        record, objective = self.record, self.objective()
        return {
            "id": self.id,
            "state": record.state,
            "experiment": record.experiment,
            "started": record.started,
            "age": self.age,
            "steps": record.status.get("step"),
            "last": objective and objective.last,
            "best": objective and objective.best,
            "seconds": record.status.get("seconds"),
            "note": self.note,
            "folder": str(record.folder),
        }

    def values(self) -> Settings:
        """Return what conditions and `--sort` can name: parameters, last values of metrics, results, and what `ls` shows."""
        record = self.record
        more = {
            "name": record.folder.name,
            "status": record.state,
            "tag": list(self.tags),
            "seed": record.manifest.get("seed"),
        }
        metrics = {tag: own.last for tag, own in self.summary.tags.items()}
        return self.facts() | more | self.results | metrics | record.settings


def read_lines(
    records: Iterable[RunRecord], directions: Mapping[str, str], objective: str | None = None
) -> list[RunLine]:
    """Return runs in one line each, judged by an objective: the given one, or that of the sweep to which all belong."""
    lines = []
    for record in records:
        tags, note = read_remarks(record.folder)
        lines.append(RunLine(record, summary_of(record.metrics_path), tuple(tags), note, directions, objective))
    common = common_objective(line.record.sweep_objective for line in lines)
    if objective is None and any(common in line.summary.tags or common in line.results for line in lines):
        lines = [replace(line, judged_by=common) for line in lines]
    return lines


def varying(lines: Sequence[RunLine]) -> dict[str, list[object]]:
    """Return the parameters that differ between runs, with one value per run."""
    return differing([line.settings() for line in lines])


def common_direction(lines: Iterable[RunLine], tag: str) -> str | None:
    """Return the direction of a metric or result on which the runs that have it agree."""
    found = {direction_of(tag, line.directions) for line in lines if tag in line.summary.tags or tag in line.results}
    return found.pop() if len(found) == 1 else None
