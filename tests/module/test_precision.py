"""A model that autocasts by itself."""

import copy
import pickle

import torch
from torch import nn

from drivetrain.module.precision import autocast_forward


class Generator(nn.Linear):
    def generate(self, x):
        return self(x) @ self.weight.t()


def test_forward_and_generate_run_in_low_precision_and_names_stay():
    model, x = Generator(4, 4), torch.randn(2, 4)
    keys = list(model.state_dict())
    autocast_forward(model, "cpu", torch.bfloat16)
    assert model(x).dtype == model.generate(x).dtype == torch.bfloat16
    assert list(model.state_dict()) == keys and isinstance(model, Generator)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_a_model_without_generate_gets_none():
    model = autocast_forward(nn.Linear(2, 2), "cpu", torch.bfloat16)
    assert not hasattr(model, "generate") and model(torch.ones(1, 2)).dtype == torch.bfloat16
