"""`drivetrain run`, `launch` and `demo`: run an experiment; print with what and where it runs, and then its result."""

import argparse
import shlex
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.display import printable_lines
from drivetrain.core.errors import DrivetrainError, ParameterError
from drivetrain.core.secret import hide
from drivetrain.experiment.cli.output import (
    STATE_STYLES,
    own_command,
    print_json,
    print_lines,
    print_table,
    prints_to_stderr,
)
from drivetrain.experiment.cli.targets import TARGET_HELP, find_experiment
from drivetrain.experiment.cli.verbs import FAILED, INTERRUPTED
from drivetrain.experiment.command_line import BAD_INPUT, JSON, argument, print_error, usage_line

if TYPE_CHECKING:
    from drivetrain.experiment.experiments import Experiment
    from drivetrain.experiment.resolve import Resolved

OPTIONS_HELP = "options of the experiment; --help after TARGET lists them"
LAUNCH_OPTIONS = {
    "nproc_per_node": "processes to start on this machine; auto: one per accelerator (default: auto)",
    "nnodes": "number of machines",
    "node_rank": "index of this machine, from 0",
    "master_addr": "address of machine 0",
    "master_port": "a free port on machine 0",
    "max_restarts": "how many times to restart the group after a process dies",
}

_TARGET = [
    argument("target", metavar="TARGET", help=TARGET_HELP),
    argument("options", nargs=argparse.REMAINDER, metavar="--option VALUE", help=OPTIONS_HELP),
]
ARGUMENTS = {
    "run": [JSON, *_TARGET],
    "launch": [
        *(
            argument(f"--{name.replace('_', '-')}", metavar="ADDRESS" if "addr" in name else "N", help=text)
            for name, text in LAUNCH_OPTIONS.items()
        ),
        JSON,
        *_TARGET,
    ],
    "demo": [
        argument("--epochs", type=int, default=12, help="passes (default: %(default)s); fails below 97%% accuracy"),
        argument("--output-dir", default="output", help="where to create the run folder (default: %(default)s)"),
        argument("--seed", type=int, default=0, help="the run's seed (default: %(default)s)"),
    ],
}


def run(arguments: argparse.Namespace) -> int:
    """Run an experiment in this process, or on several if its options request it."""
    experiment, words = find_experiment(arguments.target, arguments.options)
    return start_words(experiment, words, program=_command("run", arguments, words), as_json=arguments.json)


def launch(arguments: argparse.Namespace) -> int:
    """Run an experiment on several processes."""
    experiment, words = find_experiment(arguments.target, arguments.options)
    program = _command("launch", arguments, words)
    wanted = {name: getattr(arguments, name) for name in LAUNCH_OPTIONS}
    wanted["nproc_per_node"] = wanted["nproc_per_node"] or "auto"
    # As options of the experiment, before its own, so that values are checked and recorded by the one rule there is.
    options = [f"--{name.replace('_', '-')}={value}" for name, value in wanted.items() if value is not None]
    return start_words(experiment, ["--distributed", *options, *words], program=program, as_json=arguments.json)


def _command(verb: str, arguments: argparse.Namespace, words: list[str]) -> str:
    """Return the command without the words that are options of the experiment: in a group it names the experiment."""
    return shlex.join(("drivetrain", verb, arguments.target, *arguments.options[: len(arguments.options) - len(words)]))


def demo(arguments: argparse.Namespace) -> int:
    """Run the demonstration, which is an experiment like any other."""
    from drivetrain.experiment.demo import run_demo

    return run_demo(epochs=arguments.epochs, output_dir=arguments.output_dir, seed=arguments.seed)


def start_words(experiment: Any, words: list[str], *, program: str, as_json: bool) -> int:
    """Start an experiment with the options of a command line."""
    from drivetrain.experiment.experiments import Experiment

    if not isinstance(experiment, Experiment):  # a group that was asked for its help
        experiment.cli(words, program=program)
        return 0
    try:
        found = experiment._read_command(words, program)
    except ParameterError as error:
        print_error(error, usage_line(program))
        return BAD_INPUT
    if found is None:
        return 0
    return start(experiment, found[0], argv=[*shlex.split(program), *words], force=found[1], as_json=as_json)


