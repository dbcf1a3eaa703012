"""A search inside a search's own trial is refused at once.

`spawn` runs a script's top level anew in every child. A script that calls Drivetrain there, without a main guard, would start trials
inside of trials without end. Children carry a mark in their environment, and whatever would start one looks for it first.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.core.errors import ConfigError

MARK = "DRIVETRAIN_TRIAL"
"""The environment variable that says: this process is a trial's."""


def is_trial_process() -> bool:
    """Return whether this process was started to try a plan."""
    return MARK in os.environ


def refuse_inside_trial(what: str) -> None:
    """Raise in a trial's process: what starts trials, or trains, was called by a script's top level."""
    if is_trial_process():
        raise ConfigError(
            f"{what} was called inside a process that only tries a plan. Such a process runs the script's top level anew, so the call must "
            "stand under a main guard:\n\n    if __name__ == '__main__':\n        main()\n"
        )


@contextmanager
def marked_environment() -> Iterator[None]:
    """Mark the processes that are started meanwhile."""
    os.environ[MARK] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[MARK]
