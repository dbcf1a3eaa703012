"""`drivetrain demo`: the demonstration, which is an experiment like any other."""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default: %(default)s)")
    parser.add_argument("--output-dir", default="output", help="where the run folder is made (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the run's seed (default: %(default)s)")


def execute(arguments: argparse.Namespace) -> int:
    """Run the demonstration."""
    from drivetrain.experiment.demo import run_demo

    return run_demo(epochs=arguments.epochs, output_dir=arguments.output_dir, seed=arguments.seed)
