"""A copied Trainer is one of its own; one that has trained says what to do instead."""

import copy

import pytest
import torch

from drivetrain.callbacks import TrainerCallback
from drivetrain.core.errors import ConfigError
from tests.train.tasks import make_data, make_trainer, train, weights


class Seen(TrainerCallback):
    """Keeps which trainers it was called with."""

    def __init__(self):
        self.trainers = set()

    def on_train_epoch_end(self, trainer, **kwargs):
        self.trainers.add(id(trainer))


def test_a_copy_trains_by_itself_like_the_original():
    trainer = make_trainer(callbacks=[Seen()])
    copied, before = copy.deepcopy(trainer), weights(trainer.model)
    history = train(copied, num_epochs=2, eval_dataset=make_data(8))
    assert all(map(torch.equal, before, weights(trainer.model)))
    assert copied.callback_handler.callbacks[0].trainers == {id(copied)}
    expected = train(trainer, num_epochs=2, eval_dataset=make_data(8))
    assert trainer.callback_handler.callbacks[0].trainers == {id(trainer)}
    assert all(map(torch.equal, weights(trainer.model), weights(copied.model)))
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert history.get_metric_values(name) == expected.get_metric_values(name)


def test_a_callback_added_to_a_copy_runs_there_only():
    trainer = make_trainer()
    copied, seen = copy.deepcopy(trainer), Seen()
    copied.callback_handler.add_callback(seen)
    train(trainer)
    train(copied)
    assert seen.trainers == {id(copied)}


def test_a_trainer_that_has_trained_names_what_to_do_instead(tmp_path):
    trainer, other = make_trainer(), make_trainer()
    train(trainer)
    with pytest.raises(ConfigError, match=r"save_training_state.*load_training_state"):
        copy.deepcopy(trainer)
    trainer.save_training_state(tmp_path)
    other.load_training_state(tmp_path)
    assert all(map(torch.equal, weights(trainer.model), weights(other.model)))
