"""A run that is interrupted and resumed ends exactly like one that is not."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import StateError
from drivetrain.train.callbacks import SaveTrainingStateCallback, TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, make_trainer, train, weights


class Pull(TrainerCallback):
    """Pulls the plug after so many batches."""

    def __init__(self, at):
        self.at = at

    def batch_checkpoint(self, state, logger):
        pass

    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch == self.at:
            raise RuntimeError("the plug is pulled")


def build(callbacks=(), **kwargs):
    model = make_model(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=4, **kwargs)


SETTINGS = {
    "num_epochs": 3,
    "per_device_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clip_norm": 1.0,
    "create_scheduler_fn": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    "checkpoint_every": "1ba",
    "async_checkpoint": False,
}


def run(trainer, folder, **kwargs):
    settings = {**SETTINGS, **kwargs}
    return trainer.train(make_data(22), eval_dataset=make_data(9), checkpoint_dir=folder, **settings)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    trainer = build()
    history = run(trainer, tmp_path_factory.mktemp("unbroken"))
    return weights(trainer.model), trainer.optimizer.state_dict(), history, torch.get_rng_state()


@pytest.mark.parametrize("at", [1, 3, 5, 6, 11, 12, 17])
def test_a_killed_run_resumes_bit_for_bit(unbroken, tmp_path, at):
    with pytest.raises(RuntimeError, match="plug"):
        run(build([Pull(at)]), tmp_path)
    torch.manual_seed(999)
    trainer = build()
    history = run(trainer, tmp_path, resume_from="auto")
    expected_weights, optimizer, expected_history, generator = unbroken
    assert all(map(torch.equal, weights(trainer.model), expected_weights))
    for ours, theirs in zip(trainer.optimizer.state_dict()["state"].values(), optimizer["state"].values()):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    for name in expected_history.get_metric_names():
        assert history.get_metric_values(name) == expected_history.get_metric_values(name)
    assert torch.equal(torch.get_rng_state(), generator)


class DrawsAtTheStart(TrainerCallback):
    def on_training_run_start(self, trainer, **kwargs):
        torch.rand(3)


def test_numbers_that_are_drawn_before_the_first_resumed_step_change_nothing(unbroken, tmp_path):
    with pytest.raises(RuntimeError, match="plug"):
        run(build([Pull(5)]), tmp_path)
    trainer = build([DrawsAtTheStart()])
    run(trainer, tmp_path, resume_from="auto")
    assert all(map(torch.equal, weights(trainer.model), unbroken[0]))


def test_resuming_a_finished_run_with_a_larger_limit_goes_on(unbroken, tmp_path):
    run(build(), tmp_path, num_epochs=None, max_num_train_steps=4)  # ends inside the second epoch
    trainer = build()
    run(trainer, tmp_path, resume_from="auto")
    assert all(map(torch.equal, weights(trainer.model), unbroken[0]))


def test_auto_without_a_checkpoint_starts_afresh_and_says_so(unbroken, tmp_path, capsys):
    trainer = build()
    run(trainer, tmp_path / "empty", resume_from="auto")
    assert "starting a new run" in capsys.readouterr().out
    assert all(map(torch.equal, weights(trainer.model), unbroken[0]))


def test_a_damaged_newest_checkpoint_is_passed_over(unbroken, tmp_path):
    with pytest.raises(RuntimeError, match="plug"):
        run(build([Pull(9)]), tmp_path, keep_checkpoints=4)
    newest = (tmp_path / "last").read_text().strip()
    data = tmp_path / newest / "tensors.safetensors"
    data.write_bytes(data.read_bytes()[:-7])
    trainer = build()
    run(trainer, tmp_path, resume_from="auto")
    assert all(map(torch.equal, weights(trainer.model), unbroken[0]))


@pytest.mark.parametrize("schedule", [SETTINGS["create_scheduler_fn"], None], ids=["schedule", "constant"])
def test_settings_that_the_checkpoint_replaces_are_named(schedule, tmp_path, capsys):
    run(build(), tmp_path, num_epochs=1, create_scheduler_fn=schedule)
    run(build(), tmp_path, num_epochs=2, create_scheduler_fn=schedule, resume_from="auto")
    assert "continues with" not in capsys.readouterr().out
    edited = build()
    edited.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25)
    run(edited, tmp_path, create_scheduler_fn=schedule, resume_from="auto")
    expected = "with lr=0.01, weight_decay=0.01 from the checkpoint, not with the given lr=0.5, weight_decay=0.25"
    assert f"Parameter group 0 continues {expected}. To change" in capsys.readouterr().out


def test_groups_that_differ_alike_take_one_line(tmp_path, capsys):
    def in_groups(lr):
        trainer = build()
        trainer.optimizer = torch.optim.SGD([{"params": [p]} for p in trainer.model.parameters()], lr=lr)
        return trainer

    run(in_groups(0.1), tmp_path, num_epochs=1, create_scheduler_fn=None)
    run(in_groups(0.2), tmp_path, num_epochs=2, create_scheduler_fn=None, resume_from="auto")
    said = capsys.readouterr().out
    assert said.count("continues with") == 1 and "3 more groups differ, too." in said


def test_resume_after_epoch_two_of_three_trains_one_more_epoch(unbroken, tmp_path):
    def saving():
        return [SaveTrainingStateCallback(save_dir=tmp_path / "states", save_every_n_epochs=1)]

    run(build(saving()), None, num_epochs=2)
    trainer = build(saving())
    run(trainer, None, resume_from=tmp_path / "states" / "epoch_2")
    assert all(map(torch.equal, weights(trainer.model), unbroken[0]))


def test_a_training_state_loaded_by_hand_is_where_the_next_run_goes_on(unbroken, tmp_path):
    first = build()
    run(first, None, num_epochs=2)
    first.save_training_state(tmp_path / "state", {"note": "two"})
    trainer = build()
    loaded = trainer.load_training_state(tmp_path / "state")
    assert loaded == {"current_epoch": 3, "note": "two"}
    assert all(map(torch.equal, weights(trainer.model), weights(first.model)))
    run(trainer, None)
    assert all(map(torch.equal, weights(trainer.model), unbroken[0]))


def test_the_files_of_save_checkpoint_round_trip(tmp_path):
    trainer = build()
    run(trainer, None, num_epochs=1)
    trainer.save_checkpoint(tmp_path / "c.pt", {"note": "first", "tensor": torch.ones(2)})
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    assert set(content) == {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "note", "tensor"}
    other = build()
    other.scheduler = SETTINGS["create_scheduler_fn"](other.optimizer)
    loaded = other.load_checkpoint(tmp_path / "c.pt")
    assert loaded["note"] == "first"
    assert all(map(torch.equal, weights(other.model), weights(trainer.model)))
    assert other.optimizer.state_dict()["state"][0]["exp_avg"].equal(
        trainer.optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_training_without_checkpoints_equals_training_with_them(unbroken):
    trainer = build()
    run(trainer, None)
    assert all(map(torch.equal, weights(trainer.model), unbroken[0]))


def test_make_trainer_is_deterministic():
    first, second = make_trainer(seed=1), make_trainer(seed=1)
    train(first, train_dataloader_kwargs={})
    train(second, train_dataloader_kwargs={})
    assert all(map(torch.equal, weights(first.model), weights(second.model)))


def test_a_run_that_has_reached_its_end_says_so(tmp_path, capsys):
    for epochs, said in ((1, False), (1, True), (2, False)):
        model = nn.Linear(4, 2)
        trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
        data = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
        trainer.train(data, num_epochs=epochs, checkpoint_dir=tmp_path, resume_from="auto")
        assert ("Nothing is left to train" in capsys.readouterr().out) is said


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.optim.SGD, torch.optim.AdamW),
        (torch.optim.AdamW, torch.optim.SGD),
        (torch.optim.RMSprop, torch.optim.Adam),
    ],
)
def test_another_kind_of_optimizer_cannot_continue_a_run(tmp_path, first, second):
    data = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))

    def train(kind, epochs):
        model = nn.Linear(4, 2)
        trainer = Trainer(model, nn.CrossEntropyLoss(), kind(model.parameters(), lr=0.1), callbacks=())
        trainer.train(data, num_epochs=epochs, checkpoint_dir=tmp_path, resume_from="auto")

    train(first, 1)
    with pytest.raises(
        StateError, match=f"(?s)another kind of optimizer than {second.__name__}: it has no .*load_checkpoint"
    ):
        train(second, 2)
    train(first, 2)


def test_a_loss_that_is_a_function_continues_a_run_whose_loss_was_a_module(tmp_path):
    whole, first, second = make_trainer(), make_trainer(), make_trainer()
    module = second.loss_func
    assert isinstance(module, nn.Module)
    second.loss_func = lambda outputs, targets: module(outputs, targets)
    train(whole, num_epochs=2)
    train(first, num_epochs=1, checkpoint_dir=tmp_path)
    train(second, num_epochs=2, checkpoint_dir=tmp_path, resume_from="auto")
    assert all(map(torch.equal, weights(whole.model), weights(second.model)))
