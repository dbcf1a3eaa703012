"""`drivetrain doctor`: without an argument the machine, with a run its health, with a target whether it resumes exactly."""

import argparse
from pathlib import Path

from drivetrain.core.errors import ConfigError
from drivetrain.experiment.cli.checks import print_checks
from drivetrain.experiment.cli.output import add_json_option
from drivetrain.experiment.cli.places import DEFAULT_PLACE, find_run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument(
        "--resume-check",
        type=int,
        metavar="N",
        help="run TARGET for N steps, and again with a kill half-way, and compare",
    )
    parser.add_argument("--output-dir", default=DEFAULT_PLACE, help="where runs will be written (default: %(default)s)")
    add_json_option(parser)
    parser.add_argument("subject", nargs="?", metavar="RUN|TARGET", help="the folder of a run, or file.py:name")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="--option VALUE", help="options of the experiment TARGET"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Check what was asked for; 1 if something is wrong with it."""
    subject = arguments.subject
    if arguments.resume_check is not None:
        from drivetrain.experiment.cli.resume_check import check_resume

        if subject is None:
            raise ConfigError(
                "--resume-check needs a TARGET: an experiment, or a function that returns a Trainer, such as train.py:build."
            )
        return print_checks(check_resume(subject, arguments.resume_check, arguments.options), as_json=arguments.json)
    if arguments.options:
        raise ConfigError(
            f"{arguments.options[0]!r} is not understood here: options come before RUN, or belong to --resume-check N TARGET."
        )
    if subject is None:
        from drivetrain.experiment.cli.machine import check_machine

        return print_checks(check_machine(arguments.output_dir), as_json=arguments.json)
    if not Path(subject).exists() and (subject.endswith(".py") or ":" in subject):
        raise ConfigError(
            f"{subject} is no run folder. To check whether a program resumes exactly: drivetrain doctor --resume-check 20 {subject}"
        )
    from drivetrain.experiment.cli.health import check_run

    return print_checks(check_run(find_run(subject)), as_json=arguments.json)
