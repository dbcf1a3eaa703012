"""Without a device that multiplies in 8 bits nothing changes, and that is said."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.fp8_linear import FP8Linear, apply_fp8_linear
from drivetrain.context.state import State
from drivetrain.core.engine import Engine
from drivetrain.core.errors import NoEffectWarning
from drivetrain.core.event import Event
from drivetrain.module.fp8 import Float8Linear


def test_on_a_cpu_it_warns_and_leaves_the_model():
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.warns(NoEffectWarning, match=r"8\.9"):
        Engine(State(model=model, seed=0, device="cpu"), plugins=[FP8Linear(min_features=16)]).fire(Event.INIT)
    assert type(model[0]) is nn.Linear
    assert [event for event in Event if FP8Linear().match(event, None)] == [Event.INIT]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="tensorwise"):
        FP8Linear(recipe="tensor")
    with pytest.raises(ValueError, match="min_features"):
        FP8Linear(min_features=0)


@pytest.mark.gpu
def test_on_a_new_gpu_wide_layers_are_replaced_and_train():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_fp8_linear(model, min_features=64, optimizers=optimizer)
    assert isinstance(model[0], Float8Linear)
    x = torch.randn(50, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        model(x).float().square().mean().backward()
    optimizer.step()
