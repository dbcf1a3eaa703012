"""The checkpoint folder: tested before the first step, never replaced silently, watched during the run."""

import gc
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from drivetrain.checkpoint.chaos import full_disk
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.exchange import RankExchange
from drivetrain.checkpoint.folder import WRITER_LOCK, check_folder, prepare_folder
from drivetrain.checkpoint.store import load_checkpoint
from drivetrain.checkpoint.writer import WriteFailedError
from drivetrain.context.context import Context
from drivetrain.core.errors import CheckpointsExistError, ConfigError, DrivetrainWarning, FolderInUseError
from drivetrain.core.locking import FolderLock
from drivetrain.train.callbacks import TrainerCallback
from tests.train.tasks import make_trainer, train


class At(TrainerCallback):
    """Does something after an epoch."""

    def __init__(self, epoch, action):
        self.epoch, self.action = epoch, action

    def on_train_epoch_end(self, trainer, **kwargs):
        if trainer.state.clock.epoch == self.epoch:
            self.action()


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make_trainer()
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(WriteFailedError, match=r"checkpoint_dir=.*cannot be written"):
        train(trainer, checkpoint_dir=tmp_path / "file" / "run")
    assert all(map(torch.equal, before, trainer.model.parameters()))


@pytest.mark.parametrize(
    ("target", "reason"), [(None, "it is not a folder"), ("nothing", "a link that leads to no folder")]
)
def test_what_is_in_the_place_of_the_folder_is_said(tmp_path, target, reason):
    (tmp_path / "run").write_text("") if target is None else (tmp_path / "run").symlink_to(tmp_path / target)
    with pytest.raises(WriteFailedError, match=reason):
        train(make_trainer(), checkpoint_dir=tmp_path / "run")


def test_a_new_run_does_not_replace_the_checkpoints_of_another(tmp_path):
    train(make_trainer(), checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointsExistError, match=r"resume_from='auto'.*fold.*overwrite_checkpoints=True") as caught:
        train(make_trainer(), checkpoint_dir=tmp_path)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, FileExistsError)
    train(make_trainer(), num_epochs=2, checkpoint_dir=tmp_path, resume_from="auto")
    train(make_trainer(), checkpoint_dir=tmp_path, overwrite_checkpoints=True)


def test_one_trainer_may_train_into_its_folder_again(tmp_path):
    trainer = make_trainer()
    for _ in range(2):
        train(trainer, checkpoint_dir=tmp_path / "run")
    assert trainer.last_checkpoint.is_dir()


def test_a_folder_that_vanishes_is_noticed_at_the_next_save_and_made_again(tmp_path):
    folder = tmp_path / "run"
    callback = At(2, lambda: shutil.rmtree(folder))
    with pytest.warns(DrivetrainWarning, match="disappeared during the run"):
        train(make_trainer(callbacks=[callback]), num_epochs=3, checkpoint_dir=folder)
    assert {"checkpoint-ep2-ba6", "checkpoint-ep3-ba9"} <= {path.name for path in folder.iterdir()}
    resumed = make_trainer()
    train(resumed, num_epochs=3, checkpoint_dir=folder, resume_from="auto")
    assert (
        len(list(resumed.run_history.get_metric_values("train_loss_epoch"))) == 3
    )  # also what was lost with the folder


def test_a_folder_that_becomes_a_file_ends_the_run_at_the_next_save(tmp_path):
    folder = tmp_path / "run"

    def replace():
        shutil.rmtree(folder)
        folder.write_text("")

    trainer = make_trainer(callbacks=[At(2, replace)])
    with pytest.raises(WriteFailedError, match="checkpoint-ep2-ba6 was not saved"):
        train(trainer, num_epochs=9, checkpoint_dir=folder)
    assert trainer.state.clock.epoch == 2


def test_another_disk_under_the_same_name_is_not_written_to(tmp_path):
    with pytest.raises(WriteFailedError, match="together with its disk"):
        check_folder(tmp_path / "gone", -1, "checkpoint-1", RankExchange(), FolderLock(tmp_path))
    assert not (tmp_path / "gone").exists()


def test_a_read_only_folder_is_noticed_before_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *args: False)
    with Checkpointer(Context(x=1), dir=tmp_path) as keeper:
        with pytest.raises(WriteFailedError, match="read-only"):
            keeper.save()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_whose_last_save_failed_does_not_end_in_success(tmp_path, asynchronous):
    folder, disk = tmp_path / "run", full_disk(100)
    trainer = make_trainer(callbacks=[At(2, disk.__enter__)])
    try:
        with pytest.raises(WriteFailedError, match="No space left"):
            train(trainer, num_epochs=2, checkpoint_dir=folder, async_checkpoint=asynchronous)
    finally:
        disk.__exit__(None, None, None)
    assert trainer.state.clock.epoch == 2 and (folder / "checkpoint-ep1-ba3").is_dir()


