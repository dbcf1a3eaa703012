"""The `drivetrain` command, also reached as `python -m drivetrain`."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    from drivetrain.experiment.cli.verbs import run_command

    return run_command(argv)


if __name__ == "__main__":
    sys.exit(main())
