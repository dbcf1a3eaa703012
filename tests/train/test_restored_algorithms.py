"""A checkpoint that brings an algorithm with it says so by name."""

import warnings

import pytest
import torch
from torch import nn

from drivetrain.algorithms import SqueezeExcite
from drivetrain.core.errors import DrivetrainWarning
from drivetrain.train.trainer import Trainer


def make_trainer(algorithms):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=algorithms)


def squeeze():
    return SqueezeExcite(min_channels=3, latent_channels=2)


@pytest.fixture
def saved(tmp_path):
    data = [(torch.randn(3, 4, 4), index % 2) for index in range(8)]
    train = {"num_epochs": 1, "per_device_batch_size": 4, "checkpoint_dir": tmp_path / "checkpoints"}
    make_trainer([squeeze()]).train(data, **train)
    return data, train | {"num_epochs": 2, "resume_from": "auto"}


def test_an_algorithm_that_the_user_did_not_list_is_named(saved):
    data, train = saved
    trainer = make_trainer([])
    with pytest.warns(DrivetrainWarning, match=r"adds the algorithm SqueezeExcite\(.*latent_channels=2"):
        trainer.train(data, **train)
    assert [type(plugin).__name__ for plugin in trainer.state.algorithms] == ["SqueezeExcite"]


def test_an_algorithm_that_the_user_listed_needs_no_words(saved):
    data, train = saved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer([squeeze()]).train(data, **train)
