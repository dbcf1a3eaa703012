"""The `drivetrain` command, also reached as `python -m drivetrain`."""

import argparse
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser; building it loads no torch."""
    from drivetrain import __version__

    parser = argparse.ArgumentParser(prog="drivetrain", description="Trains plain PyTorch models.")
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    demo = verbs.add_parser("demo", help="train a small classifier on built-in data, on whatever is here")
    demo.add_argument("--epochs", type=int, default=30, help="passes over the data (default: %(default)s)")
    demo.add_argument("--output-dir", default="output", help="where the run folder is made (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="the run's seed (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    arguments = build_parser().parse_args(argv)
    from drivetrain.experiment.demo import run_demo

    return run_demo(epochs=arguments.epochs, output_dir=arguments.output_dir, seed=arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
