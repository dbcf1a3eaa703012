import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain.checkpoint import layout, reader, writer
from drivetrain.checkpoint.chaos import DAMAGES, damage
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.layout import FileEntry, Manifest, problem_with, read_manifest
from drivetrain.checkpoint.reader import CheckpointReader, find_checkpoint_path, read_torch_file
from drivetrain.checkpoint.store import load_checkpoint, save_checkpoint
from drivetrain.context.context import Context
from drivetrain.core.errors import CheckpointError, ConfigError


@pytest.fixture
def three(tmp_path) -> list[Path]:
    return [save_checkpoint({"x": torch.full((300,), float(n)), "n": n}, n, path=tmp_path) for n in range(3)]


def rewrite_manifest(folder: Path, **changes) -> None:
    manifest = read_manifest(folder)
    content = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__} | changes
    (folder / "manifest.json").write_bytes(Manifest(**content).to_json())


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(three, kind, seed, caplog):
    damage(three[2], kind, seed)
    reason = problem_with(three[2])
    assert reason
    loaded = CheckpointReader().read_newest(three[2].parent)
    assert loaded.state["n"] == 1 and loaded.rejected == [(three[2], reason)]
    assert f"{three[2]} is skipped: {reason}" in caplog.text
    with pytest.raises(CheckpointError, match="newest valid"):
        CheckpointReader().read(three[2])


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "manifest.json"])
def test_every_single_flipped_bit_is_found(three, name):
    path = three[2] / name
    data = path.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        problem = problem_with(three[2])
        blank = name == "manifest.json" and not data[place : place + 1].strip()
        assert (problem is not None and name in problem) or blank
    path.write_bytes(data)
    assert problem_with(three[2]) is None


def test_all_damaged_is_an_error_that_lists_all(three):
    for folder, kind in zip(three, ("flip", "manifest", "truncate")):
        damage(folder, kind)
    with pytest.raises(CheckpointError, match="nothing was loaded") as error:
        load_checkpoint(three[0].parent)
    assert all(str(folder) in str(error.value) for folder in three)


def test_sequence_decides_not_file_times(three):
    for age, folder in enumerate(three):
        for path in (folder, *folder.iterdir()):
            os.utime(path, (1e9 - age * 1e6, 1e9 - age * 1e6))
    assert load_checkpoint(three[0].parent)["n"] == 2
    rewrite_manifest(three[0], sequence=99)
    assert load_checkpoint(three[0].parent)["n"] == 0


def test_how_much_is_verified_can_be_chosen(three):
    path = three[2] / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load_checkpoint(three[2].parent, verify="full")["n"] == 1
    assert load_checkpoint(three[2].parent, verify="size")["n"] == 2
    path.write_bytes(data[:-4])
    assert load_checkpoint(three[2].parent, verify="size")["n"] == 1
    assert load_checkpoint(three[2].parent, verify="off")["n"] == 1  # what cannot be parsed is passed over all the same
    with pytest.raises(ConfigError, match="'full'"):
        load_checkpoint(three[2].parent, verify="fulll")


def test_a_forged_manifest_cannot_reach_outside(three, tmp_path):
    secret = tmp_path / "secret.safetensors"
    save_file({"x": torch.ones(1)}, secret)
    entry = FileEntry(path="../secret.safetensors", size=secret.stat().st_size, sha256="0" * 64)
    rewrite_manifest(three[2], files=(*read_manifest(three[2]).files, entry))
    assert "outside" in problem_with(three[2])
    assert load_checkpoint(tmp_path)["n"] == 1
    assert "outside" in problem_with(three[2], "off")


