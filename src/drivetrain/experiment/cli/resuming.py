"""`drivetrain resume`: continue a run in its own folder; say first what will be run, then from where it goes on."""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ExperimentError, ParameterError, ResumeError
from drivetrain.core.locking import is_locked
from drivetrain.experiment.cli.output import add_json_option, print_lines, prints_to_stderr
from drivetrain.experiment.cli.places import find_run
from drivetrain.experiment.cli.running import start
from drivetrain.experiment.cli.targets import find_in_file
from drivetrain.experiment.cli.trust import check_trust, describe_source, source_of
from drivetrain.experiment.records import RunRecord

KEPT = ("distributed", "nproc_per_node", "nnodes", "max_restarts", "device", "deterministic")
"""How a run is started is no part of its identity; it is continued the way it was begun unless --set says otherwise."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `resume`."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or one checkpoint in it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a parameter; may be repeated"
    )
    parser.add_argument(
        "--force", action="store_true", help="accept changes of parameters that are not marked resumable"
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the program although somebody else may have written its file"
    )
    add_json_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Continue a run."""
    record = find_run(arguments.run)
    if record.is_live and is_locked(record.folder, is_patient=True):
        raise ResumeError(f"the run {record.folder} is running now: a live process holds its lock. Wait for it to end.")
    source = source_of(record)
    with prints_to_stderr() if arguments.json else nullcontext():
        print_lines(*describe_source(record, source))  # before anything of it is run
    if not arguments.trust:
        check_trust(source)
    experiment = _experiment_in(source, record)
    resolved = _resolved(experiment, record, arguments)
    if not arguments.json:
        _print_place(record)
    argv = ["drivetrain", "resume", arguments.run, *(word for change in arguments.set for word in ("--set", change))]
    return start(experiment, resolved, argv=argv, force=arguments.force, as_json=arguments.json)


def _experiment_in(source: Path, record: RunRecord) -> Any:
    """Return the experiment of a run from the file it was defined in; this runs the file."""
    try:
        return find_in_file(source, record.experiment)
    except ExperimentError as error:
        raise ResumeError(
            f"the experiment {record.experiment!r} of {record.folder} is no longer where it was: {error} Start the program from its new "
            f"place with --resume {record.folder}."
        ) from error


def _resolved(experiment: Any, record: RunRecord, arguments: argparse.Namespace) -> Any:
    from drivetrain.experiment.resolve import Given, resolve

    given = {}
    for name in KEPT:
        parameter, value = experiment.parameters.get(name), record.parameters.get(name)
        if parameter is not None and value not in (None, parameter.default):
            given[name] = Given(value, "run")
    for change in arguments.set:
        name, separator, text = change.partition("=")
        name = name.strip().replace("-", "_")
        if not separator or name not in experiment.parameters:
            from drivetrain.experiment.resolve import unknown_parameter

            problem = "expected NAME=VALUE" if not separator else unknown_parameter(name, experiment.parameters)
            raise ParameterError(f"--set {change}: {problem}")
        multiple = experiment.parameters[name].multiple
        given[name] = Given(text.split(",") if multiple else text, "cli", is_text=True)
    given["resume"] = Given(arguments.run, "cli", is_text=True)
    return resolve(experiment.parameters, given, experiment.defaults)


def _print_place(record: RunRecord) -> None:
    """Say which checkpoint is continued from, which were passed over and why."""
    from drivetrain.experiment.reports.gather import read_checkpoints

    lines = read_checkpoints(record.checkpoints_path, "full")
    for line in lines:
        if line.problem is not None:
            print_lines(f"passed over  {line.name}: {line.problem}", style="yellow")
    valid = [line for line in lines if line.problem is None]
    if not valid:
        print_lines("checkpoint   none that is valid: the run begins from its start")
        return
    progress = valid[-1].progress
    place = ", ".join(
        f"{word} {progress[unit]:g}"
        for unit, word in (("ep", "epoch"), ("st", "step"), ("sp", "sample"))
        if unit in progress
    )
    print_lines(f"checkpoint   {valid[-1].name}", f"continues at {place}")
