"""Muon in the Trainer: the split, the rates, and that it equals the optimizer it puts in place."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.muon import Muon
from drivetrain.algorithms.schedule_free import ScheduleFree
from drivetrain.algorithms.soap import SOAP
from drivetrain.optim import MuonHybrid
from drivetrain.train.trainer import Trainer
from tests.algorithms.optimizer_tasks import conv_run
from tests.algorithms.tasks import ConvNet, TinyTransformer, image_data, same, train, weights


def test_a_run_equals_one_with_the_optimizer_given_directly():
    trainer = conv_run(Muon(lr=0.03, weight_decay=0.2), optimizer="AdamW")
    train(trainer, image_data())
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = MuonHybrid(
        model,
        0.03,
        weight_decay=0.2,
        adam_lr=0.03,
        adam_betas=(0.9, 0.999),
        adam_weight_decay=0.01,
        adjust_lr="match_rms_adamw",
    )
    direct = Trainer(model, nn.CrossEntropyLoss(), optimizer, (), seed=7)
    train(direct, image_data())
    assert same(weights(trainer.model), weights(direct.model))


def test_the_split_is_explained_and_groups_keep_their_rates():
    model = TinyTransformer()
    slow = [model.qkv.weight, model.qkv.bias]
    rest = [p for p in model.parameters() if all(p is not one for one in slow)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": slow, "lr": 1e-4, "weight_decay": 0.5}], lr=1e-3)
    muon = Muon(other_kwargs={"betas": (0.8, 0.9)})
    assert "no model yet" in muon.explain()
    trainer = Trainer(model, None, optimizer, (), algorithms=[muon])
    groups = trainer.optimizer.param_groups
    assert [(g["muon"], g["lr"], g["param_names"]) for g in groups if g["muon"]] == [
        (True, 1e-3, ["out.weight"]),
        (True, 1e-4, ["qkv.weight"]),
    ]
    others = [g for g in groups if not g["muon"]]
    assert [g["betas"] for g in others] == [(0.8, 0.9)] * 2 and [g["weight_decay"] for g in others] == [0.01, 0.5]
    text = muon.explain()
    assert "output head" in text and "embedding" in text


@pytest.mark.parametrize("make", [Muon, SOAP, lambda: ScheduleFree("sgd", 0.1)])
def test_a_replaced_optimizer_still_holds_frozen_weights_and_those_of_the_loss(make):
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)), nn.CrossEntropyLoss()
    loss.register_parameter("temperature", nn.Parameter(torch.ones(())))
    model[0].requires_grad_(False)
    everything = [*model.parameters(), *loss.parameters()]
    trainer = Trainer(model, loss, torch.optim.SGD(everything, lr=0.1), (), algorithms=[make()])
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in everything} and len(held) == len(everything)


def test_a_model_whose_hidden_matrices_are_frozen_has_nothing_for_muon():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[:2].requires_grad_(False)
    with pytest.raises(ValueError, match="no hidden matrix to train"):
        Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), (), algorithms=[Muon()])


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="adamw"):
        Muon(other="adam")
    with pytest.raises(ValueError, match="'betas'"):
        Muon(other_kwargs={"beta": 1})
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="no hidden matrix"):
        Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), (), algorithms=[Muon()])
