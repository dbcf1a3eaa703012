"""Break runs and checkpoints on purpose, to see that nothing is lost.

    python -m drivetrain.checkpoint.chaos run --folder runs/a/checkpoints --kills 20 -- python train.py
    python -m drivetrain.checkpoint.chaos full 2000000 train.py            # the disk is full after 2 MB
    python -m drivetrain.checkpoint.chaos damage runs/a/checkpoints/checkpoint-ba200 --kind flip

`run` starts a command again and again and kills it, at random moments and in the middle of saves, then lets it
finish. A command that resumes by itself must end as if it had never been disturbed. The same functions serve the
tests of this library.
"""

import argparse
import errno
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from drivetrain.checkpoint import files
from drivetrain.checkpoint.layout import MANIFEST
from drivetrain.core.containers import with_attributes
from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.core.files import TEMPORARY

# Damage to a checkpoint that is on the disk.


def truncate_file(path: Path, chance: random.Random) -> str:
    """Truncate a file at a random position."""
    size = chance.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} was cut to {size} bytes"


def flip_bit(path: Path, chance: random.Random) -> str:
    """Flip one random bit of a file."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"one bit of byte {place} of {path.name} was flipped"


def remove_file(path: Path, chance: random.Random) -> str:
    """Remove a file."""
    path.unlink()
    return f"{path.name} was removed"


_DAMAGES: dict[str, Callable[[Path, random.Random], str]] = {
    "truncate": truncate_file,
    "flip": flip_bit,
    "remove": remove_file,
    "manifest": remove_file,
    "truncate-manifest": truncate_file,
    "flip-manifest": flip_bit,
}
DAMAGES = tuple(_DAMAGES)
"""Kinds of damage: to a random data file, or to the manifest."""


def damage(checkpoint: str | Path, kind: str, seed: int = 0) -> str:
    """Damage a checkpoint folder in one way and return what was done."""
    if kind not in _DAMAGES:
        raise ConfigError(unknown_name("kind", kind, DAMAGES, where="damage"))
    folder, chance = Path(checkpoint), random.Random(seed)
    data = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    target = folder / MANIFEST if "manifest" in kind else chance.choice(data)
    return _DAMAGES[kind](target, chance)


# A disk that is full.


@contextmanager
def full_disk(after: int = 0) -> Iterator[None]:
    """Make checkpoint writes of this process fail with ENOSPC after `after` bytes."""
    real, left = files.put, after

    def put(stream: BinaryIO, piece: bytes | memoryview) -> None:
        nonlocal left
        if len(piece) > left:
            real(stream, piece[:left])
            left = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(piece)
        real(stream, piece)

    with with_attributes(files, put=put):
        yield


# Processes that die.


class TargetProcess(Protocol):
    """A started process; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


@dataclass(frozen=True)
class Attempt:
    """What happened to one start of the command."""

    seconds: float
    ended: Literal["killed", "finished", "failed"]
    during_save: bool
    status: int


def kill_repeatedly(
    start: Callable[[], TargetProcess],
    folder: str | Path,
    *,
    kills: int = 10,
    longest: float = 5.0,
    seed: int = 0,
    in_saves: float = 0.5,
    pauses: float = 0.0,
) -> list[Attempt]:
    """Start a process and kill it `kills` times, then let it finish.

    A share `in_saves` of the kills waits for a save in `folder` and strikes in the middle of it; the others come at a
    random moment within `longest` seconds. A share `pauses` of the starts is also stopped (SIGSTOP) for a moment on
    the way. A process that ends by itself is reported and not started again.
    """
    chance = random.Random(seed)
    attempts: list[Attempt] = []
    for _ in range(kills):
        attempts.append(
            _kill_at_random_time(start(), Path(folder), longest, chance, chance.random() < in_saves, pauses)
        )
        if attempts[-1].ended != "killed":
            return attempts
    begun, victim = time.monotonic(), start()
    status = victim.wait()
    attempts.append(Attempt(time.monotonic() - begun, "failed" if status else "finished", False, status))
    return attempts


