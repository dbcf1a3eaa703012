"""A model that computes nothing, so that everything else can be measured."""

import torch
from torch import nn

from drivetrain.algorithms.no_op_model import NoOpModel, NoOpModelClass
from drivetrain.core.event import Event
from drivetrain.train.trainer import Trainer
from drivetrain.train.verification import verify_resume
from tests.algorithms.surgery_models import ConvNet, images


def build():
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=[NoOpModel()])


def test_its_one_weight_learns_to_be_one():
    trainer = build()
    assert isinstance(trainer.model, NoOpModelClass) and trainer.model.weight.item() == 1.5
    trainer.train(images(), num_epochs=10, per_device_batch_size=8)
    assert abs(trainer.model.weight.item() - 1) < 0.3


def test_it_multiplies_the_targets():
    model, batch = NoOpModelClass(ConvNet()), (torch.zeros(2, 3), torch.tensor([1, 2]))
    out = model(batch)
    assert out.tolist() == [1.5, 3.0]
    torch.testing.assert_close(model.loss(out, batch), torch.tensor((0.5**2 + 1.0) / 2))
    assert "ConvNet" in repr(model)


def test_the_optimizer_holds_the_one_weight():
    trainer = build()
    (group,) = trainer.optimizer.param_groups
    assert group["params"] == [trainer.model.weight] and group["lr"] == 0.01


def test_resume_is_exact_and_a_second_application_changes_nothing():
    assert verify_resume(build, images(), num_steps=4, per_device_batch_size=8).is_exact
    trainer = build()
    model = trainer.model
    trainer.engine.fire(Event.INIT)
    assert trainer.model is model
    assert [event for event in Event if NoOpModel().match(event, None)] == [Event.INIT]


def test_an_optimizer_that_keeps_names_has_the_one_of_the_weight():
    model = ConvNet()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.01)
    Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), algorithms=[NoOpModel()])
    assert optimizer.param_groups[0]["param_names"] == ["weight"]
