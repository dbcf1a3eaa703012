"""`drivetrain show`, `report` and `board`: everything about a run or a sweep, on the terminal, as one HTML file or as a live page."""

import argparse
from pathlib import Path

from drivetrain.core.display import shown_bytes
from drivetrain.core.errors import ConfigError, ExperimentError
from drivetrain.core.locking import is_locked
from drivetrain.core.types import Settings
from drivetrain.experiment.cli.listing import DIRECTION, SEVERAL_HELP
from drivetrain.experiment.cli.output import STATE_STYLES, indented, print_json, print_lines, print_table
from drivetrain.experiment.cli.runs import DEFAULT_PLACE, find_all_runs, find_run, find_sweep, locate
from drivetrain.experiment.command_line import JSON, argument
from drivetrain.experiment.directions import read_directions
from drivetrain.experiment.records import read_remarks, short_id
from drivetrain.experiment.reports.gather import ENVIRONMENT, RunData, duration, gather_run, moment

SHOWN_LOG_LINES = 10
REPORT_HELP = "the file to write (default: report.html in the run folder; in the current folder for several runs)"

PORT = argument("--port", type=int, metavar="N", help="the port of the live page (default: a free one)")

ARGUMENTS = {
    "show": [argument("run", metavar="RUN", help="the folder or short id of a run or a sweep"), DIRECTION, JSON],
    "report": [
        argument("runs", nargs="+", metavar="RUN", help=SEVERAL_HELP),
        argument("--output", metavar="FILE", help=REPORT_HELP),
        argument(
            "--watch", action="store_true", help="serve the page on this machine and keep it up to date, like board"
        ),
        PORT,
        DIRECTION,
        JSON,
    ],
    "board": [
        argument("runs", nargs="*", metavar="RUN or DIR", help=f"{SEVERAL_HELP} (default: {DEFAULT_PLACE})"),
        PORT,
        DIRECTION,
        JSON,
    ],
}


def show(arguments: argparse.Namespace) -> int:
    """Show one run, or the trials of a sweep."""
    sweep = find_sweep(arguments.run)
    if sweep is not None:
        _show_sweep(sweep, arguments.json)
        return 0
    run = gather_run(find_run(arguments.run).folder, verify="full", directions=read_directions(arguments.direction))
    if arguments.json:
        print_json(_as_data(run))
    else:
        _print_run(run)
    return 0


def _show_sweep(folder: Path, as_json: bool) -> None:
    from drivetrain.experiment.cli.sweep import print_result, resume_line
    from drivetrain.experiment.sweeps.result import read_sweep

    result = read_sweep(folder)
    if not is_locked(folder):
        result = result.without_running()
    print_result(result, as_json)
    if not as_json and any(trial.status in ("asked", "interrupted") for trial in result):
        print_lines(resume_line(folder))


def _as_data(run: RunData) -> Settings:
    """Return a run in plain values."""
    record = run.record
    return {
        "run": run.name,
        "id": short_id(record.folder),
        "folder": str(record.folder),
        "tags": read_remarks(record.folder)[0],
        "note": read_remarks(record.folder)[1],
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
        "summary": run.recorded.results,
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
    tags, note = read_remarks(record.folder)
    if tags:
        print_lines(f"tags      {', '.join(tags)}")
    if note:
        print_lines(*indented("note      ", note))
    if record.status.get("error"):
        print_lines(*indented("error     ", record.status["error"]), style="red")
    rows: list[list[object]] = [[name, value, record.origins.get(name, "")] for name, value in record.settings.items()]
    print_table(["parameter", "value", "from"], rows)
    found = [(name, read(record.manifest)) for name, read in ENVIRONMENT]
    print_table(["environment", ""], [(name, str(value)) for name, value in found if value not in (None, "")])
    if record.manifest.get("plan"):
        print_table(["plan"], [[record.manifest["plan"]]])
    if run.curves:
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


def report(arguments: argparse.Namespace) -> int:
    """Write the report, or serve it."""
    from drivetrain.experiment.reports.page import write_report

    if arguments.watch:
        if arguments.output is not None:
            raise ConfigError("--output writes a file and --watch serves a page. Use one of them.")
        return board(arguments)
    if arguments.port is not None:
        raise ConfigError("--port sets the port of a live page. Add --watch.")
    folders = [record.folder for record in find_all_runs(arguments.runs)]
    path = write_report(folders, arguments.output, directions=read_directions(arguments.direction)).resolve()
    if arguments.json:
        print_json({"report": str(path), "runs": [str(folder) for folder in folders]})
    else:
        print_lines(str(path))
    return 0


def board(arguments: argparse.Namespace) -> int:
    """Serve the report of active runs until Ctrl-C; runs that start later appear too."""
    from drivetrain.experiment.reports.live import serve

    places = [locate(name) for name in arguments.runs or [DEFAULT_PLACE]]
    for place in places:
        if not place.is_dir():
            raise ExperimentError(f"there is no folder {place}. Give a run, or the --output-dir of your runs.")
    directions = read_directions(arguments.direction)
    serve(places, directions=directions, port=arguments.port or 0, prints_json=arguments.json)
    return 0
