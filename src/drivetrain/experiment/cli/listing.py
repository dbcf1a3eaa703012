"""`drivetrain ls`: the runs of a folder, newest first."""

import argparse
import time
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ExperimentError
from drivetrain.experiment.cli.output import STATE_STYLES, add_json_option, print_json, print_lines, print_table
from drivetrain.experiment.cli.places import DEFAULT_PLACE
from drivetrain.experiment.records import STATES, RunRecord, find_runs
from drivetrain.experiment.reports.gather import main_metric, read_series, summarize
from drivetrain.experiment.reports.scales import short


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ls`."""
    parser.add_argument(
        "dir", nargs="?", default=DEFAULT_PLACE, metavar="DIR", help="where to look (default: %(default)s)"
    )
    parser.add_argument(
        "--status", choices=STATES, help="only runs in this state; lost: says running, and no process does"
    )
    parser.add_argument("--experiment", help="only runs of this experiment")
    add_json_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    """List runs."""
    place = Path(arguments.dir)
    if not place.is_dir() and arguments.dir != DEFAULT_PLACE:
        raise ExperimentError(
            f"there is no folder {place}. Give the --output-dir of your runs, by default {DEFAULT_PLACE}."
        )
    rows = [
        _row(record)
        for record in reversed(list(find_runs(place)))
        if arguments.status in (None, record.state) and arguments.experiment in (None, record.experiment)
    ]
    if arguments.json:
        print_json(rows)
    elif not rows:
        print_lines(f"no runs in {place}")
    else:
        table = [
            (row["state"], row["experiment"], _age(row["age"]), row["steps"], _metric(row), row["folder"])
            for row in rows
        ]
        print_table(["state", "experiment", "age", "steps", "last (best)", "folder"], table, styles=STATE_STYLES)
    return 0


def _row(record: RunRecord) -> dict[str, Any]:
    series = read_series(record)
    tag = main_metric(series)
    summary = summarize(tag, series[tag]) if tag is not None else None
    return {
        "state": record.state,
        "experiment": record.experiment,
        "started": record.started,
        "age": max(0.0, time.time() - record.started) if record.started else None,
        "steps": record.status.get("step"),
        "metric": tag,
        "last": None if summary is None else summary.last,
        "best": None if summary is None else summary.best,
        "seconds": record.status.get("seconds"),
        "folder": str(record.folder),
    }


def _metric(row: dict[str, Any]) -> str:
    return "–" if row["metric"] is None else f"{row['metric']} {short(row['last'])} ({short(row['best'])})"


def _age(seconds: float | None) -> str:
    """Return an age in its largest unit.

    >>> _age(90), _age(200_000)
    ('1 min', '2 d')
    """
    if seconds is None:
        return "–"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