def test_closing_raises_when_the_last_background_save_failed(tmp_path):
    keeper = Checkpointer(Context(x=torch.ones(100)), dir=tmp_path, async_save=True)
    with full_disk(100):
        keeper.save(id=1)
        with pytest.raises(WriteFailedError, match="No space left"):
            keeper.close()


def test_a_training_state_that_cannot_be_saved_raises(tmp_path):
    with full_disk(100), pytest.raises(WriteFailedError, match="No space left"):
        make_trainer().save_training_state(tmp_path / "state")


@pytest.mark.parametrize("content", [b"rubbish", b"\xff\xfe", b"../../etc", b""])
def test_a_garbage_best_file_is_passed_over_with_a_warning(tmp_path, caplog, content):
    (tmp_path / "best").write_bytes(content)
    with Checkpointer(Context(x=1), dir=tmp_path, keep=1) as keeper:
        keeper.save(id=1)
        keeper.save(id=2)
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-2"]
    assert "best" in caplog.text


def test_preparing_leaves_nothing_behind(tmp_path):
    with prepare_folder(tmp_path / "run", fresh=True):
        assert [path.name for path in (tmp_path / "run").iterdir()] == [WRITER_LOCK]
    assert list((tmp_path / "run").iterdir()) == []


@contextmanager
def other_process(folder):
    """Let a process of its own hold the lock of a folder."""
    code = (
        "import sys; from pathlib import Path; from drivetrain.core.locking import FolderLock\n"
        f"lock = FolderLock(Path(sys.argv[1]), {WRITER_LOCK!r}); print(lock.acquire(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.communicate(timeout=60)


def test_a_second_run_hears_who_writes_to_its_folder_before_the_first_step(tmp_path):
    train(make_trainer(), checkpoint_dir=tmp_path)
    trainer = make_trainer()
    before = [p.clone() for p in trainer.model.parameters()]
    with other_process(tmp_path) as process:
        for resume in (None, "auto"):
            with pytest.raises(FolderInUseError, match=rf"process {process.pid} on host .*since 20.*last heartbeat 20"):
                train(trainer, checkpoint_dir=tmp_path, resume_from=resume)
        assert all(map(torch.equal, before, trainer.model.parameters()))
        train(trainer, num_epochs=2, resume_from=tmp_path)  # reading needs no lock
        assert load_checkpoint(tmp_path)
        keeper = Checkpointer(Context(x=1), every=1, dir=tmp_path)
        for start in (keeper.restore, keeper.save):
            with pytest.raises(FolderInUseError, match=f"process {process.pid}"):
                start()
    train(make_trainer(), num_epochs=2, checkpoint_dir=tmp_path, resume_from="auto")


def train_into(folder):
    try:
        train(make_trainer(), checkpoint_dir=folder)
    except FolderInUseError as error:
        return str(error)
    return ""


def test_every_rank_hears_who_writes_to_the_folder(world2, tmp_path):
    with other_process(tmp_path) as process:
        assert all(f"process {process.pid}" in answer for answer in world2(train_into, tmp_path))
    assert world2(train_into, tmp_path) == ["", ""]


def fail():
    raise RuntimeError("on purpose")


def test_a_run_that_fails_releases_its_folder(tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"):
        train(make_trainer(callbacks=[At(1, fail)]), checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError):
        train(make_trainer(), 5, checkpoint_dir=tmp_path, overwrite_checkpoints=True)
    with other_process(tmp_path):
        pass


def test_two_runs_of_one_process_do_not_share_a_folder_and_saves_by_hand_do(tmp_path):
    outer = make_trainer()

    def inside():
        assert "process" in train_into(tmp_path)
        outer.save_training_state(tmp_path)
        with Checkpointer(Context(x=1), dir=tmp_path) as keeper:
            assert keeper.save(id="by-hand").is_dir()

    outer = make_trainer(callbacks=[At(1, inside)])
    train(outer, checkpoint_dir=tmp_path, num_epochs=2)
    assert not (tmp_path / WRITER_LOCK).exists() and outer.last_checkpoint.is_dir()


def test_a_folder_that_another_process_has_taken_over_is_not_written_to(tmp_path):
    with Checkpointer(Context(x=1), dir=tmp_path) as keeper:
        keeper.save(id=1)
        (tmp_path / WRITER_LOCK).unlink()
        with other_process(tmp_path), pytest.raises(FolderInUseError):
            keeper.save(id=2)
        keeper.save(id=3)  # free again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3", "last"]


def test_a_checkpointer_that_is_dropped_releases_its_folder(tmp_path):
    keeper = Checkpointer(Context(x=1), dir=tmp_path)
    keeper.save(id=1)
    assert (tmp_path / WRITER_LOCK).exists()
    del keeper
    gc.collect()
    assert not (tmp_path / WRITER_LOCK).exists()
