"""The history lies in a file next to the checkpoints: what is resumed is what was recorded, and changes are found."""

import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import snapshot, writer
from drivetrain.core.errors import CheckpointError, DrivetrainWarning
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.history_file import DamagedHistoryError, HistoryFile, read_history
from drivetrain.train.tracking import InMemoryRunHistory
from tests.checkpoint.victim import Forked
from tests.train.tasks import make_data, make_trainer, train


class PulledError(Exception):
    pass


class Log(TrainerCallback):
    """Records values of several kinds at every step; pulls the plug before a batch."""

    def __init__(self, pull=None):
        self.pull = pull

    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch == self.pull:
            raise PulledError

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        batch = trainer.state.clock.batch
        trainer.logbook.log_metrics({"loss": batch_output["loss"], "count": batch, "even": batch % 2 == 0})
        if batch % 3 == 0:
            trainer.logbook.log_metrics({"matrix": torch.full((2, 2), float(batch)), "word": f"batch {batch}"})


def run(folder=None, pull=None, epochs=3, **kwargs):
    trainer = make_trainer(callbacks=[Log(pull)])
    if folder is not None:
        kwargs = {"checkpoint_dir": folder, "checkpoint_every": "1ba", "async_checkpoint": False, **kwargs}
    try:
        history = train(trainer, num_epochs=epochs, eval_dataset=make_data(8), **kwargs)
    except PulledError:
        return None
    return content(history)


def content(history):
    names = list(history.get_metric_names())
    return [
        (
            name,
            [value.tolist() if isinstance(value, torch.Tensor) else value for value in history.get_metric_values(name)],
            history._moments(name),
        )
        for name in names
    ]


def state_of(folder, name):
    return json.loads((folder / name / "state.json").read_text())["state"]["history"]


@pytest.mark.parametrize("pull", [2, 3, 7])
def test_a_resumed_history_is_that_of_the_uninterrupted_run(tmp_path, pull):
    whole = run()
    run(tmp_path, pull)
    assert run(tmp_path, resume_from="auto") == whole
    assert [name for name, *_ in whole][:5] == ["loss", "count", "even", "matrix", "word"]


@pytest.mark.parametrize("moment", ["before the checkpoint is valid", "while the file is written"])
def test_a_kill_between_the_file_and_the_checkpoint_changes_nothing(tmp_path, moment):
    whole = run()

    def victim():
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        commit, calls = HistoryFile.commit, []

        def tear(file):
            calls.append(file)
            if len(calls) == 5:
                commit(file)
                path = file.folder / file.name
                os.truncate(path, path.stat().st_size - 7)
                die()
            commit(file)

        if moment == "while the file is written":
            HistoryFile.commit = tear
        else:
            known, write = [], writer._commit
            writer._commit = lambda *args: die() if len(known) == 4 else (known.append(1), write(*args))
        run(tmp_path)

    assert Forked(victim).wait() == -signal.SIGKILL
    size = (tmp_path / "history.bin").stat().st_size
    assert size > state_of(tmp_path, (tmp_path / "last").read_text().strip())["file"]["size"]
    assert run(tmp_path, resume_from="auto") == whole


def test_checkpoints_with_the_history_inside_still_load(tmp_path, monkeypatch):
    @contextmanager
    def inside(*_):
        yield None

    whole = run()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "with_side_file_reference", inside)
        run(tmp_path, 4)
    assert not (tmp_path / "history.bin").exists()
    assert "metrics" in state_of(tmp_path, "checkpoint-ep1-ba4")
    assert run(tmp_path, resume_from="auto") == whole


def test_two_ranks_resume_their_history(world2, tmp_path):
    whole = world2(run)
    world2(run, tmp_path, 2, async_checkpoint=True)
    resumed = world2(run, tmp_path, resume_from="auto")
    assert resumed[0] == whole[0]
    assert resumed[1][1:] == whole[1][1:]  # all but the loss, which is each rank's own: a checkpoint has rank 0's
    assert [path.name for path in tmp_path.glob("history*")] == ["history.bin"]


