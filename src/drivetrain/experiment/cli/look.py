"""`drivetrain ls`, `show`, `compare` and `report`: what runs left behind, on the terminal or as one HTML file."""

import argparse
import difflib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ExperimentError, nearest_name
from drivetrain.core.quantities import shown_bytes
from drivetrain.experiment.cli.output import STATE_STYLES, indented, print_json, print_lines, print_table
from drivetrain.experiment.command_line import JSON, argument
from drivetrain.experiment.directions import read_directions
from drivetrain.experiment.records import STATES, RunRecord, find_runs, is_run, read_run
from drivetrain.experiment.reports.chart import Point, short
from drivetrain.experiment.reports.gather import (
    ENVIRONMENT,
    RunData,
    differs,
    duration,
    gather_run,
    moment,
    names_of,
    summarize_run,
)

DEFAULT_PLACE = "output"
SHOWN_LOG_LINES = 10
SHOWN_DIFF_LINES = 60
NOT_HARDWARE = ("commit", "branch", "source", "command", "seed", "torch", "drivetrain")
DIRECTION = argument(
    "--direction",
    action="append",
    default=[],
    metavar="NAME=min|max",
    help="which values of a metric are good; may be repeated",
)
SEVERAL_HELP = "run folders; a folder that holds runs means all of them"
REPORT_HELP = "the file to write (default: report.html in the run, or here for several)"

ARGUMENTS = {
    "ls": [
        argument("dir", nargs="?", default=DEFAULT_PLACE, metavar="DIR", help="where to look (default: %(default)s)"),
        argument(
            "--status",
            choices=STATES,
            help="only runs in this state; lost: its status is running, but no process holds its lock",
        ),
        argument("--experiment", help="only runs of this experiment"),
        DIRECTION,
        JSON,
    ],
    "show": [argument("run", metavar="RUN", help="the folder of a run"), DIRECTION, JSON],
    "compare": [argument("runs", nargs="+", metavar="RUN", help=f"two or more {SEVERAL_HELP}"), DIRECTION, JSON],
    "report": [
        argument("runs", nargs="+", metavar="RUN", help=SEVERAL_HELP),
        argument("--output", metavar="FILE", help=REPORT_HELP),
        DIRECTION,
        JSON,
    ],
}