def test_a_file_replaced_by_a_link_is_refused(three, tmp_path):
    outside = tmp_path / "outside"
    shutil.move(three[2] / "state.json", outside)
    (three[2] / "state.json").symlink_to(outside)
    assert "link" in problem_with(three[2])


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"kind": "context", "state": {}}',
        '{"kind": "evil", "state": {}, "run": null}',
        '{"kind": "dict", "state": {"x": {"$tensor": "missing"}}, "run": null}',
        '{"kind": "dict", "state": {"x": {"$tensor": ["x"]}}, "run": null}',
        '{"kind": "dict", "state": {"x": {"$exec": "import os"}}, "run": null}',
        '{"kind": "dict", "state": {"x": {"$local": "x"}}, "run": null}',
        '{"kind": "dict", "state": ' + "[" * 5000 + "]" * 5000 + ', "run": null}',
    ],
)
def test_a_forged_state_is_passed_over(three, content):
    (three[2] / "state.json").write_text(content)
    files = [e for e in read_manifest(three[2]).files if e.path != "state.json"]
    import hashlib

    data = content.encode()
    entry = FileEntry(path="state.json", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    rewrite_manifest(three[2], files=(*files, entry))
    assert problem_with(three[2]) is None  # the hashes are good
    assert load_checkpoint(three[2].parent)["n"] == 1


def test_a_manifest_that_omits_files_is_refused(three):
    rewrite_manifest(three[2], files=())
    assert "state.json" in problem_with(three[2])
    assert load_checkpoint(three[2].parent)["n"] == 1


def test_nothing_outside_the_manifest_is_read_from_the_shards(three):
    (three[2] / "shards").mkdir()
    save_file({"x": torch.ones(1)}, three[2] / "shards" / "extra.safetensors")
    assert "extra.safetensors is not listed" in problem_with(three[2])


class Evil:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, suffix):
    path = tmp_path / f"checkpoint-1{suffix}"
    torch.save({"x": Evil(tmp_path / "trace")}, path)
    with pytest.raises(CheckpointError, match="could run code"):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Evil(tmp_path / "trace"), protocol=2))
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"garbage" * 100])
def test_a_broken_torch_file_is_a_checkpoint_error(tmp_path, data):
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        read_torch_file(path)
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        load_checkpoint(path)


def test_files_of_other_programs_load(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3, "loader": None}
    torch.save(state, tmp_path / "checkpoint-1.pt")
    back = load_checkpoint(tmp_path / "checkpoint-1.pt")
    assert back["epoch"] == 3 and back["loader"] is None and torch.equal(back["model"]["w"], torch.ones(2))
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    assert torch.equal(load_checkpoint(str(tmp_path / "m.safetensors"))["w"], torch.ones(2))


