"""`drivetrain compare`: in what runs differ. Up to five are shown side by side, more as one row each, or grouped over seeds."""

import argparse
import difflib
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from drivetrain.core.errors import ExperimentError, StateError
from drivetrain.core.types import Settings
from drivetrain.experiment.cli.listing import DIRECTION, OBJECTIVE, SEVERAL_HELP
from drivetrain.experiment.cli.output import Column, plain_text, print_json, print_lines, print_split_table, print_table
from drivetrain.experiment.cli.runs import RunLine, common_direction, find_all_runs, read_lines, varying
from drivetrain.experiment.command_line import JSON, argument
from drivetrain.experiment.directions import best_places, read_directions
from drivetrain.experiment.records import RunRecord
from drivetrain.experiment.reports.gather import SEED, differing, differs, environment_of, short

Point = tuple[float, float]
"""A step and a value."""
SIDE_BY_SIDE = 5
"""More runs than this are rows, not columns."""
SHOWN_DIFF_LINES = 60
NOT_HARDWARE = ("commit", "branch", "source", "command", "seed", "torch", "drivetrain")
GROUP_HELP = "runs that differ only in their seed are one row, with mean and standard deviation"

ARGUMENTS = {
    "compare": [
        argument("runs", nargs="+", metavar="RUN", help=f"two or more {SEVERAL_HELP}"),
        argument("--group", action="store_true", help=GROUP_HELP),
        OBJECTIVE,
        DIRECTION,
        JSON,
    ]
}


def compare(arguments: argparse.Namespace) -> None:
    """Show how runs differ."""
    records = find_all_runs(arguments.runs)
    if len(records) < 2:
        raise ExperimentError(f"compare needs at least two runs, got {len(records)}: {', '.join(arguments.runs)}.")
    lines = read_lines(records, read_directions(arguments.direction), arguments.objective)
    if arguments.group:
        groups = group_over_seeds(lines)
        if arguments.json:
            print_json({"groups": groups})
        else:
            _print_groups(groups, lines)
        return
    found = compare_runs(lines)
    if arguments.json:
        print_json(found)
    elif len(lines) <= SIDE_BY_SIDE:
        _print_side_by_side(found, lines)
    else:
        _print_rows(found, lines)


def compare_runs(lines: Sequence[RunLine]) -> Settings:
    """Return what differs between runs, in plain values; lists have one entry per run.

    Curves are compared for up to five runs, since that reads their metrics files whole.
    """
    records = [line.record for line in lines]
    environments = differing([environment_of(record.manifest) for record in records])
    metrics: Settings = {}
    for tag in dict.fromkeys(tag for line in lines for tag in line.summary.tags):
        known = [line.summary.tags.get(tag) for line in lines]
        best = [own and own.best(tag, line.directions)[0] for own, line in zip(known, lines)]
        metrics[tag] = {"last": [own and own.last for own in known], "best": best}
    several = differs([record.experiment for record in records])
    return {
        "runs": [
            f"{record.experiment}/{record.folder.name}" if several else record.folder.resolve().name
            for record in records
        ],
        "ids": [line.id for line in lines],
        "folders": [str(record.folder) for record in records],
        "parameters": differing([record.settings for record in records]),
        "code": {
            "commits": [_git(record, "commit") for record in records],
            "diff": _diff_of_diffs(records) if len(lines) <= SIDE_BY_SIDE else [],
        },
        "packages": differing([record.manifest.get("packages") or {} for record in records]),
        "hardware": {name: values for name, values in environments.items() if name not in NOT_HARDWARE},
        "metrics": metrics,
        "losses_differ_from": _first_loss_differences(records) if len(lines) <= SIDE_BY_SIDE else {},
    }


def _first_loss_differences(records: Sequence[RunRecord]) -> dict[str, float | None]:
    """Return the first step at which each loss differs between runs; a file that is missing or damaged does not count."""
    from drivetrain.record.jsonl import read_metrics

    found: dict[str, list[list[Point]]] = {}
    for record in records:
        own: dict[str, list[Point]] = {}
        with suppress(OSError, StateError):
            for row in list(read_metrics(record.metrics_path, kind="scalar")):
                own.setdefault(row["tag"], []).append((row["step"], float(row["value"])))
        for tag, points in own.items():
            found.setdefault(tag, []).append(points)
    return {tag: first_difference(own) for tag, own in found.items() if "loss" in tag.lower() and len(own) > 1}


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


def labels(lines: Sequence[RunLine]) -> list[str]:
    """Return short ids, without the sweep where all are trials of one."""
    ids = [line.id for line in lines]
    sweeps = {own.rpartition("/")[0] for own in ids}
    ids = [own.rpartition("/")[2] for own in ids] if len(sweeps) == 1 else ids
    return ids if len(set(ids)) == len(ids) else [f"{line.record.experiment}/{line.id}" for line in lines]


def _starred(values: Sequence[float | None], direction: str | None) -> list[str]:
    stars = best_places(values, direction)
    return [plain_text(value) + (" *" if place in stars else "") for place, value in enumerate(values)]


