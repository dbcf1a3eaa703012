"""Norms compute in autocast's precision, on whatever device, and as usual without it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.algorithms.low_precision_groupnorm import (
    LowPrecisionGroupNorm,
    LPGroupNorm,
    apply_low_precision_groupnorm,
)
from drivetrain.algorithms.low_precision_layernorm import (
    LowPrecisionLayerNorm,
    LPLayerNorm,
    apply_low_precision_layernorm,
)
from drivetrain.context.state import State
from drivetrain.core.engine import Engine
from drivetrain.core.errors import NoEffectWarning
from drivetrain.core.event import Event
from tests.algorithms.surgery_models import TextNet

NORMS = [
    (LPLayerNorm, nn.LayerNorm(6), (4, 6)),
    (LPLayerNorm, nn.LayerNorm((3, 6), eps=0.1, bias=False), (4, 3, 6)),
    (LPLayerNorm, nn.LayerNorm(6, elementwise_affine=False), (4, 6)),
    (LPGroupNorm, nn.GroupNorm(2, 6), (4, 6, 3)),
    (LPGroupNorm, nn.GroupNorm(2, 6, affine=False), (4, 6, 3)),
]
apply_to = {LPLayerNorm: apply_low_precision_layernorm, LPGroupNorm: apply_low_precision_groupnorm}


def functional(norm, x, dtype):
    weight = None if norm.weight is None else norm.weight.to(dtype)
    bias = None if norm.bias is None else norm.bias.to(dtype)
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x.to(dtype), norm.normalized_shape, weight, bias, norm.eps)
    return F.group_norm(x.to(dtype), norm.num_groups, weight, bias, norm.eps)


@pytest.mark.parametrize(("low", "norm", "shape"), NORMS)
def test_it_is_effective_under_autocast_and_plain_without(low, norm, shape):
    net = nn.Sequential(norm)
    apply_to[low](net)
    x = torch.randn(shape)
    assert type(net[0]) is low and net[0].weight is norm.weight and net[0].bias is norm.bias
    torch.testing.assert_close(net(x), norm(x))
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, functional(norm, x, torch.bfloat16))


def test_a_subclass_of_a_norm_stays():
    class Own(nn.LayerNorm):
        pass

    net = nn.Sequential(Own(4), nn.LayerNorm(4))
    apply_low_precision_layernorm(net)
    assert [type(layer) for layer in net] == [Own, LPLayerNorm]


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_without_autocast_nothing_changes_and_that_is_said(precision):
    net = nn.Sequential(nn.LayerNorm(4))
    with pytest.warns(NoEffectWarning, match="autocast"):
        apply_low_precision_layernorm(net, precision)
    assert type(net[0]) is nn.LayerNorm


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16", "bf16"])
def test_mixed_precision_is_accepted_under_every_name(precision):
    net = nn.Sequential(nn.LayerNorm(4))
    apply_low_precision_layernorm(net, precision)
    assert type(net[0]) is LPLayerNorm


@pytest.mark.parametrize("cls", [LowPrecisionLayerNorm, LowPrecisionGroupNorm])
@pytest.mark.parametrize("at", [Event.INIT, "before_load", "AFTER_LOAD"])
def test_it_acts_at_the_event_asked_for(cls, at):
    algorithm = cls(apply_at=at)
    assert [event for event in Event if algorithm.match(event, None)] == [Event(at)]


def test_an_event_at_which_the_model_is_in_use_is_refused():
    with pytest.raises(ValueError, match="BEFORE_LOAD"):
        LowPrecisionLayerNorm(apply_at=Event.BATCH_START)
    with pytest.raises(ValueError, match="BEFORE_LOAD"):
        LowPrecisionLayerNorm(apply_at="befor_load")


def test_the_run_s_precision_decides():
    state = State(model=TextNet(), seed=0)
    state.precision = "fp32"
    with pytest.warns(NoEffectWarning):
        Engine(state, plugins=[LowPrecisionLayerNorm()]).fire(Event.INIT)
    state.precision = "bf16"
    Engine(state, plugins=[LowPrecisionLayerNorm()]).fire(Event.INIT)
    assert isinstance(state.model.norm, LPLayerNorm)
