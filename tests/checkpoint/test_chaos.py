"""Runs that are killed at random moments and in the middle of saves end bit-identical to an undisturbed one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import chaos, files
from drivetrain.checkpoint.chaos import Attempt, damage, kill_repeatedly
from drivetrain.checkpoint.layout import problem_with
from drivetrain.checkpoint.store import load_checkpoint, save_checkpoint
from drivetrain.core.errors import ConfigError
from drivetrain.core.files import TEMPORARY
from drivetrain.runtime.seeds import capture_rng, restore_rng
from tests.checkpoint import victim
from tests.checkpoint.victim import Forked


@pytest.fixture(scope="module", autouse=True)
def everything_imported(tmp_path_factory):
    """Run the program once here, so that its forks need not import again what torch loads at the first step."""
    before = capture_rng()
    victim.run(str(tmp_path_factory.mktemp("first")), 4, 0)
    restore_rng(before)


def undisturbed(folder: Path, *arguments: int) -> str:
    """The result of the same program when nobody touches it, in a process of its own."""
    assert Forked(lambda: victim.main(str(folder), *arguments)).wait() == 0
    return (folder / "result").read_text()


@pytest.mark.parametrize(
    "num_steps", [pytest.param(45, marks=pytest.mark.slow), 46]
)  # saves in the foreground, and in the background
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path, num_steps):
    expected = undisturbed(tmp_path / "whole", num_steps, 0, 1)
    folder = tmp_path / "killed"
    attempts = kill_repeatedly(
        lambda: Forked(lambda: victim.main(str(folder), num_steps, 0, 1)), folder, kills=5, longest=0.1, seed=num_steps
    )
    assert attempts[-1].ended == "finished" and sum(attempt.ended == "killed" for attempt in attempts) >= 2
    assert (folder / "result").read_text() == expected
    assert not list(folder.glob(".*"))


def dies_in_a_save(folder: Path, writes: int, *arguments: int) -> None:
    """Run the program, and kill it from within a save: half-way through a write, after `writes` whole ones."""
    put = files.put

    def put_half_and_die(stream, piece):
        nonlocal writes
        if writes:
            writes -= 1
            return put(stream, piece)
        put(stream, piece[: len(piece) // 2])
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    files.put = put_half_and_die  # in a child of its own, which does not live to put it back
    victim.main(str(folder), *arguments)


def kill_in_saves(folder: Path, kills: int, seed: int, *arguments: int) -> None:
    """Start the program `kills` times, and let each start die while a checkpoint is half written."""
    chance = random.Random(seed)
    for _ in range(kills):
        before = set(folder.glob(TEMPORARY + "*"))
        writes = chance.randrange(40)
        assert Forked(lambda writes=writes: dies_in_a_save(folder, writes, *arguments)).wait() == -signal.SIGKILL
        assert set(folder.glob(TEMPORARY + "*")) - before, "nothing was being written"


@pytest.mark.parametrize("num_steps", [45, pytest.param(46, marks=pytest.mark.slow)])
def test_a_run_that_dies_in_its_saves_ends_as_if_nothing_had_happened(tmp_path, num_steps):
    expected = undisturbed(tmp_path / "whole", num_steps, 0, 1)
    folder = tmp_path / "killed"
    kill_in_saves(folder, 3, num_steps, num_steps, 0, 1)
    assert Forked(lambda: victim.main(str(folder), num_steps, 0, 1)).wait() == 0
    assert (folder / "result").read_text() == expected
    assert not list(folder.glob(".*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills_change_nothing(tmp_path, seed):
    """Of each ten kills five strike in the middle of a save, by construction; five come when they come."""
    num_steps = 400 + seed
    expected = undisturbed(tmp_path / "whole", num_steps, 0, 1)
    folder = tmp_path / "killed"
    kill_in_saves(folder, 5, seed, num_steps, 0, 1)
    attempts = kill_repeatedly(
        lambda: Forked(lambda: victim.main(str(folder), num_steps, 0, 1)),
        folder,
        kills=5,
        longest=0.3,
        seed=seed,
        in_saves=0.0,
        pauses=0.3,
    )
    assert attempts[-1].ended == "finished" and len(attempts) == 6
    assert (folder / "result").read_text() == expected
    assert not list(folder.glob(".*"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("workers", "processes", "kills"), [(2, 1, 6), (0, 2, 6), (2, 2, 3)])
def test_kills_with_workers_and_several_processes_change_nothing(tmp_path, workers, processes, kills):
    arguments = ["60", str(workers), str(processes)]
    command = [sys.executable, "-m", "tests.checkpoint.victim"]
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    begun = time.monotonic()
    subprocess.run([*command, str(whole), *arguments], check=True)
    longest = 0.8 * (time.monotonic() - begun)
    attempts = kill_repeatedly(
        lambda: subprocess.Popen([*command, str(folder), *arguments], start_new_session=True),
        folder,
        kills=kills,
        longest=longest,
        seed=workers + processes,
        in_saves=0.7,
    )
    assert attempts[-1].ended == "finished" and len(attempts) > 1, attempts  # the last kills may come too late
    assert (folder / "result").read_text() == (whole / "result").read_text()


def test_sigterm_ends_a_real_process_with_143_and_it_continues(tmp_path):
    expected = undisturbed(tmp_path / "whole", 45, 0, 1)
    folder = tmp_path / "stopped"
    stopped = Forked(lambda: victim.main(str(folder), 45, 0, 1))
    while not (folder / "last").exists():
        time.sleep(0.001)
    os.kill(stopped.pid, signal.SIGTERM)
    assert stopped.wait() == 143
    assert not (folder / "result").exists()
    assert Forked(lambda: victim.main(str(folder), 45, 0, 1)).wait() == 0
    assert (folder / "result").read_text() == expected


def test_every_kind_of_damage_is_found_and_told(tmp_path):
    for kind in chaos.DAMAGES:
        path = save_checkpoint({"x": torch.ones(10)}, kind, path=tmp_path)
        told = damage(path, kind, seed=1)
        assert any(word in told for word in ("cut", "flipped", "removed")) and problem_with(path)
    with pytest.raises(ConfigError, match="'flip'"):
        damage(path, "flipp")


def test_a_paused_process_goes_on_and_one_that_ends_is_not_started_again(tmp_path):
    started = []

    def start():
        started.append(Forked(lambda: time.sleep(0.3)))
        return started[-1]

    (attempt,) = kill_repeatedly(start, tmp_path, kills=3, longest=0.05, in_saves=1.0, pauses=1.0)
    assert attempt == Attempt(attempt.seconds, "finished", False, 0) and attempt.seconds >= 0.3
    assert len(started) == 1


def test_the_command_line_damages_fills_and_kills(tmp_path, capfd):
    path = save_checkpoint({"x": torch.ones(10)}, 1, path=tmp_path)
    assert chaos.main(["damage", str(path), "--kind", "truncate"]) == 0
    assert problem_with(path)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom drivetrain.checkpoint.store import save_checkpoint\n"
        "try:\n    save_checkpoint({'x': 1}, 2, path=sys.argv[1])\nexcept Exception as error:\n    print(error)\n"
    )
    before = sys.argv
    try:
        assert chaos.main(["full", "10", str(script), str(tmp_path)]) == 0
    finally:
        sys.argv = before
    assert "No space left" in capfd.readouterr().out
    save_checkpoint({"x": 1}, 2, path=tmp_path)
    assert load_checkpoint(tmp_path) == {"x": 1}
    assert (
        chaos.main(
            [
                "run",
                "--folder",
                str(tmp_path),
                "--kills",
                "2",
                "--longest",
                "0.05",
                "--in-saves",
                "0",
                "--",
                "sleep",
                "0.3",
            ]
        )
        == 0
    )
    told = capfd.readouterr().out
    assert told.count("killed") == 2 and "start 3: finished" in told
    assert chaos.main(["run", "--folder", str(tmp_path), "--", "no-such-program"]) == 2
