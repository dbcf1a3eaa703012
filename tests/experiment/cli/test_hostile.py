"""Run folders of other people: nothing in one makes a command wait, leave the folder, or command the terminal."""

import contextlib
import importlib.util
import json
import logging
import os
import signal
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint.store import load_checkpoint, save_checkpoint
from drivetrain.core.errors import CheckpointError
from drivetrain.experiment.reports import write_report
from drivetrain.experiment.run_folder import run_log
from drivetrain.record.recorder import Recorder
from tests.experiment.folders import make_run

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egpj"


@pytest.fixture(autouse=True)
def _alarm():
    """Whoever waits for a FIFO is woken and fails, instead of stopping the suite."""

    def wake(*_):
        pytest.fail("something waited")

    before = signal.signal(signal.SIGALRM, wake)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def lay(path, kind, target):
    """Put something in the place of a file of a run."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": target, "device": "/dev/zero"}[kind])


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "outside.txt"
    path.write_text('{"state": "STOLEN", "experiment": "STOLEN"}\nSTOLEN\n')
    return path


@pytest.mark.parametrize("kind", ["fifo", "link", "device"])
@pytest.mark.parametrize("name", ["status.json", "log.txt", "metrics.jsonl", "run.lock"])
def test_a_trap_in_the_place_of_a_file_is_not_read(command, tmp_path, outside, name, kind):
    folder = make_run(tmp_path / "o")
    lay(folder / name, kind, outside)
    page = tmp_path / "page.html"
    for words in (("ls", tmp_path / "o"), ("show", folder), ("doctor", folder), ("report", folder, "--output", page)):
        status, out, err = command(*words)
        assert status in (0, 1), err
        assert "STOLEN" not in out + err
    assert "STOLEN" not in page.read_text() and "STOLEN" in outside.read_text()


@pytest.mark.parametrize("kind", ["fifo", "link", "device"])
@pytest.mark.parametrize("name", ["manifest.json", "parameters.yaml"])
def test_a_folder_whose_record_is_a_trap_is_not_a_run(command, tmp_path, outside, name, kind):
    folder = make_run(tmp_path / "o")
    lay(folder / name, kind, outside)
    status, out, err = command("show", folder)
    assert status == 2 and "is not the folder of a run" in err and "STOLEN" not in out + err
    assert "no runs" in command("ls", tmp_path / "o")[1]


def test_pictures_behind_links_stay_out_of_the_report(tmp_path, outside):
    folder, private = make_run(tmp_path / "o"), tmp_path / "private"
    (private / "a").mkdir(parents=True)
    (private / "a" / "1.png").write_bytes(b"STOLEN" * 10)
    (folder / "figures").mkdir(exist_ok=True)
    (folder / "figures" / "1.png").symlink_to(private / "a" / "1.png")
    os.mkfifo(folder / "figures" / "2.png")
    for path in (folder / "images").rglob("*.png"):
        path.unlink()
    if (folder / "images").is_dir():
        for path in sorted((folder / "images").rglob("*"), reverse=True):
            path.rmdir()
        (folder / "images").rmdir()
    (folder / "images").symlink_to(private)
    assert "U1RPTEVO" not in write_report([folder], tmp_path / "page.html").read_text()  # base64 of STOLEN


@pytest.fixture
def checkpoints(tmp_path):
    folder = make_run(tmp_path / "o")
    for number in (1, 2):
        save_checkpoint({"w": torch.full((2,), float(number))}, number, path=folder / "checkpoints")
    return folder / "checkpoints"


@pytest.mark.parametrize("kind", ["fifo", "link", "device"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.safetensors"])
@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_checkpoint_with_a_trap_is_passed_over(checkpoints, outside, name, kind, verify):
    lay(checkpoints / "checkpoint-2" / name, kind, outside)
    assert load_checkpoint(checkpoints, verify=verify)["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["fifo", "link", "device"])
def test_a_pointer_that_is_a_trap_is_an_error_and_not_followed(checkpoints, outside, kind, command):
    outside.write_text("checkpoint-1\n")
    lay(checkpoints / "best", kind, outside)
    with pytest.raises(CheckpointError, match="best"):
        load_checkpoint(checkpoints / "best")
    assert command("show", checkpoints.parent)[0] == 0


def test_a_checkpoint_folder_that_is_a_link_is_passed_over_unless_the_user_names_it(checkpoints, tmp_path):
    elsewhere = tmp_path / "checkpoint-9"
    os.replace(checkpoints / "checkpoint-2", elsewhere)
    (checkpoints / "checkpoint-2").symlink_to(elsewhere)
    assert load_checkpoint(checkpoints)["w"].tolist() == [1.0, 1.0]
    assert load_checkpoint(checkpoints / "checkpoint-2")["w"].tolist() == [2.0, 2.0]


def test_leftovers_that_are_traps_do_not_stop_the_next_save(checkpoints, outside):
    lay(checkpoints / ".tmp-a", "fifo", outside)
    lay(checkpoints / ".tmp-b", "link", outside)
    save_checkpoint({"w": torch.zeros(2)}, 3, path=checkpoints)
    assert load_checkpoint(checkpoints)["w"].tolist() == [0.0, 0.0] and "STOLEN" in outside.read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "scalars.csv", "tb", "images"])
def test_a_recorder_does_not_write_through_links(tmp_path, outside, name):
    folder, private = tmp_path / "run", tmp_path / "private"
    folder.mkdir()
    private.mkdir()
    (folder / name).symlink_to(outside if "." in name else private)
    recorder = Recorder(folder, tensorboard=importlib.util.find_spec("tensorboard") is not None)
    with contextlib.suppress(OSError):  # a sink that cannot be opened is an error; one that fails later is a warning
        recorder.scalar("=loss", 1.0)
        recorder.image("sample", torch.zeros(2, 2))
        recorder.flush()
    with contextlib.suppress(OSError):
        recorder.close()
    assert "STOLEN\n" in outside.read_text()[-8:] and list(private.iterdir()) == []


def test_a_log_does_not_write_through_a_link(tmp_path, outside):
    (tmp_path / "log.txt").symlink_to(outside)
    with pytest.raises(OSError, match="regular"), run_log(tmp_path, 0, debug=False):
        pytest.fail("the log was opened")
    assert outside.read_text().endswith("STOLEN\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_log_that_can_no_longer_be_written_ends_nothing(tmp_path, capfd):
    log = logging.getLogger("tests.full_disk")
    with run_log(tmp_path, 1, debug=False):
        log.info("before")
        handler = logging.getLogger().handlers[-1]
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, handler.stream.fileno())
        os.close(full)
        log.info("after")
    assert "before" in (tmp_path / "log.rank-1.txt").read_text()
    assert "Logging error" not in capfd.readouterr().err


def hostile_run(place, name):
    """A run with escape sequences in every text that somebody else wrote."""
    folder = make_run(place, name, error=f"ValueError: {ESCAPES}\nfinished", diff=f"+{ESCAPES}{name}")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"experiment": f"digits{ESCAPES}", "devices": [ESCAPES], "plan": ESCAPES, "argv": ["a", ESCAPES]}
    manifest["origins"]["lr"] = ESCAPES
    manifest["host"]["name"] = f"{ESCAPES}{name}"
    manifest["packages"] = {f"torch{ESCAPES}": f"{name}{ESCAPES}"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "log.txt").write_text(f"{ESCAPES}\rlast line\n")
    row = {"step": 0, "time": 1.0, "kind": "scalar", "tag": f"eval/acc{ESCAPES}\nx", "value": 1.0}
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps(row) + "\n" + json.dumps(row | {"step": 1, "value": float(len(name))}) + "\n")
    (folder / "checkpoints" / f"checkpoint-{ESCAPES}".replace("\x9b", "")).mkdir(parents=True)
    return folder


@pytest.mark.parametrize("as_json", [False, True])
def test_escape_sequences_never_reach_the_terminal(command, tmp_path, as_json):
    one, two = hostile_run(tmp_path / "o", "a\x1b[31m"), hostile_run(tmp_path / "o", "bb")
    option = ["--json"] if as_json else []
    for words in (
        ("ls", tmp_path / "o"),
        ("show", one),
        ("compare", one, two),
        ("doctor", one),
        ("report", two),
        ("show", tmp_path / ESCAPES),
        ("resume", one),
    ):
        _, out, err = command(*words, *option)
        for line in (out + err).split("\n"):
            assert line.replace("\t", " ").isprintable(), (words, line)


@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, -1e400, True, None])
def test_entries_of_a_wrong_type_are_left_out_instead_of_ending_a_command(command, tmp_path, value):
    folder = make_run(tmp_path / "o", state="failed")
    for name in ("manifest.json", "status.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(dict.fromkeys(content, value) | {"heartbeat": value, "git": value}))
    for words in (("ls", tmp_path / "o"), ("show", folder), ("doctor", folder), ("report", folder)):
        status, _, err = command(*words)
        assert status in (0, 1), err


def test_runs_of_others_that_cannot_be_read_are_left_out(command, tmp_path, monkeypatch):
    for name in ("theirs", "ours"):
        make_run(tmp_path / "output", name)
    (tmp_path / "output" / "digits" / "theirs" / "manifest.json").unlink()  # as it looks to whom the folder is closed
    look = Path.iterdir

    def iterdir(path):
        if path.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    status, out, err = command("ls", tmp_path / "output")
    assert status == 0 and "ours" in out, err


def test_words_too_long_for_a_path_are_no_crash(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "output", "ours")
    assert command("ls", " or ".join(["name=ours"] * 60))[0] == 0
    for words in (("show", "x" * 300), ("doctor", "x" * 300), ("ls", "x" * 300)):
        status, _, err = command(*words)
        assert status == 2 and "there is no" in err


def test_times_beyond_the_calendar_are_unknown(command, tmp_path):
    folder = make_run(tmp_path / "output", "ours")
    for name in ("manifest.json", "status.json"):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(data | {"started": 1e20, "heartbeat": 1e30, "state": "failed"}))
    status, out, err = command("show", folder)
    assert status == 0 and "started   unknown" in out, err
    assert command("doctor", folder)[0] == 1