def test_a_changed_file_is_named(tmp_path):
    run(tmp_path, 5)
    path = tmp_path / "history.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(
        CheckpointError, match=r"history\.bin was changed: it has .* bytes, and the checkpoint refers to"
    ):
        run(tmp_path, resume_from="auto")
    path.write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:])
    with pytest.raises(DamagedHistoryError, match=r"history\.bin was changed: its first .* move this one away"):
        run(tmp_path, resume_from="auto")
    path.write_bytes(data)
    assert run(tmp_path, resume_from="auto") == run()


def test_a_checkpoint_without_its_file_resumes_with_an_empty_history(tmp_path):
    run(tmp_path / "a", 5)
    shutil.copytree(tmp_path / "a" / "checkpoint-ep1-ba5", tmp_path / "b" / "checkpoint-ep1-ba5")
    with pytest.warns(DrivetrainWarning, match=r"history\.bin, which is not in .*b: the history is empty"):
        found = run(tmp_path / "b", resume_from="auto")
    values = {name: values for name, values, _ in found}
    assert values["count"] == [5, 6, 7, 8] and (tmp_path / "b" / "history.bin").exists()
    assert run(tmp_path / "c", resume_from=tmp_path / "a") == run()  # into another folder: the file there is whole
    assert run(tmp_path / "c", epochs=4, resume_from="auto") == run(epochs=4)


def test_an_older_checkpoint_is_continued_without_harm_to_newer_ones(tmp_path):
    run(tmp_path, 5, keep_checkpoints=20)
    newer = tmp_path / "checkpoint-ep1-ba5"
    shutil.copytree(newer, tmp_path / "checkpoint-first")  # the resumed run saves another ep1-ba5
    assert run(tmp_path, keep_checkpoints=20, resume_from=tmp_path / "checkpoint-ep0-ba2") == run()
    for name in ("checkpoint-first", "checkpoint-ep1-ba5", "checkpoint-ep0-ba1"):
        assert run(tmp_path / f"from-{name}", resume_from=tmp_path / name) == run()
    assert [path.name for path in tmp_path.glob("history*")] == ["history.bin"]


def test_a_new_run_in_the_folder_of_an_old_one_has_its_own_history(tmp_path):
    run(tmp_path, 5, keep_checkpoints=50)
    old = tmp_path / "checkpoint-ep1-ba5"
    shutil.copytree(old, tmp_path / "checkpoint-old")
    run(tmp_path, 2, keep_checkpoints=50, overwrite_checkpoints=True)
    assert run(tmp_path / "a", resume_from=tmp_path / "checkpoint-ep0-ba2") == run()
    assert run(tmp_path / "b", resume_from=tmp_path / "checkpoint-old") == run()


def test_retention_keeps_the_file(tmp_path):
    assert run(tmp_path, keep_checkpoints=1) == run()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1
    assert run(tmp_path, epochs=4, resume_from="auto") == run(epochs=4)


def test_a_file_that_cannot_be_written_is_made_up_for_by_the_next_save(tmp_path, monkeypatch, caplog):
    flush, calls = os.fsync, []

    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("history.bin"):
            calls.append(descriptor)
            if len(calls) in (2, 3):
                raise OSError(28, "No space left on device")
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert run(tmp_path, 5) is None
    assert caplog.text.count("No space left on device") == 2
    assert not (tmp_path / "checkpoint-ep0-ba2").exists() and (tmp_path / "checkpoint-ep1-ba4").exists()
    assert run(tmp_path, resume_from="auto") == run()


