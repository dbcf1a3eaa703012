"""Modules are prepared before the first step."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain.train.callbacks import ConvertSyncBatchNormCallback, MoveModulesToDeviceCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_trainer, train


class Placed(nn.Module):
    """Remembers where it was moved."""

    def __init__(self):
        super().__init__()
        self.moves = []

    def to(self, device):
        self.moves.append(torch.device(device))
        return self

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)


class WithTeacher(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = Placed()


def test_modules_beside_the_model_are_moved_before_training_and_evaluation():
    trainer = make_trainer(cls=WithTeacher, callbacks=[MoveModulesToDeviceCallback()])
    trainer.loss_func = loss = Placed()
    train(trainer)
    assert torch.device("cpu") in trainer.teacher.moves
    assert torch.device("cpu") in loss.moves
    before = len(trainer.teacher.moves)
    trainer.evaluate(make_data(8))
    assert len(trainer.teacher.moves) == before + 1


@pytest.mark.gpu
def test_a_loss_with_weights_follows_the_model_to_the_device():
    trainer = make_trainer(callbacks=[MoveModulesToDeviceCallback()], device="cuda")
    trainer.loss_func = nn.CrossEntropyLoss(weight=torch.ones(3))
    train(trainer)
    assert trainer.loss_func.weight.is_cuda


def test_batch_norms_are_left_alone_on_one_process():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    train(make_trainer(model, callbacks=[ConvertSyncBatchNormCallback()]))
    assert type(model[1]) is nn.BatchNorm1d


def _convert_on_two_ranks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(model, callbacks=[ConvertSyncBatchNormCallback()])
        train(trainer, make_data(32))
    state = SimpleNamespace(model=model, device="cuda")  # what the callback does there needs no device
    ConvertSyncBatchNormCallback().before_load(state, None)
    kept = all(a is b for a, b in zip(model.parameters(), state.model.parameters()))
    return [str(one.message) for one in caught], type(state.model[1]).__name__, kept


def test_batch_norms_are_converted_where_torch_can_synchronise_them(world2):
    for messages, kind, kept in world2(_convert_on_two_ranks):
        assert any("ConvertSyncBatchNormCallback has no effect on a CPU" in message for message in messages)
        assert kind == "SyncBatchNorm"
        assert kept  # the optimizer's parameters are the same objects
