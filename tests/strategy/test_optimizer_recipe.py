"""A plan makes the optimizer again with everything that is around it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.optim import Cautious, Lookahead
from drivetrain.strategy.optimizer_recipe import recipe_of
from drivetrain.train.trainer import Trainer


def wrapped(model: nn.Module) -> Lookahead:
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
    return Lookahead(Cautious(torch.optim.AdamW(groups, lr=0.1), eps=0.5), k=3, alpha=0.25)


def test_wrappers_are_put_around_the_new_optimizer():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    recipe = recipe_of(wrapped(model), model)
    made = recipe.build(recipe.groups(other), **recipe.settings | {"foreach": True})
    assert (type(made), made.k, made.alpha) == (Lookahead, 3, 0.25)
    inside = made.base_optimizer
    assert (type(inside), inside.eps, type(inside.base_optimizer)) == (Cautious, 0.5, torch.optim.AdamW)
    assert [(g["lr"], g["foreach"]) for g in made.param_groups] == [(0.1, True), (0.2, True)]
    assert [p for g in made.param_groups for p in g["params"]] == [other.weight, other.bias]


def test_a_plan_that_makes_the_optimizer_again_trains_with_wrappers():
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), TensorDataset(torch.randn(8, 3), torch.randint(0, 2, (8,)))
    before = model.weight.detach().clone()
    trainer = Trainer(model, nn.CrossEntropyLoss(), wrapped(model), (), strategy=["half"])
    trainer.train(data, num_epochs=2, per_device_batch_size=4)
    assert not torch.equal(before, model.weight.detach().float())
