"""Thin pairs cost less, fit what they replace, and keep its geometry."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.algorithms.factorize import (
    Factorize,
    FactorizedConv2d,
    FactorizedLinear,
    apply_factorization,
    factorize_conv2d,
    factorize_matrix,
    factorizing_could_speedup,
)


@pytest.mark.parametrize(("inputs", "outputs", "area"), [(8, 8, 1), (16, 8, 9), (5, 30, 4)])
def test_a_split_pays_up_to_the_rank_of_the_formula(inputs, outputs, area):
    side = math.isqrt(area)
    conv = nn.Conv2d(inputs, outputs, side)
    most = math.ceil(inputs * area * outputs / (inputs * area + outputs) - 1)
    assert factorizing_could_speedup(conv, most) and not factorizing_could_speedup(conv, most + 1)
    numbers = most * (inputs * area + outputs)
    assert numbers < inputs * area * outputs <= (most + 1) * (inputs * area + outputs)


def test_fractions_are_of_the_smaller_side_and_groups_are_left_alone():
    assert FactorizedLinear(16, 64, latent_features=0.25).latent_size == 4
    assert FactorizedLinear(16, 64, latent_features=0.01).latent_size == 1
    assert not factorizing_could_speedup(nn.Conv2d(8, 8, 3, groups=2), 1)
    with pytest.raises(ValueError, match="cannot be factorized"):
        factorizing_could_speedup(nn.ReLU(), 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_the_pair_keeps_geometry_padding_mode_and_bias(bias, mode):
    conv = nn.Conv2d(8, 12, 3, stride=2, padding=1, dilation=1, bias=bias, padding_mode=mode)
    pair = FactorizedConv2d.from_conv2d(conv, latent_channels=4)
    x = torch.randn(2, 8, 9, 9)
    assert pair(x).shape == conv(x).shape
    assert pair.conv0.padding_mode == mode and pair.conv0.bias is None and (pair.conv1.bias is not None) == bias


def test_svd_keeps_a_layer_of_low_rank_exactly():
    conv = nn.Conv2d(8, 12, 3, padding=1)
    low = torch.randn(12, 3) @ torch.randn(3, 72)
    conv.weight.data = low.view(12, 8, 3, 3)
    x = torch.randn(2, 8, 5, 5)
    pair = FactorizedConv2d.from_conv2d(conv, latent_channels=3, initialize="svd")
    torch.testing.assert_close(pair(x), conv(x), atol=1e-4, rtol=1e-4)
    linear = nn.Linear(16, 12)
    linear.weight.data = torch.randn(12, 2) @ torch.randn(2, 16)
    pair = FactorizedLinear.from_linear(linear, latent_features=2, initialize="svd")
    h = torch.randn(4, 16)
    torch.testing.assert_close(pair(h), linear(h), atol=1e-4, rtol=1e-4)


def test_alternating_least_squares_beats_the_plain_cut_on_real_inputs():
    torch.manual_seed(0)
    X = torch.randn(200, 10) * torch.logspace(0, -2, 10)
    W, bias = torch.randn(10, 8), torch.randn(8)
    Y = X @ W + bias
    solution = factorize_matrix(X, Y, W, bias=bias, rank=3)
    U, s, Vh = torch.linalg.svd(W)
    cut = X @ (U[:, :3] * s[:3]) @ Vh[:3] + bias
    error = ((X @ solution.Wa @ solution.Wb + solution.bias - Y) ** 2).mean()
    assert error < 0.5 * ((cut - Y) ** 2).mean()
    assert solution.rank == 3 and solution.nmse == pytest.approx((error / Y.var(correction=0)).item(), rel=1e-3)
    best = torch.linalg.svdvals((Y - Y.mean(0)).double())[3:].square().sum() / Y.numel()
    assert error < 1.5 * best


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_convolutions_are_refitted_through_their_patches(mode):
    torch.manual_seed(0)
    layer = FactorizedConv2d(6, 8, 3, latent_channels=4, stride=2, padding=1, padding_mode=mode)
    x = torch.randn(8, 6, 7, 7)
    before = layer(x)
    solution = layer.set_rank(x, 3)
    after = layer(x)
    assert layer.latent_size == layer.latent_channels == 3
    nmse = ((after - before) ** 2).mean() / before.var(correction=0)
    assert solution.nmse == pytest.approx(nmse.item(), rel=1e-2) and nmse < 0.5
    assert layer.set_rank(x, 3) is None


def test_a_dense_kernel_of_low_rank_is_recovered():
    torch.manual_seed(0)
    W = (torch.randn(8, 2) @ torch.randn(2, 3 * 9)).view(8, 3, 3, 3)
    x, bias = torch.randn(4, 3, 8, 8), torch.randn(8)
    solution = factorize_conv2d(x, W, biasA=bias, rank=2, padding=1)
    out = F.conv2d(F.conv2d(x, solution.Wa, padding=1), solution.Wb, solution.bias)
    torch.testing.assert_close(out, F.conv2d(x, W, bias, padding=1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_pairs_are_refitted(bias):
    torch.manual_seed(0)
    layer = FactorizedLinear(16, 12, bias=bias, latent_features=5)
    x = torch.randn(64, 2, 16)
    before = layer(x)
    solution = layer.set_rank(x, 4)
    assert layer(x).shape == before.shape and (layer.linear1.bias is not None) == bias
    assert solution.nmse < 0.3
    with pytest.raises(ValueError, match="only be lowered"):
        layer.set_rank(x, 9)


def test_a_rank_that_saves_nothing_is_refused():
    with pytest.raises(ValueError, match="saves nothing"):
        FactorizedLinear(8, 8, latent_features=7)
    with pytest.raises(ValueError, match="grouped"):
        FactorizedConv2d(8, 8, 3, groups=2)
    with pytest.raises(ValueError, match="both False"):
        Factorize(False, False)
    with pytest.raises(ValueError, match="initialise|initialize"):
        Factorize(initialize="sdv")


def test_only_wide_layers_that_gain_are_replaced():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(32, 32), nn.Linear(32, 8), nn.Conv2d(32, 32, 1))
    apply_factorization(net, factorize_convs=False, min_features=16, latent_features=0.25)
    assert [type(layer).__name__ for layer in net] == ["Linear", "FactorizedLinear", "Linear", "Conv2d"]
