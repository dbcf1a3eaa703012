"""`drivetrain doctor TARGET --resume-check N`: does this program, killed and resumed, end where it would have ended?

A function that returns a Trainer is checked by `verify_resume`. An experiment is started three times, each in a process of its
own: once for N steps; once until it has saved after half of them and is then killed; and once more to resume that run and do the rest.
The two last checkpoints must hold the same, to the bit.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Settings
from drivetrain.experiment.cli.output import Check
from drivetrain.experiment.cli.targets import find_experiment, find_target

if TYPE_CHECKING:
    from torch import Tensor

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
        outcome = _start(target, words, whole, "stop", num_steps)
        if outcome is not None:
            yield Check(False, f"{num_steps} steps", outcome)
            return
        yield Check(True, f"{num_steps} steps", "done without interruption")
        outcome = _start(target, words, broken, "kill", half)
        if outcome is not None:
            yield Check(False, f"kill after {half} steps", outcome)
            return
        yield Check(True, "kill -9", f"one step after the checkpoint of step {half}")
        outcome = _start(target, words, broken, "stop", num_steps - half)
        if outcome is not None:
            yield Check(False, "resume", outcome)
            return
        yield _verdict(whole, broken, num_steps)


def _start(target: str, words: list[str], folder: Path, ending: str, num_steps: int) -> str | None:
    """Run a part of the experiment in its own process; return what went wrong, None if it ended as it should."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [
        sys.executable,
        "-m",
        "drivetrain.experiment.cli.resume_check",
        target,
        str(folder),
        ending,
        str(num_steps),
        str(SEED),
        *words,
    ]
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

    try:
        a, b = _newest(whole), _newest(broken)
    except CheckpointError as error:
        return Check(False, "resume", f"no checkpoint to compare: {error}", "use a Trainer or a Checkpointer")
    for name in dict.fromkeys((*a, *b)):
        if not _same(a.get(name), b.get(name)):
            found = f"bit-exact: no; first difference: {name}"
            return Check(False, "resume", found, "give what differs a state, or --deterministic strict on a GPU")
    return Check(
        True, "resume", f"bit-exact: yes ({num_steps} steps, killed after {num_steps // 2}, {len(a)} values compared)"
    )


def _newest(folder: Path) -> Settings:
    """Return everything in the newest checkpoint of a run, by path."""
    from drivetrain.checkpoint.reader import CheckpointReader

    loaded = CheckpointReader().read_newest(folder / "checkpoints")
    rng = {} if loaded.rank is None else loaded.rank.rng
    return _flat({"state": loaded.state, "random numbers": rng})


def _flat(value: object, path: str = "") -> Settings:
    if isinstance(value, dict):
        # A Recorder's place in its file counts the rows of the killed process too; what it recorded is compared.
        is_recorder = set(value) == {"count", "last", "lines", "runs"}
        items: Any = [(key, item) for key, item in value.items() if not (is_recorder and key in ("lines", "runs"))]
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {} if isinstance(value, float) and any(word in path for word in NOT_STATE) else {path: value}
    found: Settings = {}
    for key, item in items:
        found |= _flat(item, f"{path}.{key}" if path else str(key))
    return found


def _same(a: object, b: object) -> bool:
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        # Bytes are compared, because NaN equals nothing, itself included.
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    return type(a) is type(b) and repr(a) == repr(b)


def _bytes(tensor: "Tensor") -> "Tensor":
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Boundaries:
    """Counts the steps of one process, where a Trainer or Checkpointer handles signals, and sends the signal at an exact step."""

    def __init__(self, ending: str, at: int):
        self.ending, self.at, self.count = ending, at, 0

    def watch(self, owner: type, method: str) -> None:
        """Count the calls of one method."""
        original: Callable[..., object] = getattr(owner, method)

        def counted(this: object, *args: object, **kwargs: object) -> Any:
            self.passed()
            return original(this, *args, **kwargs)

        setattr(owner, method, counted)

    def passed(self) -> None:
        """Count a boundary: stop at it, or save at it and be killed at the next one."""
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGTERM if self.ending == "stop" else signal.SIGUSR1)
        elif self.count == self.at + 1 and self.ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def main(target: str, folder: str, ending: str, at: str, seed: str, *words: str) -> int:
    """Run the experiment of `target` in `folder`, continuing what is there, up to the step asked for."""
    from drivetrain.checkpoint.checkpointer import Checkpointer
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