def test_a_place_is_found_by_what_is_there(three, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "manifest.json").write_text("{}")  # a run has one too, of another kind
    shutil.copytree(three[1], run / "checkpoints" / three[1].name)
    assert find_checkpoint_path(run) == ("directory", run / "checkpoints")
    assert load_checkpoint(run)["n"] == 1
    assert load_checkpoint(tmp_path / "last")["n"] == 2
    assert load_checkpoint(three[0])["n"] == 0
    (tmp_path / "checkpoint-9").write_text("a file of somebody else")
    (tmp_path / "linked").symlink_to(run / "checkpoints" / three[1].name)
    assert load_checkpoint(tmp_path)["n"] == 2 and load_checkpoint(tmp_path / "linked")["n"] == 1
    renamed = three[0].rename(tmp_path / "kept-by-hand")
    assert load_checkpoint(renamed)["n"] == 0
    for missing in (tmp_path / "nowhere", tmp_path / "x.pt"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            load_checkpoint(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        load_checkpoint(tmp_path / "empty")


def test_loaded_tensors_are_free_of_their_file(three):
    state = load_checkpoint(three[2])
    before = (three[2] / "tensors.safetensors").read_bytes()
    state["x"].add_(5)
    assert (three[2] / "tensors.safetensors").read_bytes() == before
    shutil.rmtree(three[2])
    assert torch.equal(state["x"], torch.full((300,), 7.0))


def test_a_reader_logs_nothing_when_all_is_well(three, caplog):
    with caplog.at_level(logging.DEBUG):
        load_checkpoint(three[2].parent)
    assert caplog.text == ""


def test_a_newer_format_is_refused_with_both_versions(three):
    content = json.loads((three[2] / "manifest.json").read_text())
    (three[2] / "manifest.json").write_text(json.dumps(content | {"version": 2}))
    assert "format version 2" in problem_with(three[2])


def test_a_checkpoint_that_is_away_for_a_moment_while_it_is_listed_is_found(three, monkeypatch, caplog):
    """A save without an exchange of names moves the old folder aside; the new one is there before the reader looks again."""
    real, misses = layout.read_manifest, [three[2]]

    def read_manifest(folder: Path) -> Manifest:
        if folder in misses:
            misses.remove(folder)
            raise CheckpointError("manifest.json is missing")
        return real(folder)

    monkeypatch.setattr(layout, "read_manifest", read_manifest)
    assert load_checkpoint(three[2].parent)["n"] == 2
    assert not misses and caplog.text == ""


READS = """
import sys
import torch
from pathlib import Path
from drivetrain.checkpoint.store import load_checkpoint
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.context.context import Context

folder, number = Path(sys.argv[1]), 0
print("ready", flush=True)
while not (folder / "end").exists():
    for place in ("replaced", "replaced/checkpoint-state", "renewed", "renewed/best", "renewed/last"):
        for verify in ("full", "off"):
            state = load_checkpoint(folder / place, verify=verify)
            assert state["x"].unique().tolist() == [state["y"]], "two checkpoints are mixed"
    ctx = Context(x=torch.zeros(3), y=2)
    assert Checkpointer(ctx, dir=folder / "renewed").restore() is not None
    number += 11
print(number)
"""


@pytest.mark.parametrize("num_saves", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_reader_in_another_process_always_finds_a_checkpoint_while_one_is_replaced(tmp_path, monkeypatch, num_saves):
    def save(number):
        replaced, renewed = (
            Checkpointer(Context(x=torch.full((3,), float(number)), y=number), dir=tmp_path / name, keep=1, best=best)
            for name, best in (("replaced", None), ("renewed", "loss"))
        )
        replaced.save(id="state")
        renewed.save(id=f"n{number}", metrics={"loss": -number})  # each is the best so far

    save(0)
    reader = subprocess.Popen([sys.executable, "-c", READS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert reader.stdout.readline() == "ready\n"
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # many writes in little time
    for number in range(1, num_saves):
        if number == num_saves // 2:
            monkeypatch.setattr(writer, "exchange_names", lambda first, second: False)  # as on a network file system
        save(number)
        if reader.poll() is not None:
            break
    (tmp_path / "end").touch()
    answer, _ = reader.communicate(timeout=120)
    assert reader.returncode == 0 and int(answer) > 0
    assert len(list((tmp_path / "renewed").iterdir())) == 3  # one checkpoint and two pointers


def overwrite(path: Path) -> None:
    """Write zeros into a file, in place: tensors that are the file, mapped into memory, become zero too."""
    with open(path, "r+b") as stream:
        stream.write(bytes(path.stat().st_size))


def test_what_is_kept_of_a_rank_is_not_the_mapped_file(tmp_path):
    """Windows does not remove a file that is mapped into memory, and an old checkpoint has to go while its run goes on."""
    context = Context()
    context.model = torch.nn.Linear(2, 2)
    folder = Checkpointer(context, dir=tmp_path).save("1")
    loaded = CheckpointReader().read(folder)
    before = loaded.rank.rng["torch"].clone()
    overwrite(folder / layout.rank_file(0))
    assert before.any() and torch.equal(loaded.rank.rng["torch"], before)


def test_on_windows_no_tensor_is_the_mapped_file(three, monkeypatch):
    monkeypatch.setattr(reader, "os", types.SimpleNamespace(name="nt"))
    loaded = CheckpointReader().read(three[1])
    overwrite(three[1] / layout.TENSORS)
    assert torch.equal(loaded.state["x"], torch.full((300,), 1.0))
