"""Whatever instant a writer dies at, a whole checkpoint remains."""

import errno
import os
import resource
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import files, writer
from drivetrain.checkpoint.chaos import full_disk
from drivetrain.checkpoint.layout import Best, problem_with, read_pointer
from drivetrain.checkpoint.reader import CheckpointReader
from drivetrain.checkpoint.snapshot import take_snapshot
from drivetrain.checkpoint.writer import WriteFailedError, known_checkpoints, sweep, write_checkpoint
from drivetrain.core.files import lock_path


def save(directory: Path, id, value: float, **kwargs) -> Path:
    return write_checkpoint(directory, id, take_snapshot({"x": torch.full((50,), value), "v": value}), **kwargs)


def newest_value(directory: Path) -> float:
    loaded = CheckpointReader().read_newest(directory)
    assert torch.equal(loaded.state["x"], torch.full((50,), loaded.state["v"]))
    return loaded.state["v"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_is_a_folder_with_a_manifest_and_pointers(tmp_path):
    path = save(tmp_path / "new" / "place", 1, 1.0)
    assert names(path) == ["manifest.json", "state.json", "tensors.safetensors"]
    assert names(path.parent) == ["checkpoint-1", "last"]
    assert read_pointer(path.parent, "last") == path and problem_with(path) is None


def test_sequence_increases_and_the_same_id_is_replaced(tmp_path):
    for value in (1.0, 2.0, 3.0):
        path = save(tmp_path, "same", value)
    assert names(tmp_path) == ["checkpoint-same", "last"]
    assert known_checkpoints(tmp_path)[path].sequence == 3 and newest_value(tmp_path) == 3.0


def test_best_follows_the_metric_and_its_direction(tmp_path):
    best = Best("acc", "max")
    for id, acc in enumerate([0.5, float("nan"), 0.9, 0.7]):
        snapshot = take_snapshot({"id": id}, metrics={"acc": acc})
        write_checkpoint(tmp_path, id, snapshot, best=best)
    assert read_pointer(tmp_path, "best") == tmp_path / "checkpoint-2"


class Died(BaseException):
    pass


DANGEROUS = (
    (writer, "exchange_names"),
    (os, "replace"),
    (os, "fsync"),
    (os, "close"),
    (Path, "mkdir"),
    (shutil, "rmtree"),
    (files, "put"),
)


def cannot_exchange(first, second):
    return False  # as on a network file system


def count_calls(monkeypatch, action, die_at: int | None = None, kill=os._exit) -> int:
    """Run `action`, ending the process at the given call of anything that touches the disk; return the number of calls."""
    calls = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == die_at:
                kill(9)
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in DANGEROUS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        action()
    return calls


@pytest.mark.parametrize("id", [pytest.param("new", marks=pytest.mark.slow), "old", "old without exchange"])
def test_a_writer_that_dies_before_any_disk_operation_leaves_a_whole_checkpoint(tmp_path, monkeypatch, id):
    """A child process is ended before the first, second, ... operation; what it leaves is read and written on."""
    if id == "old without exchange":
        monkeypatch.setattr(writer, "exchange_names", cannot_exchange)
        id = "old"
    count = count_calls(monkeypatch, lambda: (save(tmp_path / "count", "old", 1.0), save(tmp_path / "count", id, 2.0)))
    assert count > 20
    seen = set()
    for die_at in range(1, count + 1):
        directory = tmp_path / str(die_at)
        save(directory, "old", 1.0)
        child = os.fork()
        if child == 0:
            try:
                count_calls(monkeypatch, lambda d=directory: save(d, id, 2.0), die_at)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        value = newest_value(directory)
        seen.add(value)
        assert value in (1.0, 2.0)
        if os.waitstatus_to_exitcode(status) == 0:
            break  # fewer operations than in the counted pair: the save came to its end
        save(directory, "next", 3.0)
        left = names(directory)
        assert newest_value(directory) == 3.0
        assert set(left) <= {"checkpoint-old", "checkpoint-new", "checkpoint-next", "last"}
    assert seen == {1.0, 2.0} and value == 2.0


def test_a_full_disk_at_any_byte_leaves_the_earlier_checkpoint_and_no_rubbish(tmp_path):
    save(tmp_path, 1, 1.0)
    needed = sum(path.stat().st_size for path in (tmp_path / "checkpoint-1").iterdir())
    for after in range(0, needed, 97):
        with full_disk(after), pytest.raises(WriteFailedError, match="No space left"):
            save(tmp_path, 2, 2.0)
        assert names(tmp_path) == ["checkpoint-1", "last"] and newest_value(tmp_path) == 1.0
    save(tmp_path, 2, 2.0)
    assert newest_value(tmp_path) == 2.0


def test_a_disk_that_is_full_only_for_the_pointers_has_taken_the_checkpoint(tmp_path, caplog):
    save(tmp_path, 1, 1.0)
    needed = sum(path.stat().st_size for path in (tmp_path / "checkpoint-1").iterdir())
    with full_disk(needed + 5):
        save(tmp_path, 2, 2.0)
    assert newest_value(tmp_path) == 2.0 and read_pointer(tmp_path, "last") == tmp_path / "checkpoint-1"
    assert "pointer files" in caplog.text


@contextmanager
def small_files(limit: int):
    """Make the system reject files of this process above `limit` bytes (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_real_limit_of_the_system_is_handled_like_a_full_disk(tmp_path):
    save(tmp_path, 1, 1.0)
    with small_files(100), pytest.raises(WriteFailedError, match="checkpoint-2 was not saved"):
        save(tmp_path, 2, 2.0)
    assert names(tmp_path) == ["checkpoint-1", "last"]


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20 + 10))
    monkeypatch.setattr(files, "put", lambda *args: pytest.fail("something was written"))
    with pytest.raises(WriteFailedError, match=r"needs 1,048,\d+ bytes.*1,048,586 free"):
        save(tmp_path, 1, 1.0)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteFailedError, match="file"):
        save(tmp_path / "file", 1, 1.0)


def test_sweeping_spares_a_living_writer(tmp_path):
    mine = tmp_path / ".tmp-checkpoint-1-aa"
    dead = tmp_path / ".tmp-checkpoint-2-bb"
    mine.mkdir(), dead.mkdir()
    lock = lock_path(mine)
    sweep(tmp_path)
    assert names(tmp_path) == [mine.name]
    os.close(lock)
    sweep(tmp_path)
    assert names(tmp_path) == []


def test_a_checkpoint_set_aside_is_found_and_put_back(tmp_path, caplog):
    path = save(tmp_path, 1, 1.0)
    os.rename(path, tmp_path / ".old-checkpoint-1")
    assert newest_value(tmp_path) == 1.0
    save(tmp_path, 2, 2.0)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "last"]
    assert "restored" in caplog.text


def test_an_error_in_the_rename_brings_the_old_checkpoint_back(tmp_path, monkeypatch):
    save(tmp_path, 1, 1.0)
    real = os.replace

    def replace(source, target):
        if Path(source).name.startswith(".tmp-") and Path(target).name == "checkpoint-1":
            raise OSError("this name is taken")
        return real(source, target)

    monkeypatch.setattr(writer, "exchange_names", cannot_exchange)
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "replace", replace)
        with pytest.raises(WriteFailedError, match="this name is taken"):
            save(tmp_path, 1, 2.0)
    assert names(tmp_path) == ["checkpoint-1", "last"] and newest_value(tmp_path) == 1.0
    save(tmp_path, 1, 3.0)
    assert names(tmp_path) == ["checkpoint-1", "last"] and newest_value(tmp_path) == 3.0


def test_leftover_of_another_user_does_not_stop_a_save(tmp_path, monkeypatch):
    (tmp_path / ".tmp-checkpoint-1-aa").mkdir(parents=True)

    def denied(path):
        if path.name == ".tmp-checkpoint-1-aa":
            raise PermissionError(13, "Permission denied", str(path))
        return lock_path(path)

    monkeypatch.setattr(writer, "lock_path", denied)
    save(tmp_path, 2, 2.0)
    assert newest_value(tmp_path) == 2.0


def test_file_system_that_cannot_flush_folders_still_saves(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 1, 1.0)
    assert newest_value(tmp_path) == 1.0


def test_tensors_are_written_whatever_their_strides(tmp_path):
    table = torch.arange(6.0).reshape(3, 2)
    tensors = {
        "one": table[:1, 1],
        "column": table[:, 1],
        "turned": table.t(),
        "negated": torch.tensor([2j]).conj().imag,
    }
    write_checkpoint(tmp_path, 1, take_snapshot(tensors))
    loaded = CheckpointReader().read_newest(tmp_path).state
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
