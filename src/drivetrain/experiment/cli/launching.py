"""`drivetrain launch`: `run` on several processes of this machine, or of several machines."""

import argparse

from drivetrain.experiment.cli.output import add_json_option
from drivetrain.experiment.cli.running import OPTIONS_HELP, start_words
from drivetrain.experiment.cli.targets import TARGET_HELP, find_experiment

LAUNCH_OPTIONS = {
    "nproc_per_node": "processes to start here; auto: one per accelerator (default: auto)",
    "nnodes": "number of machines",
    "node_rank": "number of this machine, from 0",
    "master_addr": "address of machine 0",
    "master_port": "a free port on machine 0",
    "max_restarts": "how often the group is started again after one of its processes has died",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `launch`."""
    for name, text in LAUNCH_OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar="N" if "addr" not in name else "ADDRESS", help=text)
    add_json_option(parser)
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="--option VALUE", help=OPTIONS_HELP)


def execute(arguments: argparse.Namespace) -> int:
    """Run an experiment on several processes."""
    experiment, words = find_experiment(arguments.target, arguments.options)
    wanted = {name: getattr(arguments, name) for name in LAUNCH_OPTIONS}
    wanted["nproc_per_node"] = wanted["nproc_per_node"] or "auto"
    # As options of the experiment, before its own, so that values are checked and recorded by the one rule there is.
    options = [
        word for name, value in wanted.items() if value is not None for word in ("--" + name.replace("_", "-"), value)
    ]
    program = f"drivetrain launch {arguments.target}"
    return start_words(experiment, ["--distributed", *options, *words], program=program, as_json=arguments.json)
