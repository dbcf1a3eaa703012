"""`drivetrain resume`: continue a run, or a sweep, in its own folder.

This imports the file in which the run's experiment is defined, and importing a file runs it. The run folder, which may come from
somebody else, names that file. So the file is printed first, and one that others could have written is not run without --trust.
"""

import argparse
import functools
import os
import stat
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import ExperimentError, ParameterError, ResumeError
from drivetrain.core.locking import is_locked
from drivetrain.experiment.cli.output import print_lines, prints_to_stderr
from drivetrain.experiment.cli.run import start
from drivetrain.experiment.cli.runs import find_run, find_sweep, locate
from drivetrain.experiment.cli.targets import find_in_file
from drivetrain.experiment.command_line import JSON, argument, text_given
from drivetrain.experiment.records import RunRecord, find_runs, is_run
from drivetrain.experiment.run_folder import hash_source

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment
    from drivetrain.experiment.resolve import Resolved

KEPT = ("distributed", "nproc_per_node", "nnodes", "max_restarts", "device", "deterministic")
"""How a run is started is not part of its identity. It resumes the same way unless --set changes that."""


ARGUMENTS = {
    "resume": [
        argument("run", metavar="RUN", help="the folder or short id of a run or a sweep, or a checkpoint of a run"),
        argument(
            "--set", action="append", default=[], metavar="NAME=VALUE", help="change a parameter; may be repeated"
        ),
        argument("--force", action="store_true", help="accept changes of parameters that are not marked resumable"),
        argument("--trust", action="store_true", help="run the program even if someone else may have written its file"),
        JSON,
    ]
}


def resume(arguments: argparse.Namespace) -> int:
    """Continue a run."""
    folder = find_sweep(arguments.run)
    if folder is not None:
        return _resume_sweep(folder, arguments)
    record = find_run(arguments.run)
    if record.is_live and is_locked(record.folder, assume_alive=True):
        raise ResumeError(f"the run {record.folder} is running now: a live process holds its lock. Wait until it ends.")
    experiment = _trusted_experiment(record, arguments)
    resolved = _resolved(experiment, record, arguments)
    if not arguments.json:
        _print_place(record)
    argv = ["drivetrain", "resume", arguments.run, *(word for change in arguments.set for word in ("--set", change))]
    return start(experiment, resolved, argv=argv, force=arguments.force, as_json=arguments.json)


def _resume_sweep(folder: Path, arguments: argparse.Namespace) -> int:
    """Continue a sweep with the settings in its journal; its trials name the program."""
    from drivetrain.experiment.cli.sweep import run_sweep
    from drivetrain.experiment.sweeps.sweeping import continue_sweep

    record = next(find_runs(folder), None)
    if record is None:
        raise ResumeError(
            f"the sweep {folder} has no trial yet that names its program. Start it again with `drivetrain sweep ...`."
        )
    experiment = _trusted_experiment(record, arguments)
    given = dict(_changes(experiment, arguments))
    for name in given:
        if name not in experiment.parameters.secrets:
            raise ParameterError(
                f"--set {name}=...: a sweep resumes with its own parameters. Only secrets, which it does not store, can be set."
            )
    return run_sweep(functools.partial(continue_sweep, experiment, folder, params=given), arguments.json)


def _trusted_experiment(record: RunRecord, arguments: argparse.Namespace) -> "Experiment":
    """Print what continuing a run will execute, check who can have written it, and load it, which runs the file."""
    named = record.manifest.get("source")
    if not named:
        raise ResumeError(f"the run {record.folder} names no file. Start the program with --resume {record.folder}.")
    if Path(named).suffix != ".py":  # a module's name would be looked for in the present folder
        raise ResumeError(f"the run {record.folder} names the file {named!r}, which is not a Python file (.py).")
    source = Path(os.path.abspath(named))
    with prints_to_stderr() if arguments.json else nullcontext():
        print_lines(*describe_source(record, source))  # before anything of it is run
    if not arguments.trust and (reasons := find_untrusted_reasons(source)):
        raise ResumeError(
            f"{source} is not run: {'; '.join(reasons)}. Read the file; if you trust it, resume again with --trust, or start your own "
            "copy of the program with --resume."
        )
    try:
        return find_in_file(source, record.experiment, record.manifest.get("function"))
    except ExperimentError as error:
        raise ResumeError(
            f"the experiment {record.experiment!r} of {record.folder} has moved: {error} Start the program from its new "
            f"location with --resume {record.folder}."
        ) from error


