"""`drivetrain compare`: in what runs differ, from parameters and code to the step at which their losses part."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from drivetrain.core.errors import ExperimentError
from drivetrain.experiment.cli.output import add_json_option, print_json, print_lines, print_table
from drivetrain.experiment.cli.places import find_all_runs
from drivetrain.experiment.records import RunRecord
from drivetrain.experiment.reports.gather import RunData, gather_run
from drivetrain.experiment.reports.scales import Point
from drivetrain.experiment.reports.sections import ENVIRONMENT, differs, names_of

NOT_HARDWARE = ("commit", "branch", "source", "command", "seed", "torch", "drivetrain")
SHOWN_DIFF_LINES = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="two or more run folders; a folder that holds runs stands for all of them",
    )
    add_json_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Show how runs differ."""
    records = find_all_runs(arguments.runs)
    if len(records) < 2:
        raise ExperimentError(f"compare needs at least two runs, got {len(records)}: {', '.join(arguments.runs)}.")
    runs = [gather_run(record.folder, verify="off") for record in records]
    found = compare_runs(runs)
    if arguments.json:
        print_json(found)
    else:
        _print(found)
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
        "parameters": _differing([record.parameters for record in records]),
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


def _differing(mappings: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
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


def _print(found: dict[str, Any]) -> None:
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
    rows = [(f"{tag}, {which}", *entry[which]) for tag, entry in found["metrics"].items() for which in ("last", "best")]
    if rows:
        print_table(["metric", *runs], rows)
    for tag, step in found["losses_differ_from"].items():
        print_lines(
            f"{tag}: " + ("the same at every common step" if step is None else f"differs from step {step:g} on")
        )