def start(
    experiment: "Experiment", resolved: "Resolved", *, argv: list[str], force: bool = False, as_json: bool = False
) -> int:
    """Start an experiment with resolved parameters and return the exit status."""
    from drivetrain.experiment.resume import look_ahead
    from drivetrain.experiment.run_folder import check_is_new, run_path
    from drivetrain.experiment.running import run_experiment
    from drivetrain.runtime.environment import launched_world

    record, world = look_ahead(experiment, resolved, force=force).record, launched_world()
    folder = None if record is None else record.folder
    if record is None and (resolved.values["node_rank"] if world is None else world.rank) == 0:
        folder = run_path(resolved.values["output_dir"], experiment.name, resolved.values["run_name"])
        check_is_new(folder)
    if not as_json:
        _print_beginning(experiment, resolved, folder)
    status, is_ready = 0, threading.Event()
    new = folder if record is None else None
    try:
        with prints_to_stderr() if as_json else nullcontext():
            run_experiment(experiment, resolved, argv=argv, force=force, folder=new, when_ready=is_ready.set)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else FAILED
    except Exception as error:
        if isinstance(error, DrivetrainError) and not is_ready.is_set():
            raise  # bad input
        _print_failure(error, folder, resolved.hidden())
        status = FAILED
    _print_ending(folder, as_json)
    return status


def _print_beginning(experiment: "Experiment", resolved: "Resolved", folder: Path | None) -> None:
    from drivetrain.experiment.parameters import wants_cpu
    from drivetrain.runtime.device import choose_device

    print_lines(f"experiment  {experiment.name}", f"run folder  {folder or 'as rank 0 names it'}")
    values = resolved.values
    if values["distributed"]:
        print_lines(
            f"processes   {values['nproc_per_node']} on each of {values['nnodes']} node(s), {values['max_restarts']} restarts allowed"
        )
    print_lines(f"device      {'cpu' if wants_cpu(values) else choose_device(values['device'])}")
    shown = resolved.shown()
    given = [(name, shown[name], resolved.origins[name]) for name in values if resolved.is_declared(name)]
    if given:
        print_table(["parameter", "value", "from"], given)


def _print_failure(error: Exception, folder: Path | None, hidden: Iterable[str]) -> None:
    """Print the traceback from the experiment's own function on, or which rank failed first."""
    from drivetrain.experiment.run_folder import log_file

    rank = getattr(error, "rank", None)
    if rank is not None:
        log = None if folder is None else log_file(folder, rank)
        place = f"; its log: {log}" if log is not None and log.exists() else ""
        print_error(hide(str(error), hidden), f"rank {rank} failed first{place}")
        return
    package, trace = str(Path(__file__).parents[2]), error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(package):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    print(printable_lines(hide("".join(lines), hidden)), end="", file=sys.stderr)


def _print_ending(folder: Path | None, as_json: bool) -> None:
    from drivetrain.experiment.records import is_run, read_run
    from drivetrain.experiment.reports.gather import duration, read_checkpoints

    if folder is None or not is_run(folder):
        return
    record = read_run(folder)
    checkpoints = read_checkpoints(record.checkpoints_path, "off")
    best = next((line for line in checkpoints if line.is_best), None)
    kept = best or next((line for line in checkpoints if line.is_last), None)
    checkpoint = "best_checkpoint" if best else "last_checkpoint"
    data = {
        "state": record.state,
        "result": record.result,
        "seconds": record.status.get("seconds"),
        "restarts": record.status.get("restarts"),
        "plan": record.manifest.get("plan"),
        checkpoint: None if kept is None else str(record.checkpoints_path / kept.name),
        "run_folder": str(folder),
        "error": record.status.get("error"),
    }
    if as_json:
        print_json(data)
        return
    titles = {name: name.replace("_", " ") for name in data} | {"seconds": "duration"}
    data["seconds"] = duration(data["seconds"])
    data["restarts"] = data["restarts"] or None
    rows = [(titles[name], value) for name, value in data.items() if value is not None]
    print_table(["", ""], rows, styles=STATE_STYLES)
    hint = "report" if record.has_ended else "resume"
    print_lines(f"next: {own_command()} {hint} {shlex.quote(str(folder))}")
