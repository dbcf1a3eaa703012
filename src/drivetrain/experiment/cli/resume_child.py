"""One process of a resume check: runs an experiment and ends it at an exact step, in good order or by force.

Steps are counted where a Trainer or a Checkpointer stands between two of them, which is where signals are obeyed. The signal is sent
from inside, at the count asked for, so that all parts of a check end at the same place.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENDED_EARLY = 64
"""Exit status when the experiment was over before the count was reached."""


class Boundaries:
    """Counts step boundaries and acts at one of them."""

    def __init__(self, ending: str, at: int):
        self.ending, self.at, self.count = ending, at, 0

    def watch(self, owner: type, method: str) -> None:
        """Count the calls of one method."""
        original: Callable[..., Any] = getattr(owner, method)

        def counted(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.passed()
            return original(this, *args, **kwargs)

        setattr(owner, method, counted)

    def passed(self) -> None:
        """Stand at a boundary: stop here; or save here, and die at the next one."""
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGTERM if self.ending == "stop" else signal.SIGUSR1)
        elif self.count == self.at + 1 and self.ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def main(target: str, folder: str, ending: str, at: str, seed: str, *words: str) -> int:
    """Run the experiment of `target` in `folder`, continuing what is there, up to the step asked for."""
    from drivetrain.checkpoint.checkpointer import Checkpointer
    from drivetrain.experiment.cli.targets import find_experiment
    from drivetrain.experiment.command_line import parse
    from drivetrain.experiment.resolve import Given, resolve
    from drivetrain.experiment.running import run_experiment
    from drivetrain.train.trainer import Trainer

    boundaries = Boundaries(ending, int(at))
    boundaries.watch(Trainer, "_at_boundary")
    boundaries.watch(Checkpointer, "step")
    experiment, rest = find_experiment(target, list(words))
    given = {"random_seed": Given(int(seed), "run"), **parse(rest, experiment.parameters).given}
    run_experiment(experiment, resolve(experiment.parameters, given, experiment.defaults), folder=Path(folder))
    return ENDED_EARLY


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
