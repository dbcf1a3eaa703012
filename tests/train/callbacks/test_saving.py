"""Callbacks that keep a run."""

import math

import numpy as np
import pytest
import torch

from drivetrain.checkpoint.store import load_checkpoint
from drivetrain.context.context import Context
from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.train.callbacks import (
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
    WSDCheckpointCallback,
)
from drivetrain.train.schedulers import CosineLrScheduler, WSDLrScheduler
from tests.train.callbacks.test_stopping import Script
from tests.train.tasks import make_data, make_model, make_trainer, train, weights


class Snapshots(TrainerCallback):
    """Keeps the weights after every epoch and after every update."""

    def __init__(self):
        self.epochs, self.updates = [], {}

    def batch_end(self, state, logger):
        self.updates[state.clock.step] = weights(state.model)

    def on_training_run_epoch_end(self, trainer, **kwargs):
        self.epochs.append(weights(trainer.model))


def same(a, b):
    return all(map(torch.equal, a, b))


def run_best(tmp_path, values, name="best.pt", **kwargs):
    best = SaveBestModelCallback(tmp_path / name, watch_metric="score", **kwargs)
    snapshots = Snapshots()
    trainer = make_trainer(callbacks=[Script(*values), snapshots, best])
    train(trainer, eval_dataset=make_data(8), num_epochs=len(values))
    return trainer, best, snapshots


@pytest.mark.parametrize(
    ("values", "greater", "epoch"),
    [([3, 1, 2], False, 2), ([3, 1, 4], True, 3), ([math.nan, 2, math.nan], False, 2), ([2, 2, 2], False, 1)],
)
def test_the_best_model_is_saved_and_loaded_at_the_end(tmp_path, values, greater, epoch):
    trainer, best, snapshots = run_best(tmp_path, values, greater_is_better=greater)
    assert best.best_metric == values[epoch - 1]
    assert best.best_metric_epoch == epoch
    assert same(weights(trainer.model), snapshots.epochs[epoch - 1])
    content = torch.load(tmp_path / "best.pt", weights_only=True)
    assert content["score"] == values[epoch - 1]


def test_the_first_save_also_holds_the_scheduler(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt")
    trainer = make_trainer(callbacks=[best])
    train(trainer, eval_dataset=make_data(8), create_scheduler_fn=CosineLrScheduler.create_scheduler_fn())
    content = torch.load(tmp_path / "best.pt", weights_only=True)
    assert {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "eval_loss_epoch"} == set(content)


def test_numbers_of_numpy_are_saved_as_plain_ones(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.logspace(-1, 0, 3)[0])
    best = SaveBestModelCallback(tmp_path / "best.pt")
    train(make_trainer(model, optimizer=optimizer, callbacks=[best]), eval_dataset=make_data())  # loads it at the end
    trainer = make_trainer()
    trainer.save_checkpoint(tmp_path / "own.pt", {"score": np.float32(0.5), "nested": {"count": np.int64(3)}})
    loaded = trainer.load_checkpoint(tmp_path / "own.pt")
    assert (loaded["score"], loaded["nested"]) == (0.5, {"count": 3})


def test_optimizer_and_scheduler_can_be_left_out(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", save_optimizer=False, save_scheduler=False)
    train(make_trainer(callbacks=[best]), eval_dataset=make_data(8))
    assert set(torch.load(tmp_path / "best.pt", weights_only=True)) == {"model_state_dict", "eval_loss_epoch"}


def test_a_run_without_a_save_does_not_load_an_older_file_of_that_name(tmp_path):
    torch.save({"model_state_dict": make_model().state_dict()}, tmp_path / "best.pt")
    trainer, best, snapshots = run_best(tmp_path, [math.nan, math.nan])
    assert best.best_metric is None
    assert same(weights(trainer.model), snapshots.epochs[-1])


def test_the_last_weights_stay_when_that_is_wanted(tmp_path):
    trainer, _, snapshots = run_best(tmp_path, [1, 2], load_saved_checkpoint=False)
    assert same(weights(trainer.model), snapshots.epochs[-1])


def test_a_best_file_that_has_gone_is_a_warning_and_not_the_end_of_the_run(tmp_path):
    class Remove(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            (tmp_path / "best.pt").unlink(missing_ok=True)

    best = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="score")
    trainer = make_trainer(callbacks=[Script(1, 2), Remove(), best])
    with pytest.warns(UserWarning, match=r"best\.pt, which no longer exists"):
        train(trainer, eval_dataset=make_data(8), num_epochs=2)


def test_a_second_run_starts_afresh_unless_told_otherwise(tmp_path):
    for reset, expected in ((True, 5.0), (False, 1.0)):
        trainer, best, _ = run_best(tmp_path, [1.0], reset_on_train=reset)
        trainer.callback_handler.callbacks[0].values = [5.0]
        train(trainer, eval_dataset=make_data(8))
        assert best.best_metric == expected


def test_watching_a_metric_without_evaluation_data_is_an_error_before_training(tmp_path):
    trainer = make_trainer(callbacks=[SaveBestModelCallback(tmp_path / "best.pt")])
    with pytest.raises(ValueError, match="eval_loss_epoch"):
        train(trainer)
    assert trainer.state.clock.batch == 0


def test_a_resumed_run_remembers_its_best_model(tmp_path):
    def make():
        best = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="score")
        return make_trainer(callbacks=[Script(1.0, 3.0, 2.0), best]), best

    settings = {"eval_dataset": make_data(8), "checkpoint_dir": tmp_path / "run"}
    first, _ = make()
    train(first, num_epochs=2, **settings)
    second, best = make()
    second.callback_handler.callbacks[0].values = [2.0]
    train(second, num_epochs=3, resume_from="auto", **settings)
    assert (best.best_metric, best.best_metric_epoch) == (1.0, 1)


# ---------------------------------------------------------------------------------------------- whole states


def saved_weights(folder):
    context = Context(model=make_model())
    context.load_state_dict(load_checkpoint(folder), strict=False)
    return weights(context.model)


def folders(path):
    return sorted(entry.name for entry in path.iterdir())


def test_states_are_saved_every_so_many_epochs_and_at_the_end(tmp_path):
    states = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=2)
    train(make_trainer(callbacks=[states]), num_epochs=5)
    assert folders(tmp_path) == ["epoch_2", "epoch_4", "final"]