def test_a_file_removed_during_the_run_is_started_again(tmp_path, caplog):
    class Remove(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            if trainer.state.clock.batch == 4:
                (tmp_path / "history.bin").unlink()

    trainer = make_trainer(callbacks=[Log(), Remove()])
    train(
        trainer, num_epochs=2, eval_dataset=make_data(8), checkpoint_dir=tmp_path, checkpoint_every="1ba", async_checkpoint=False
    )  # fmt: skip
    assert "was truncated" in caplog.text
    assert run(tmp_path, resume_from="auto") == run()


def test_forgotten_metrics_stay_forgotten(tmp_path):
    history = InMemoryRunHistory()

    def saved():
        reference, write = history.prepare_side_file(tmp_path)
        write()
        series = read_history(tmp_path, reference)
        return {name: values.values() for name, values in series.items()}

    for value in (1.0, 2.0):
        history.update_metric("a", value)
        history.update_metric("b", value)
    assert saved() == {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    history.delete_metric("a")
    assert saved() == {"b": [1.0, 2.0]}
    history.update_metric("a", 3)
    assert saved() == {"b": [1.0, 2.0], "a": [3]}
    history.reset()
    assert saved() == {}
    history.update_metric("b", "text")
    assert saved() == {"b": ["text"]}


def test_a_save_writes_only_what_is_new(tmp_path):
    history, sizes, states = InMemoryRunHistory(), [0], set()
    for count in (100_000, 10, 10):
        for value in range(count):
            history.update_metric("loss", float(value))
        reference, write = history.prepare_side_file(tmp_path)
        write()
        with history.referring_to(reference):
            states.add(tuple(history.state_dict()))
        sizes.append((tmp_path / "history.bin").stat().st_size)
    assert sizes[1] > 1_600_000 and sizes[2] - sizes[1] == sizes[3] - sizes[2] < 400
    assert states == {("current_epoch", "prefix", "batches_before", "file")}


@pytest.mark.parametrize(
    "reference",
    [{"name": "../../etc/passwd", "size": 3, "sha256": ""}, {"name": "history.bin"}, None, {"name": 3, "size": 1}],
)
def test_a_reference_elsewhere_is_rejected(reference):
    state = {**InMemoryRunHistory().state_dict(), "file": reference}
    with pytest.raises(CheckpointError, match="does not refer to a history file"):
        InMemoryRunHistory().load_state_dict(state)


def test_runs_continue_hard_linked_copies_of_a_folder_without_harm_to_each_other(tmp_path):
    unbroken = run(tmp_path / "unbroken")
    run(tmp_path / "first", pull=3)
    shutil.copytree(tmp_path / "first", tmp_path / "second", copy_function=os.link)
    (tmp_path / "second/last").unlink()
    assert run(tmp_path / "second", pull=6, resume_from="auto") is None
    assert run(tmp_path / "first", resume_from="auto") == unbroken
    assert run(tmp_path / "second", resume_from="auto") == unbroken


def test_a_run_continues_beside_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    unbroken = run(tmp_path / "unbroken")
    run(tmp_path / "copied", pull=3)
    before, access = (tmp_path / "copied/history.bin").read_bytes(), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "history.bin" and access(path, mode))
    assert run(tmp_path / "copied", resume_from="auto") == unbroken
    assert (tmp_path / "copied/history.bin").read_bytes() == before


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    run(tmp_path, pull=3)
    (tmp_path / "history.bin").rename(tmp_path / "elsewhere")
    (tmp_path / "history.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"history\.bin cannot be read .*link.*move it away"):
        run(tmp_path, resume_from="auto")


def test_a_training_state_saved_by_hand_brings_its_history(tmp_path):
    trainer = make_trainer(callbacks=[Log()])
    train(trainer, num_epochs=2, eval_dataset=make_data(8))
    trainer.save_training_state(tmp_path)
    assert (tmp_path / "history.bin").exists()
    other = make_trainer(callbacks=[Log()])
    other.load_training_state(tmp_path)
    history = train(other, num_epochs=3, eval_dataset=make_data(8))
    assert content(history) == run()
