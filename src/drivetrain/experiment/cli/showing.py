"""`drivetrain show`: everything about one run, on the terminal."""

import argparse
from typing import Any

from drivetrain.core.quantities import shown_bytes
from drivetrain.experiment.cli.output import (
    STATE_STYLES,
    add_json_option,
    indented,
    print_json,
    print_lines,
    print_table,
)
from drivetrain.experiment.cli.places import find_run
from drivetrain.experiment.reports.gather import RunData, gather_run
from drivetrain.experiment.reports.html import duration, moment
from drivetrain.experiment.reports.sections import ENVIRONMENT

SHOWN_LOG_LINES = 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `show`."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    add_json_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Show one run."""
    run = gather_run(find_run(arguments.run).folder, verify="full")
    if arguments.json:
        print_json(as_data(run))
    else:
        _print(run)
    return 0


def as_data(run: RunData) -> dict[str, Any]:
    """Return a run in plain values."""
    record = run.record
    return {
        "run": run.name,
        "folder": str(record.folder),
        "state": record.state,
        "status": record.status,
        "parameters": {
            name: {"value": value, "origin": record.origins.get(name)} for name, value in record.parameters.items()
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


def _print(run: RunData) -> None:
    record = run.record
    print_lines(run.name, style="bold")
    print_lines(record.state, style=STATE_STYLES.get(record.state, ""))
    print_lines(
        f"folder    {record.folder}",
        f"started   {moment(record.started)}, took {duration(record.status.get('seconds'))}",
    )
    if record.status.get("error"):
        print_lines(*indented("error     ", record.status["error"]), style="red")
    rows: list[list[Any]] = [[name, value, record.origins.get(name, "")] for name, value in record.parameters.items()]
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