def _changes(experiment: "Experiment", arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield name and text of each --set."""
    from drivetrain.experiment.resolve import unknown_parameter

    for change in arguments.set:
        name, separator, text = change.partition("=")
        name = name.strip().replace("-", "_")
        if not separator or name not in experiment.parameters:
            problem = "expected NAME=VALUE" if not separator else unknown_parameter(name, experiment.parameters)
            raise ParameterError(f"--set {change}: {problem}")
        yield name, text


def _resolved(experiment: "Experiment", record: RunRecord, arguments: argparse.Namespace) -> "Resolved":
    from drivetrain.experiment.resolve import Given, resolve

    given = {}
    for name in KEPT:
        parameter, value = experiment.parameters.get(name), record.parameters.get(name)
        if parameter is not None and value not in (None, parameter.default):
            given[name] = Given(value, "run")
    for name, text in _changes(experiment, arguments):
        given[name] = Given(text_given(experiment.parameters[name], text), "cli", is_text=True)
    given["resume"] = Given(str(locate(arguments.run)), "cli", is_text=True)
    return resolve(experiment.parameters, given, experiment.defaults)


def _print_place(record: RunRecord) -> None:
    """Print the checkpoint to continue from, and those that are skipped and why."""
    from drivetrain.experiment.reports.gather import read_checkpoints

    newest = None
    for line in read_checkpoints(record.checkpoints_path, "full"):
        if line.problem is None:
            newest = line
        else:
            print_lines(f"skipped      {line.name}: {line.problem}", style="yellow")
    if newest is None:
        print_lines("checkpoint   no valid one: the run starts from the beginning")
        return
    words, progress = {"ep": "epoch", "st": "step", "sp": "sample"}, newest.progress
    place = ", ".join(f"{word} {progress[unit]:g}" for unit, word in words.items() if unit in progress)
    print_lines(f"checkpoint   {newest.name}", f"continues at {place}")


def describe_source(record: RunRecord, path: Path) -> list[str]:
    """Return lines about what resuming a run will execute: file, function, command, and whether the file has changed."""
    now, then = hash_source(path), record.manifest.get("source_sha256")
    if then is None:
        change = f"sha256 {now}; the run did not record the file's hash, so changes cannot be detected"
    elif then == now:
        change = f"sha256 {now}, unchanged since the run"
    else:
        change = f"CHANGED since the run: sha256 was {then}, is {now}"
    return [
        f"file        {path}",
        f"            {change}",
        f"function    {record.manifest.get('function') or record.experiment}",
        f"command     {' '.join(map(str, record.manifest.get('argv') or ['not recorded']))}",
    ]


def find_untrusted_reasons(path: Path) -> list[str]:
    """Return why someone else may have written a file; none where only this user or root can have."""
    real = path.resolve()
    reasons = [
        f"it is inside the run folder {folder}, so whoever wrote the run also wrote this file"
        for folder in dict.fromkeys((*path.parents, *real.parents))
        if is_run(folder)
    ]
    if not hasattr(os, "geteuid"):  # Windows, where these permissions mean nothing
        return reasons
    try:
        facts = real.stat()
        folders = [(folder, folder.stat().st_mode) for folder in real.parents]
    except OSError:
        return reasons  # it does not exist, which is reported when it is loaded
    if facts.st_uid not in (os.geteuid(), 0):
        reasons.append(f"it belongs to another user ({facts.st_uid})")
    if facts.st_mode & stat.S_IWOTH:
        reasons.append("every user can write to it")
    open_folders = [folder for folder, mode in folders if mode & stat.S_IWOTH and not mode & stat.S_ISVTX]
    reasons += [f"every user can replace files in {folder}" for folder in open_folders]
    return reasons
