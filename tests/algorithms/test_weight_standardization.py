"""Kernels are standardized; parameters stay the same objects; the last layers can be left out."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from drivetrain.algorithms.weight_standardization import (
    WeightStandardization,
    WeightStandardizer,
    apply_weight_standardization,
)


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3, 5, 5), (4, 3, 2, 2, 2)])
def test_every_filter_has_mean_zero_and_variance_one(shape):
    W = torch.randn(shape, dtype=torch.float64) * 3 + 1
    rows = W.flatten(1)
    expected = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, unbiased=False, keepdim=True) + 1e-10).sqrt()
    torch.testing.assert_close(WeightStandardizer()(W).flatten(1), expected)


def test_the_parameter_stays_and_trains():
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert apply_weight_standardization(net) == 1
    assert net[0].parametrizations.weight.original is weight
    before = weight.detach().clone()
    net(torch.randn(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)


class Backwards(nn.Module):
    """Calls its convolutions in another order than it defines them."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Conv2d(4, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.second(self.first(x))


class Untraceable(Backwards):
    def forward(self, x):
        return self.second(self.first(x)) if x.sum() > 0 else self.first(x)


def test_the_last_layers_of_the_execution_are_left_out():
    net = Backwards()
    assert apply_weight_standardization(net, n_last_layers_ignore=1) == 1
    assert parametrize.is_parametrized(net.first) and not parametrize.is_parametrized(net.second)


def test_a_model_that_cannot_be_traced_is_taken_as_defined():
    net = Untraceable()
    with pytest.warns(UserWarning, match="could not trace"):
        apply_weight_standardization(net, n_last_layers_ignore=1)
    assert parametrize.is_parametrized(net.second) and not parametrize.is_parametrized(net.first)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="n_last_layers_ignore"):
        WeightStandardization(-1)


def test_a_constant_filter_in_half_precision_is_zero():
    conv = nn.Sequential(nn.Conv2d(2, 3, 3)).half()
    conv[0].weight.data[0] = 0.5
    apply_weight_standardization(conv)
    assert conv[0].weight.dtype is torch.float16 and not conv[0].weight[0].any() and conv[0].weight.isfinite().all()
