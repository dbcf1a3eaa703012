"""A Trainer's one stream of metrics reaches a Recorder."""

import pytest
import torch

from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm
from drivetrain.record import Recorder, read_metrics
from drivetrain.train.callbacks import TrainerCallback
from tests.train.tasks import make_data, make_trainer, train


class Note(Algorithm):
    """Logs the loss tensor of every batch."""

    events = frozenset({Event.BATCH_END})

    def apply(self, event, state, logger):
        logger.log_metrics({"batch_loss": state.loss})


class Stop(TrainerCallback):
    """Stops the program in the second epoch."""

    def on_train_epoch_end(self, trainer, **kwargs):
        if trainer.state.clock.epoch == 2:
            raise KeyboardInterrupt


def rows_of(folder):
    return [(row["step"], row["tag"], row["value"]) for row in read_metrics(folder, kind="scalar")]


def test_history_and_recorder_tell_the_same(tmp_path):
    with Recorder(tmp_path, tensorboard=False) as recorder:
        trainer = make_trainer(loggers=[recorder], algorithms=[Note()])
        history = train(trainer, num_epochs=2, eval_dataset=make_data(8))
    rows = rows_of(tmp_path)
    assert [step for step, tag, _ in rows if tag == "batch_loss"] == [1, 2, 3, 4, 5, 6]
    for tag in ("train_loss_epoch", "eval_loss_epoch"):
        assert [(step, value) for step, name, value in rows if name == tag] == list(
            zip((3, 6), history.get_metric_values(tag))
        )
    batch_losses = [value for _, tag, value in rows if tag == "batch_loss"]
    torch.testing.assert_close(
        torch.tensor(batch_losses), torch.stack(list(history.get_metric_values("batch_loss"))).detach()
    )


def test_a_resumed_trainer_continues_the_journal(tmp_path):
    settings = {"num_epochs": 3, "checkpoint_every": "1ep", "async_checkpoint": False}

    def run(name, callbacks=(), resume_from=None):
        with Recorder(tmp_path / name, tensorboard=False) as recorder:
            trainer = make_trainer(loggers=[recorder], algorithms=[Note()], callbacks=callbacks, seed=3)
            train(trainer, checkpoint_dir=tmp_path / f"{name}-checkpoints", resume_from=resume_from, **settings)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("cut", callbacks=[Stop()])
    assert rows_of(tmp_path / "cut")[-1][0] == 6  # it had gone on after its last checkpoint
    run("cut", resume_from="auto")
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