def test_a_step_state_holds_what_is_after_that_steps_update(tmp_path):
    snapshots = Snapshots()
    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=2, save_at_end=False)
    train(make_trainer(callbacks=[snapshots, states]), num_epochs=2)
    assert folders(tmp_path) == ["step_2", "step_4", "step_6"]
    assert same(saved_weights(tmp_path / "step_4"), snapshots.updates[4])


def test_steps_are_updates_under_accumulation(tmp_path):
    snapshots = Snapshots()
    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, save_at_end=False)
    trainer = make_trainer(callbacks=[snapshots, states])
    train(trainer, make_data(40), gradient_accumulation_steps=2)  # 5 batches: windows of 2, 2 and 1
    assert folders(tmp_path) == ["step_1", "step_2", "step_3"]
    assert same(saved_weights(tmp_path / "step_2"), snapshots.updates[2])


def test_an_old_state_goes_when_a_newer_one_is_complete(tmp_path):
    counts = []

    class Count(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            counts.append(folders(tmp_path) if tmp_path.exists() else [])

    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, max_checkpoints=2)
    train(make_trainer(callbacks=[states, Count()]), make_data(48))
    assert folders(tmp_path) == ["final", "step_5", "step_6"]
    assert [path.name for path in states._saved_checkpoints] == ["step_5", "step_6"]
    assert max(map(len, counts)) == 2
    assert counts[2:] == [[f"step_{n - 1}", f"step_{n}"] for n in range(2, 6)]


def test_a_resumed_run_names_and_removes_states_as_if_it_had_not_been_interrupted(tmp_path):
    def make():
        return make_trainer(callbacks=[SaveTrainingStateCallback(tmp_path, 1, None, False, max_checkpoints=2)])

    train(make(), num_epochs=2)
    assert folders(tmp_path) == ["epoch_1", "epoch_2"]
    resumed = make()
    train(resumed, num_epochs=3, resume_from=tmp_path / "epoch_2")
    whole = make_trainer()
    train(whole, num_epochs=3)
    assert same(weights(resumed.model), weights(whole.model))
    assert folders(tmp_path) == ["epoch_2", "epoch_3"]


