"""Cautious updates in the Trainer wrap whatever optimizer there is."""

import pytest
import torch
from torch import nn

from drivetrain import optim
from drivetrain.algorithms.cautious import Cautious
from drivetrain.algorithms.muon import Muon
from drivetrain.train.trainer import Trainer
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import ConvNet, image_data, same, train, weights


def test_a_run_equals_one_with_the_wrapped_optimizer_given_directly():
    trainer = conv_run(Cautious(), optimizer="AdamW")
    train(trainer, image_data())
    torch.manual_seed(0)
    model = ConvNet()
    wrapped = optim.Cautious(torch.optim.AdamW(model.parameters(), lr=0.01))
    direct = Trainer(model, nn.CrossEntropyLoss(), wrapped, (), seed=7)
    train(direct, image_data())
    assert same(weights(trainer.model), weights(direct.model))


def test_it_comes_after_what_replaces_the_optimizer_and_refuses_bad_settings():
    trainer = conv_run(Cautious(), Muon())
    assert type(trainer.optimizer.base_optimizer).__name__ == "MuonHybrid"
    with pytest.raises(ValueError, match="eps"):
        Cautious(-1)