def ls(arguments: argparse.Namespace) -> int:
    """List runs."""
    place = Path(arguments.dir)
    if not place.is_dir() and arguments.dir != DEFAULT_PLACE:
        raise ExperimentError(
            f"there is no folder {place}. Give the --output-dir of your runs, by default {DEFAULT_PLACE}."
        )
    directions = read_directions(arguments.direction)
    rows = [
        _row(record, directions)
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


def _row(record: RunRecord, directions: dict[str, str]) -> dict[str, Any]:
    summary = summarize_run(record, directions)
    return {
        "state": record.state,
        "experiment": record.experiment,
        "started": record.started,
        "age": max(0.0, time.time() - record.started) if record.started else None,
        "steps": record.status.get("step"),
        "metric": None if summary is None else summary.tag,
        "last": None if summary is None else summary.last,
        "best": None if summary is None else summary.best,
        "seconds": record.status.get("seconds"),
        "folder": str(record.folder),
    }


def _metric(row: dict[str, Any]) -> str:
    if row["metric"] is None:
        return "–"
    return f"{row['metric']} {short(row['last'])}" + ("" if row["best"] is None else f" ({short(row['best'])})")


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


def show(arguments: argparse.Namespace) -> int:
    """Show one run."""
    run = gather_run(find_run(arguments.run).folder, verify="full", directions=read_directions(arguments.direction))
    if arguments.json:
        print_json(_as_data(run))
    else:
        _print_run(run)
    return 0


def _as_data(run: RunData) -> dict[str, Any]:
    """Return a run in plain values."""
    record = run.record
    return {
        "run": run.name,
        "folder": str(record.folder),
        "state": record.state,
        "status": record.status,
        "parameters": {
            name: {"value": value, "origin": record.origins.get(name)} for name, value in record.settings.items()
        },
        "environment": {name: read(record.manifest) for name, read in ENVIRONMENT},
        "plan": record.manifest.get("plan"),
        "metrics": {
            entry.tag: {"last": entry.last, "best": entry.best, "best_step": entry.best_step, "count": entry.count}
            for entry in run.metrics()
        },
        "summary": run.summary,
        "checkpoints": [vars(line) for line in run.checkpoints],
        "notes": list(run.notes),
        "log": run.log_tail.splitlines()[-SHOWN_LOG_LINES:],
    }


def _print_run(run: RunData) -> None:
    record = run.record
    print_lines(run.name, style="bold")
    print_lines(record.state, style=STATE_STYLES.get(record.state, ""))
    print_lines(
        f"folder    {record.folder}",
        f"started   {moment(record.started)}, took {duration(record.status.get('seconds'))}",
    )
    if record.status.get("error"):
        print_lines(*indented("error     ", record.status["error"]), style="red")
    rows: list[list[Any]] = [[name, value, record.origins.get(name, "")] for name, value in record.settings.items()]
    print_table(["parameter", "value", "from"], rows)
    found = [(name, read(record.manifest)) for name, read in ENVIRONMENT]
    print_table(["environment", ""], [(name, str(value)) for name, value in found if value not in (None, "")])
    if record.manifest.get("plan"):
        print_table(["plan"], [[record.manifest["plan"]]])
    if run.series:
        metrics = [(entry.tag, entry.last, entry.best, entry.best_step, entry.count) for entry in run.metrics()]
        print_table(["metric", "last", "best", "at step", "values"], metrics)
    if run.checkpoints:
        lines = [
            (
                line.name,
                line.progress.get("ep"),
                line.progress.get("st"),
                shown_bytes(line.size),
                line.problem or "valid",
            )
            for line in run.checkpoints
        ]
        print_table(["checkpoint", "epoch", "step", "size", "state"], lines, styles={"valid": "green"})
    for note in run.notes:
        print_lines(note, style="yellow")
    if run.log_tail:
        print_lines("last lines of the log", style="bold")
        print_lines(*run.log_tail.splitlines()[-SHOWN_LOG_LINES:])


def compare(arguments: argparse.Namespace) -> int:
    """Show how runs differ."""
    records = find_all_runs(arguments.runs)
    if len(records) < 2:
        raise ExperimentError(f"compare needs at least two runs, got {len(records)}: {', '.join(arguments.runs)}.")
    directions = read_directions(arguments.direction)
    runs = [gather_run(record.folder, verify="off", directions=directions) for record in records]
    found = compare_runs(runs)
    if arguments.json:
        print_json(found)
    else:
        _print_comparison(found)
    return 0


def compare_runs(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return what differs between runs, in plain values; lists have one entry per run."""
    records = [run.record for run in runs]
    packages = [record.manifest.get("packages") or {} for record in records]
    environment = {name: [read(record.manifest) for record in records] for name, read in ENVIRONMENT}
    summaries = [{entry.tag: entry for entry in run.metrics()} for run in runs]
    tags = dict.fromkeys(tag for entries in summaries for tag in entries)
    return {
        "runs": names_of(runs),
        "folders": [str(record.folder) for record in records],
        "parameters": _differing([record.settings for record in records]),
        "code": {
            "commits": [_git(record, "commit") for record in records],
            "diff": _diff_of_diffs(records),
        },
        "packages": _differing(packages),
        "hardware": {
            name: values for name, values in environment.items() if name not in NOT_HARDWARE and differs(values)
        },
        "metrics": {
            tag: {
                "last": [entries[tag].last if tag in entries else None for entries in summaries],
                "best": [entries[tag].best if tag in entries else None for entries in summaries],
            }
            for tag in tags
        },
        "losses_differ_from": {
            tag: first_difference([run.series[tag] for run in runs if tag in run.series])
            for tag in tags
            if "loss" in tag.lower() and sum(tag in run.series for run in runs) > 1
        },
    }


def first_difference(series: Sequence[Sequence[Point]]) -> float | None:
    """Return the first step that several curves share and at which not all have the same value; None: there is none.

    >>> first_difference([[(0, 1.0), (1, 0.5)], [(0, 1.0), (1, 0.4)]])
    1
    """
    values = [dict(points) for points in series]
    for step in sorted(set.intersection(*(set(entries) for entries in values))):
        if differs([repr(entries[step]) for entries in values]):  # repr: NaN is the same as NaN here
            return step
    return None


def _differing(mappings: Sequence[dict[str, object]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for mapping in mappings for name in mapping)
    columns = {name: [mapping.get(name) for mapping in mappings] for name in names}
    return {name: values for name, values in columns.items() if differs(values)}


def _git(record: RunRecord, field: str) -> str:
    return str((record.manifest.get("git") or {}).get(field) or "")


def _diff_of_diffs(records: Sequence[RunRecord]) -> list[str]:
    """Return how the uncommitted changes of the others differ from those of the first run."""
    first, lines = _git(records[0], "diff"), list[str]()
    for record in records[1:]:
        other = _git(record, "diff")
        if other != first:
            names = (records[0].folder.name, record.folder.name)
            lines += difflib.unified_diff(first.splitlines(), other.splitlines(), *names, lineterm="", n=2)
    return lines


def _print_comparison(found: dict[str, Any]) -> None:
    runs = found["runs"]
    for title in ("parameters", "packages", "hardware"):
        if found[title]:
            print_table([title, *runs], [(name, *values) for name, values in found[title].items()])
        else:
            print_lines(f"{title}: no difference")
    commits, diff = found["code"]["commits"], found["code"]["diff"]
    if differs(commits):
        print_table(["code", *runs], [("commit", *(commit[:12] or None for commit in commits))])
    if diff:
        print_lines("uncommitted changes differ:", style="bold")
        print_lines(*diff[:SHOWN_DIFF_LINES])
        if len(diff) > SHOWN_DIFF_LINES:
            print_lines(f"... {len(diff) - SHOWN_DIFF_LINES} more lines; --json has all of them")
    if not differs(commits) and not diff:
        print_lines("code: no difference" if any(commits) else "code: unknown, no run was started in a git repository")
    rows = [
        (f"{tag}, {which}", *entry[which])
        for tag, entry in found["metrics"].items()
        for which in ("last", "best")
        if any(value is not None for value in entry[which])
    ]
    if rows:
        print_table(["metric", *runs], rows)
    for tag, step in found["losses_differ_from"].items():
        print_lines(
            f"{tag}: " + ("the same at every common step" if step is None else f"differs from step {step:g} on")
        )


def report(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from drivetrain.experiment.reports.page import write_report

    folders = [record.folder for record in find_all_runs(arguments.runs)]
    path = write_report(folders, arguments.output, directions=read_directions(arguments.direction)).resolve()
    if arguments.json:
        print_json({"report": str(path), "runs": [str(folder) for folder in folders]})
    else:
        print_lines(str(path))
    return 0


def find_run(given: str) -> RunRecord:
    """Return the run in a folder; a file or checkpoint inside it will do, too."""
    path = Path(given)
    for folder in (path, *path.parents[:3]):
        if is_run(folder):
            return read_run(folder)
    if not path.exists():
        near = (
            nearest_name(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else None
        )
        hint = f" Did you mean {path.parent / near}?" if near else ""
        raise ExperimentError(f"there is no run {given}: the path does not exist.{hint} `drivetrain ls` lists runs.")
    return read_run(path)  # which raises and names what is missing


def find_all_runs(given: Sequence[str]) -> list[RunRecord]:
    """Return the runs named; a folder that holds runs, such as that of a sweep, means all of them."""
    found: dict[Path, RunRecord] = {}
    for name in given:
        path = Path(name)
        inside = list(find_runs(path)) if path.is_dir() and not is_run(path) else []
        for record in inside or [find_run(name)]:
            found.setdefault(record.folder.resolve(), record)
    return list(found.values())