@pytest.mark.parametrize("wrong", [{"save_every_n_steps": 0}, {"save_every_n_epochs": -1}, {"max_checkpoints": 0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SaveTrainingStateCallback(**wrong)


def test_a_callback_that_saves_nothing_says_so_and_trains(tmp_path):
    with pytest.warns(DrivetrainWarning, match="saves nothing"):
        callback = SaveTrainingStateCallback(tmp_path, save_at_end=False)
    train(make_trainer(callbacks=[callback]))
    assert not list(tmp_path.iterdir())


def test_a_development_run_leaves_no_file(tmp_path):
    callbacks = [
        SaveTrainingStateCallback(tmp_path / "states", 1, 1, max_checkpoints=1),
        SaveBestModelCallback(tmp_path / "best.pt", load_saved_checkpoint=False),
    ]
    train(make_trainer(callbacks=callbacks), eval_dataset=make_data(8), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- warm-up, stable, decay


def wsd(**arguments):
    return WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0, decay_phase_ratio=0.3, lr_min=0.1, **arguments)


def run_wsd(tmp_path, **kwargs):
    snapshots, callback = Snapshots(), WSDCheckpointCallback(tmp_path / "wsd")
    trainer = make_trainer(callbacks=[snapshots, callback])
    train(trainer, make_data(80), num_epochs=2, create_scheduler_fn=wsd(num_checkpoints=2), **kwargs)  # 20 updates
    return trainer, snapshots


def test_states_before_and_models_after_each_decay_are_saved(tmp_path):
    _, snapshots = run_wsd(tmp_path)
    assert folders(tmp_path / "wsd") == [
        "checkpoint_10_wsd_post_decay.pt", "checkpoint_17_wsd_pre_decay", "checkpoint_20_wsd_post_decay.pt",
        "checkpoint_7_wsd_pre_decay",
    ]  # fmt: skip
    for step in (10, 20):
        content = torch.load(tmp_path / "wsd" / f"checkpoint_{step}_wsd_post_decay.pt", weights_only=True)
        assert content["step"] == step
        assert content["checkpoint_type"] == "wsd_post_decay"
        model = make_model()
        model.load_state_dict(content["model_state_dict"])
        assert same(weights(model), snapshots.updates[step])
    assert same(saved_weights(tmp_path / "wsd" / "checkpoint_7_wsd_pre_decay"), snapshots.updates[7])


@pytest.mark.parametrize("name", ["checkpoint_7_wsd_pre_decay", "checkpoint_10_wsd_post_decay.pt"])
def test_a_continuation_starts_from_the_weights_at_the_full_rate_and_from_step_zero(tmp_path, name):
    _, snapshots = run_wsd(tmp_path)
    seen = []

    class Look(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            if not seen:
                rate = trainer.optimizer.param_groups[0]["lr"]
                seen.append((weights(trainer.model), rate, trainer.state.clock.step, trainer.run_history.current_epoch))

    callback = WSDCheckpointCallback(tmp_path / "more", initial_checkpoint=tmp_path / "wsd" / name)
    trainer = make_trainer(model=make_model(dropout=0.0), callbacks=[callback, Look()])
    train(trainer, make_data(80), num_epochs=1, create_scheduler_fn=wsd(is_continuation_from_checkpoint=True))
    start, rate, step, epoch = seen[0]
    assert same(start, snapshots.updates[7 if "pre" in name else 10])
    assert (rate, step, epoch) == (0.1, 0, 1)
    assert trainer.state.clock.step == 10
    assert trainer.scheduler.get_checkpoint_steps() == [5, 10]  # the old shape on the new length
    assert folders(tmp_path / "more")[-1] == "checkpoint_9_wsd_pre_decay"


def test_another_scheduler_is_refused_with_advice(tmp_path):
    trainer = make_trainer(callbacks=[WSDCheckpointCallback(tmp_path)])
    with pytest.raises(ValueError, match=r"needs a scheduler with get_checkpoint_steps\(\)"):
        train(trainer)


def test_a_missing_initial_checkpoint_is_an_error(tmp_path):
    callback = WSDCheckpointCallback(tmp_path, initial_checkpoint=tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        train(make_trainer(callbacks=[callback]), create_scheduler_fn=wsd())


def test_an_optimizer_that_does_not_fit_leaves_the_model_alone(tmp_path):
    make_trainer().save_checkpoint(tmp_path / "a.pt")
    model = make_model()
    with torch.no_grad():
        model[0].weight.zero_()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    trainer = make_trainer(model, optimizer=torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ValueError, match=r"groups have \[4\] parameters.*\[2, 2\]"):
        trainer.load_checkpoint(tmp_path / "a.pt")
    assert not model[0].weight.any()
