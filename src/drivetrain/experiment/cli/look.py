"""`drivetrain show`, `report` and `board`: everything about a run or a sweep, on the terminal, as one HTML file or as a live page."""

import argparse

from drivetrain.core.display import format_bytes
from drivetrain.core.errors import ConfigError, ExperimentError
from drivetrain.core.locking import is_locked
from drivetrain.core.types import Settings
from drivetrain.experiment.cli.listing import DIRECTION, SEVERAL_HELP
from drivetrain.experiment.cli.output import STATE_STYLES, indented, print_either, print_json, print_lines, print_table
from drivetrain.experiment.cli.runs import find_all_runs, find_run, find_sweep, locate
from drivetrain.experiment.command_line import JSON, argument
from drivetrain.experiment.directions import read_directions
from drivetrain.experiment.records import DEFAULT_PLACE, read_remarks, short_id
from drivetrain.experiment.reports.gather import RunData, duration, environment_of, gather_run, moment

SHOWN_LOG_LINES = 10
WATCH_HELP = "serve the page on this machine and keep it up to date, like board"
REPORT_HELP = "the file to write (default: report.html in the run folder; in the current folder for several runs)"

PORT = argument("--port", type=int, metavar="N", help="the port of the live page (default: a free one)")

ARGUMENTS = {
    "show": [argument("run", metavar="RUN", help="the folder or short id of a run or a sweep"), DIRECTION, JSON],
    "report": [
        argument("runs", nargs="+", metavar="RUN", help=SEVERAL_HELP),
        argument("--output", metavar="FILE", help=REPORT_HELP),
        argument("--watch", action="store_true", help=WATCH_HELP),
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


def show(arguments: argparse.Namespace) -> None:
    """Show one run, or the trials of a sweep."""
    from drivetrain.experiment.cli.sweep import print_result, resume_line
    from drivetrain.experiment.sweeps.result import read_sweep

    sweep = find_sweep(arguments.run)
    if sweep is not None:
        result = read_sweep(sweep) if is_locked(sweep) else read_sweep(sweep).without_running()
        print_result(result, arguments.json)
        if not arguments.json and any(trial.status in ("asked", "interrupted") for trial in result):
            print_lines(resume_line(sweep))
        return
    run = gather_run(find_run(arguments.run).folder, verify="full", directions=read_directions(arguments.direction))
    if arguments.json:
        print_json(_as_data(run))
    else:
        _print_run(run)


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
        "environment": environment_of(record.manifest),
        "plan": record.manifest.get("plan"),
        "metrics": run.metrics(),
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
    found = environment_of(record.manifest).items()
    print_table(["environment", ""], [(name, str(value)) for name, value in found if value not in (None, "")])
    if record.manifest.get("plan"):
        print_table(["plan"], [[record.manifest["plan"]]])
    if run.curves:
        metrics = [(tag, *entry.values()) for tag, entry in run.metrics().items()]
        print_table(["metric", "last", "best", "at step", "values"], metrics)
    if run.checkpoints:
        lines = []
        for line in run.checkpoints:
            epoch, step = line.progress.get("ep"), line.progress.get("st")
            lines.append((line.name, epoch, step, format_bytes(line.size), line.problem or "valid"))
        print_table(["checkpoint", "epoch", "step", "size", "state"], lines, styles={"valid": "green"})
    for note in run.notes:
        print_lines(note, style="yellow")
    if run.log_tail:
        print_lines("last lines of the log", style="bold")
        print_lines(*run.log_tail.splitlines()[-SHOWN_LOG_LINES:])


def report(arguments: argparse.Namespace) -> None:
    """Write the report, or serve it."""
    from drivetrain.experiment.reports.page import write_report

    if arguments.watch:
        if arguments.output is not None:
            raise ConfigError("--output writes a file and --watch serves a page. Use one of them.")
        board(arguments)
        return
    if arguments.port is not None:
        raise ConfigError("--port sets the port of a live page. Add --watch.")
    folders = [record.folder for record in find_all_runs(arguments.runs)]
    path = write_report(folders, arguments.output, directions=read_directions(arguments.direction)).resolve()
    print_either(arguments.json, {"report": str(path), "runs": [str(folder) for folder in folders]}, str(path))


def board(arguments: argparse.Namespace) -> None:
    """Serve the report of active runs until Ctrl-C; runs that start later appear too."""
    from drivetrain.experiment.reports.live import serve

    places = [locate(name) for name in arguments.runs or [DEFAULT_PLACE]]
    for place in places:
        if not place.is_dir():
            raise ExperimentError(f"there is no folder {place}. Give a run, or the --output-dir of your runs.")
    directions = read_directions(arguments.direction)
    serve(places, directions=directions, port=arguments.port or 0, prints_json=arguments.json)