def _print_side_by_side(found: Settings, lines: Sequence[RunLine]) -> None:
    runs = labels(lines)
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
            print_lines(f"... {len(diff) - SHOWN_DIFF_LINES} more lines; use --json to see all of them")
    if not differs(commits) and not diff:
        print_lines("code: no difference" if any(commits) else "code: unknown, no run was started in a git repository")
    rows = [
        (f"{tag}, {which}", *_starred(entry[which], common_direction(lines, tag)))
        for tag, entry in found["metrics"].items()
        for which in ("last", "best")
        if any(value is not None for value in entry[which])
    ]
    if rows:
        print_table(["metric", *runs], rows)
    for tag, step in found["losses_differ_from"].items():
        print_lines(f"{tag}: {'the same at every common step' if step is None else f'differs from step {step:g} on'}")


def _print_rows(found: Settings, lines: Sequence[RunLine]) -> None:
    """Print one row per run, the best first, with what differs."""
    ordered, measured = list(lines), _measured(lines)
    if measured and measured[0][1] is not None:
        _, direction, values = measured[0]
        sign = 1 if direction == "min" else -1
        keys = [(value is None or value != value, 0.0 if value is None else sign * value) for value in values]
        ordered = [lines[place] for place in sorted(range(len(lines)), key=keys.__getitem__)]
    columns = [Column(name, values) for name, values in varying(ordered).items()]
    states = [line.record.state for line in ordered]
    if differs(states):
        columns.insert(0, Column("state", states))
    for tag, direction, values in _measured(ordered):
        if differs(values):
            columns.append(Column(_title(tag, direction), _starred(values, direction)))
    print_split_table(Column("run", labels(ordered)), columns)
    for title, values in (found["packages"] | found["hardware"]).items():
        counts = Counter(map(plain_text, values)).most_common()
        print_lines(f"{title} differs: " + ", ".join(f"{text} ({count} runs)" for text, count in counts))
    commits = Counter(commit[:12] or "unknown" for commit in found["code"]["commits"])
    if len(commits) > 1:
        print_lines("code differs: " + ", ".join(f"{text} ({count} runs)" for text, count in commits.most_common()))
    changes = {_git(line.record, "diff") for line in lines}
    if len(changes) > 1:
        print_lines(f"uncommitted changes differ: {len(changes)} versions; compare two runs to see them")


def _title(tag: str, direction: str | None) -> str:
    return f"{tag} (best)" if direction else f"{tag} (last)"


def _measured(lines: Sequence[RunLine]) -> list[tuple[str, str | None, list[float | None]]]:
    """Return metrics and results: name, direction, and the best value of each run, the last where no direction is known."""
    main = [objective.tag for line in lines if (objective := line.objective()) is not None]
    names = dict.fromkeys([*main, *(tag for line in lines for tag in (*line.summary.tags, *line.results))])
    found = []
    for tag in names:
        direction = common_direction(lines, tag)
        own = [line.objective(tag) for line in lines]
        values = [None if entry is None else entry.best if direction else entry.last for entry in own]
        found.append((tag, direction, values))
    return found


def group_over_seeds(lines: Sequence[RunLine]) -> list[Settings]:
    """Return runs grouped by their parameters except the seed: what varies, the runs, and count, mean and spread of each metric."""
    settings = [{name: value for name, value in line.settings().items() if name != SEED} for line in lines]
    keys = [
        json.dumps([line.record.experiment, own], sort_keys=True, default=str) for line, own in zip(lines, settings)
    ]
    varied = differing(settings)
    groups = []
    for key in dict.fromkeys(keys):
        places = [place for place, own in enumerate(keys) if own == key]
        members = [lines[place] for place in places]
        groups.append(
            {
                "parameters": {name: values[places[0]] for name, values in varied.items()},
                "experiment": members[0].record.experiment,
                "runs": [line.id for line in members],
                "metrics": {
                    tag: _spread([value for value in values if value is not None])
                    | {"which": "best" if direction else "last"}
                    for tag, direction, values in _measured(members)
                },
            }
        )
    return groups


def _spread(values: Sequence[float]) -> Settings:
    """Return mean and sample standard deviation; the latter needs two values."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    return {
        "count": len(values),
        "mean": statistics.fmean(finite) if len(finite) == len(values) else float("nan"),
        "std": statistics.stdev(finite) if len(finite) == len(values) > 1 else None,
        "min": min(finite, default=None),
        "max": max(finite, default=None),
    }


def _print_groups(groups: list[Settings], lines: Sequence[RunLine]) -> None:
    columns = [Column("runs", [len(group["runs"]) for group in groups])]
    columns += [Column(name, [group["parameters"][name] for group in groups]) for name in groups[0]["parameters"]]
    if differs([group["experiment"] for group in groups]):
        columns.insert(0, Column("experiment", [group["experiment"] for group in groups]))
    for tag, direction, _ in _measured(lines):
        own = [group["metrics"].get(tag) for group in groups]
        if len(groups) > 1 and not differs([entry and (short(entry["mean"]), entry["std"] or 0.0) for entry in own]):
            continue
        stars, cells = best_places([entry and entry["mean"] for entry in own], direction), []
        for place, entry in enumerate(own):
            spread = "" if entry is None or entry["std"] is None else f" ± {short(entry['std'])}"
            star = " *" if place in stars else ""
            cells.append("–" if entry is None else f"{short(entry['mean'])}{spread}{star}")
        columns.append(Column(_title(tag, direction), cells))
    print_split_table(Column("group", [str(place) for place in range(1, len(groups) + 1)]), columns)
    for place, group in enumerate(groups, start=1):
        print_lines(f"group {place}: {', '.join(group['runs'])}")