def _kill_at_random_time(
    victim: TargetProcess, folder: Path, longest: float, chance: random.Random, in_save: bool, pauses: float
) -> Attempt:
    begun, stale = time.monotonic(), _saves_in_progress(folder)
    moment = begun + chance.uniform(0, longest)
    pause_at = begun + chance.uniform(0, longest) if chance.random() < pauses else None
    deadline = begun + 20 * longest + 60  # a command that never saves must not be waited for forever
    while time.monotonic() < (deadline if in_save else moment):
        if (status := victim.poll()) is not None:
            return Attempt(time.monotonic() - begun, "failed" if status else "finished", False, status)
        if pause_at is not None and time.monotonic() > pause_at:
            pause_at = None
            _send(victim, signal.SIGSTOP)
            time.sleep(chance.uniform(0.01, 0.2))
            _send(victim, signal.SIGCONT)
        if in_save and time.monotonic() > moment and _saves_in_progress(folder) - stale:
            time.sleep(chance.uniform(0, 0.01))
            break
        time.sleep(0.0005)
    during_save = bool(_saves_in_progress(folder) - stale)
    _send(victim, signal.SIGKILL)
    status = victim.wait()
    return Attempt(time.monotonic() - begun, "killed", during_save, status)


def _saves_in_progress(folder: Path) -> set[str]:
    """Return the names of folders that are being written, or were when their writer died."""
    try:
        return {name for name in os.listdir(folder) if name.startswith(TEMPORARY)}
    except FileNotFoundError:
        return set()


def _send(victim: TargetProcess, number: int) -> None:
    """Signal the process and those it started, where it leads a group of its own."""
    with suppress(ProcessLookupError):
        if os.getpgid(victim.pid) == victim.pid:
            os.killpg(victim.pid, number)
        else:
            os.kill(victim.pid, number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m drivetrain.checkpoint.chaos", description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="kill a command repeatedly, then let it finish")
    run.add_argument("--folder", required=True, help="where the command keeps its checkpoints")
    run.add_argument("--kills", type=int, default=10)
    run.add_argument("--longest", type=float, default=5.0, help="maximum seconds until a kill")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--in-saves", type=float, default=0.5, help="fraction of kills in the middle of a save")
    run.add_argument("--pauses", type=float, default=0.0, help="fraction of starts that are also suspended briefly")
    run.add_argument("command", nargs="+")
    full = verbs.add_parser("full", help="run a script on a disk that is full after this many bytes")
    full.add_argument("bytes", type=int)
    full.add_argument("script", nargs=argparse.REMAINDER)
    harm = verbs.add_parser("damage", help="damage one checkpoint")
    harm.add_argument("checkpoint")
    harm.add_argument("--kind", choices=DAMAGES, default="flip")
    harm.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.verb == "damage":
        print(damage(given.checkpoint, given.kind, given.seed))
        return 0
    if given.verb == "full":
        with full_disk(given.bytes), with_attributes(sys, argv=given.script):
            runpy.run_path(given.script[0], run_name="__main__")
        return 0
    return _run(given)


def _run(given: argparse.Namespace) -> int:
    program = shutil.which(given.command[0])
    if program is None:
        print(f"{given.command[0]!r} is not a program on this machine. Write: ... -- python train.py", file=sys.stderr)
        return 2
    options = {name: getattr(given, name) for name in ("folder", "kills", "longest", "seed", "in_saves", "pauses")}
    attempts = kill_repeatedly(
        lambda: subprocess.Popen([program, *given.command[1:]], start_new_session=True), **options
    )
    for number, attempt in enumerate(attempts, start=1):
        where = " in the middle of a save" if attempt.during_save else ""
        print(f"start {number}: {attempt.ended}{where} after {attempt.seconds:.2f} s (status {attempt.status})")
    return 0 if attempts[-1].ended == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())
