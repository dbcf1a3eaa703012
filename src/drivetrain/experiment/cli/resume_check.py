"""`drivetrain doctor TARGET --resume-check N`: does this program, killed and resumed, end where it would have ended?

A function that returns a Trainer is checked by `verify_resume`. An experiment is started three times, each in a process of its
own: once for N steps; once until it has saved after half of them and is then killed; and once more to resume that run and do the rest.
The two last checkpoints must hold the same, to the bit.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Settings
from drivetrain.experiment.cli.output import Check
from drivetrain.experiment.cli.targets import find_experiment, find_target
from drivetrain.experiment.processes import LAUNCH_VARIABLES

LEAST_STEPS = 4
SECONDS = 600
SEED = 20_240_229
ENDED_EARLY = 64
"""Exit status of a process whose experiment ended before it reached the number of steps."""
NOT_STATE = ("_wct", "elapsed", "seconds", "time")
"""Names of plain values that are durations, which differ from run to run."""


def check_resume(target: str, num_steps: int, words: list[str]) -> Iterator[Check]:
    """Yield the verdict for a target."""
    if num_steps < LEAST_STEPS:
        raise ConfigError(
            f"--resume-check {num_steps}: expected at least {LEAST_STEPS} steps, half before and half after the kill."
        )
    from drivetrain.experiment.experiments import Experiment, ExperimentGroup

    found = find_target(target)
    if isinstance(found, Experiment | ExperimentGroup):
        if not hasattr(signal, "SIGKILL"):
            raise ConfigError(
                "this system cannot kill an experiment as the check does. Give a function that returns a Trainer."
            )
        yield from _check_experiment(target, num_steps, words)
    elif callable(found):
        yield _check_factory(found, target, num_steps)
    else:
        raise ConfigError(
            f"{target} is a {type(found).__name__}; expected an experiment, or a function that returns a Trainer."
        )


def _check_factory(build: Callable[[], Any], target: str, num_steps: int) -> Check:
    """Check a function that returns a Trainer, or a Trainer, its training data and a dict of further arguments of `train`."""
    from drivetrain.train.trainer import Trainer
    from drivetrain.train.verification import verify_resume

    made = build()
    parts = made if isinstance(made, tuple) else (made,)
    if not isinstance(parts[0], Trainer) or len(parts) > 3:
        raise ConfigError(
            f"{target}() returned {type(made).__name__}. Expected a Trainer made with train_dataloader=..., or "
            "(trainer, train_dataset), or (trainer, train_dataset, {arguments of train})."
        )
    dataset = parts[1] if len(parts) > 1 else None
    options = dict(parts[2]) if len(parts) > 2 else {}

    def fresh() -> Any:
        again = build()
        return again[0] if isinstance(again, tuple) else again

    with redirect_stdout(sys.stderr):  # what the trainers print must not get between the checks
        verdict = verify_resume(fresh, dataset, num_steps, **options)
    remedy = "" if verdict.is_exact else "give what differs a state, or --deterministic strict on a GPU"
    return Check(verdict.is_exact, "resume", str(verdict), remedy)


def _check_experiment(target: str, num_steps: int, words: list[str]) -> Iterator[Check]:
    half = num_steps // 2
    with tempfile.TemporaryDirectory(prefix="drivetrain-resume-check-") as place:
        whole, broken = Path(place, "whole"), Path(place, "broken")
        stages = (
            (f"{num_steps} steps", whole, "stop", num_steps),
            (f"kill after {half} steps", broken, "kill", half),
            ("resume", broken, "stop", num_steps - half),
        )
        for name, folder, ending, count in stages:
            problem = _start(target, words, folder, ending, count)
            if problem is not None:
                yield Check(False, name, problem)
                return
            if folder is whole:
                yield Check(True, name, "done without interruption")
            elif ending == "kill":
                yield Check(True, "kill -9", f"one step after the checkpoint of step {half}")
        yield _verdict(whole, broken, num_steps)


def _start(target: str, words: list[str], folder: Path, ending: str, num_steps: int) -> str | None:
    """Run a part of the experiment in its own process; return what went wrong, None if it ended as it should."""
    launched = {name for name in os.environ if name in LAUNCH_VARIABLES or name.startswith("SLURM_")}
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    command = [sys.executable, "-m", "drivetrain.experiment.cli.resume_check", target, str(folder), ending]
    command += [str(num_steps), str(SEED), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {SECONDS} s; use fewer steps"
    if done.returncode == ENDED_EARLY:
        return f"the experiment ended before {num_steps} steps were done; use fewer steps, or train longer"
    if done.returncode != {"stop": 143, "kill": -9}[ending]:
        last = "\n".join(done.stderr.strip().splitlines()[-12:])
        return f"it ended with status {done.returncode}:\n{last}"
    return None


def _verdict(whole: Path, broken: Path, num_steps: int) -> Check:
    from drivetrain.core.errors import CheckpointError
    from drivetrain.train.verification import difference

    try:
        a, b = _newest(whole), _newest(broken)
    except CheckpointError as error:
        return Check(False, "resume", f"no checkpoint to compare: {error}", "use a Trainer or a Checkpointer")
    for name in dict.fromkeys((*a, *b)):
        if difference(a.get(name), b.get(name)) is not None:
            found = f"bit-exact: no; first difference: {name}"
            return Check(False, "resume", found, "give what differs a state, or --deterministic strict on a GPU")
    return Check(True, "resume", f"bit-exact: yes ({num_steps} steps, killed after {num_steps // 2}, {len(a)} values)")


def _newest(folder: Path) -> Settings:
    """Return everything in the newest checkpoint of a run, by path."""
    from drivetrain.checkpoint.reader import CheckpointReader
    from drivetrain.train.verification import flat_values

    loaded = CheckpointReader().read_newest(folder / "checkpoints")
    rng = {} if loaded.rank is None else loaded.rank.rng
    found = flat_values({"state": loaded.state, "random numbers": rng})
    return {path: value for path, value in found.items() if not _is_of_one_process(path, value, found)}


def _is_of_one_process(path: str, value: object, found: Settings) -> bool:
    """Return whether a value differs from run to run: a duration, or a Recorder's place in its file, which counts all rows."""
    if isinstance(value, float) and any(word in path for word in NOT_STATE):
        return True
    owner = f"{path.rpartition('.')[0].removesuffix('.runs')}."
    own = {other.removeprefix(owner).partition(".")[0] for other in found if other.startswith(owner)}
    is_recorder = {"count", "lines"} <= own <= {"count", "last", "lines", "runs"}
    return is_recorder and path.removeprefix(owner).partition(".")[0] in ("lines", "runs")


