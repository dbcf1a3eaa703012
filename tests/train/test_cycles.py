"""A run that has ended keeps nothing alive: loaders and data go with the last name of the user's, without the cyclic collector."""

import gc
import weakref

import pytest
import torch
from torch import nn

from drivetrain import algorithms
from drivetrain.data.loader import SmartDataLoader
from drivetrain.optim import ConstantLr, OptimSet
from drivetrain.train.callbacks import DEFAULT_CALLBACKS, EarlyStoppingCallback, LossSpike
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data


def make_model():
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), max_iter=2)


def units(model):
    return OptimSet(main=ConstantLr("SGD", {"lr": 0.01}, model))


def ended_run(make_optimizer=sgd, **settings):
    """Train, and return what would tell whether trainer, loaders and data are still alive."""
    made = {name: settings.pop(name)() for name in ("callbacks", "algorithms") if name in settings}
    model, data, held_out = make_model(), make_data(), make_data()
    loader = SmartDataLoader(data, batch_size=8)
    trainer = Trainer(model, nn.CrossEntropyLoss(), make_optimizer(model), **{"callbacks": (), **made})
    trainer.train(loader, num_epochs=2, eval_dataset=held_out, **settings)
    return [weakref.ref(held) for held in (trainer, loader, data, held_out, model, trainer._eval_dataloader)]


KINDS = {
    "plain": {},
    "default callbacks": {"callbacks": lambda: DEFAULT_CALLBACKS},
    "evaluation inside epochs": {"eval_interval": "1ba"},
    "several evaluations of a window": {"make_optimizer": lbfgs, "gradient_accumulation_steps": 2},
    "algorithms": {"algorithms": lambda: [algorithms.SAM(), algorithms.LabelSmoothing()]},
    "units": {"make_optimizer": units, "gradient_accumulation_steps": 2},
    "micro-batches": {"microbatch_size": 2},
    "rollback": {"nonfinite": "rollback"},
    "watching callbacks": {"callbacks": lambda: [EarlyStoppingCallback(), LossSpike()]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_loaders_and_data_are_freed_without_the_cyclic_collector(kind):
    ended_run(**KINDS[kind])  # what is imported on the way keeps frames
    gc.collect()
    gc.disable()
    try:
        alive = ended_run(**KINDS[kind])
        assert [held() for held in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_that_saves_checkpoints_is_freed_too(tmp_path, in_background):
    ended_run(checkpoint_dir=tmp_path / "first", async_checkpoint=in_background)
    gc.collect()
    gc.disable()
    try:
        alive = ended_run(checkpoint_dir=tmp_path / "second", async_checkpoint=in_background)
        assert [held() for held in alive] == [None] * len(alive)
    finally:
        gc.enable()