def signalling(
    method: Callable[..., object], signals: Mapping[int, int], steps: Iterator[int]
) -> Callable[..., object]:
    """Return a method that counts its calls, and first sends this process the signal of the step, if it has one."""

    def counted(*args: object, **kwargs: object) -> object:
        if number := signals.get(next(steps)):
            os.kill(os.getpid(), number)
        return method(*args, **kwargs)

    return counted


def main(target: str, folder: str, ending: str, at: str, seed: str, *words: str) -> int:
    """Run the experiment of `target` in `folder`, continuing what is there, up to the step asked for."""
    from drivetrain.checkpoint.checkpointer import Checkpointer
    from drivetrain.experiment.command_line import parse
    from drivetrain.experiment.resolve import Given, resolve
    from drivetrain.experiment.running import run_experiment
    from drivetrain.train.trainer import Trainer

    # A step ends where a Trainer or Checkpointer handles signals: stop at it, or save at it and be killed at the next one.
    last, steps = int(at), itertools.count(1)
    signals = {last: signal.SIGTERM} if ending == "stop" else {last: signal.SIGUSR1, last + 1: signal.SIGKILL}
    for owner, method in ((Trainer, "_at_boundary"), (Checkpointer, "step")):
        setattr(owner, method, signalling(getattr(owner, method), signals, steps))
    experiment, rest = find_experiment(target, list(words))
    given = {"random_seed": Given(int(seed), "run"), **parse(rest, experiment.parameters).given}
    run_experiment(experiment, resolve(experiment.parameters, given, experiment.defaults), folder=Path(folder))
    return ENDED_EARLY


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
