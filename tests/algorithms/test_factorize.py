"""Thin pairs cost less, fit what they replace, and keep its geometry."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain.algorithms.factorize import (
    Factorize,
    FactorizedConv2d,
    FactorizedLinear,
    LowRankSolution,
    apply_factorization,
    factorize_conv2d,
    factorize_matrix,
    factorizing_could_speedup,
)
from drivetrain.core.errors import NoEffectWarning
from drivetrain.train.trainer import Trainer


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
    assert not factorizing_could_speedup(nn.ReLU(), 1)


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
    with pytest.raises(ValueError, match="initialise|initialize"):
        Factorize(initialize="sdv")


@pytest.mark.parametrize("rank", [4, 5, 8, 9, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_a_rank_as_large_as_a_side_gives_the_one_best_matrix(rank, bias):
    torch.manual_seed(0)
    X, W, b = torch.randn(40, 8), torch.randn(8, 4), torch.randn(4)
    solution = factorize_matrix(X, X @ W + b * bias, W, bias=b if bias else None, rank=rank)
    assert (solution.Wb, solution.rank) == (None, -1) and solution.nmse < 1e-10
    torch.testing.assert_close(solution.Wa, W, rtol=1e-4, atol=1e-5)
    assert solution.bias is (b if bias else None)
    x, kernel = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 2, 2)
    solution = factorize_conv2d(x, kernel, None, rank, b if bias else None)
    assert (solution.Wb, solution.rank) == (None, -1)
    torch.testing.assert_close(solution.Wa, kernel, rtol=1e-4, atol=1e-5)


def test_a_rank_as_large_as_that_of_the_pair_returns_the_pair():
    X, first, second = torch.randn(40, 8), torch.randn(8, 2), torch.randn(2, 6)
    solution = factorize_matrix(X, X @ first @ second, first, second, rank=3)
    assert solution.Wa is first and solution.Wb is second and solution.rank == -1
    x, first, second = torch.randn(4, 3, 8, 8), torch.randn(2, 3, 3, 3), torch.randn(6, 2, 1, 1)
    solution = factorize_conv2d(x, first, second, 2)
    assert torch.equal(solution.Wa, first) and torch.equal(solution.Wb, second)


def test_a_fraction_is_of_the_inputs_and_the_arguments_of_a_convolution_stand_in_composers_order():
    X, W = torch.randn(40, 16), torch.randn(16, 6)
    assert factorize_matrix(X, X @ W, W).rank == 4
    assert list(inspect.signature(factorize_conv2d).parameters) == [
        "X", "Wa", "Wb", "rank", "biasA", "biasB", "n_iters", "conv2d_kwargs",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="biasB belongs to"):
        factorize_conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 2, 2), biasB=torch.randn(4))
    assert LowRankSolution() == LowRankSolution(None, None, None, -1, 0.0)


def test_factorized_layers_answer_like_the_ones_they_replace():
    conv, linear = FactorizedConv2d(8, 12, 3, 4, padding=1), FactorizedLinear(16, 12, latent_features=5)
    assert (conv.in_channels, conv.out_channels, conv.latent_channels, conv.kernel_size) == (8, 12, 4, 3)
    assert (linear.in_features, linear.out_features, linear.latent_features) == (16, 12, 5)
    assert list(conv.state_dict()) == list(linear.state_dict()) == ["module0.weight", "module1.weight", "module1.bias"]
    assert conv.module0 is conv.conv0 and linear.module1 is linear.linear1
    assert conv.should_factorize(3) and not conv.should_factorize(4)
    assert FactorizedConv2d.max_allowed_latent_channels(8, 12, 3) == 10
    assert FactorizedConv2d.max_allowed_latent_features(8, 12, 3) == 10
    assert FactorizedLinear.max_allowed_latent_features(16, 12) == 6
    assert FactorizedLinear.max_allowed_latent_channels(16, 12) == 6
    before = linear.module0.weight.clone()
    linear.reset_parameters()
    assert not torch.equal(linear.module0.weight, before)
    solution = linear.solution_for_rank(torch.randn(40, 16), 3)
    assert linear.latent_size == 5
    linear.apply_solution(solution)
    assert linear.latent_size == 3 and linear.module0.out_features == linear.module1.in_features == 3


def test_nothing_to_factorize_is_warned_about():
    with pytest.warns(NoEffectWarning, match="both False"):
        apply_factorization(nn.Sequential(nn.Linear(600, 600)), False, False)
    with pytest.warns(NoEffectWarning, match="both False"):
        Trainer(nn.Sequential(nn.Linear(4, 4)), None, None, callbacks=(), algorithms=[Factorize(False, False)])
    net = nn.Sequential(nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 3), nn.Linear(32, 32))
    parametrizations.weight_norm(net[0])
    with pytest.warns(NoEffectWarning, match="left 1 layers of Sequential as they are.*parametrized"):
        apply_factorization(net, min_channels=16, latent_channels=4, min_features=16)
    assert isinstance(net[1], FactorizedConv2d) and isinstance(net[2], FactorizedLinear)


def test_only_wide_layers_that_gain_are_replaced():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(32, 32), nn.Linear(32, 8), nn.Conv2d(32, 32, 1))
    apply_factorization(net, factorize_convs=False, min_features=16, latent_features=0.25)
    assert [type(layer).__name__ for layer in net] == ["Linear", "FactorizedLinear", "Linear", "Conv2d"]


PADDINGS = [
    {"padding": "valid"},
    {"padding": "same", "dilation": 2},
    {"padding": "same", "padding_mode": "circular"},
    {"padding": (1, 0), "stride": 2, "padding_mode": "reflect"},
]


@pytest.mark.parametrize("geometry", PADDINGS)
def test_the_rank_of_a_convolution_with_any_padding_can_be_lowered(geometry):
    torch.manual_seed(0)
    conv, x = FactorizedConv2d(6, 5, (3, 4), 2, **geometry).double(), torch.randn(4, 6, 9, 9).double()
    conv.module0.weight.data[1] = conv.module0.weight.data[0]  # two channels alike: the second is not needed
    before = conv(x)
    conv.set_rank(x, 1)
    torch.testing.assert_close(conv(x), before)


def test_the_weight_and_bias_are_those_of_one_layer_that_computes_the_same():
    linear, conv = FactorizedLinear(6, 7, latent_features=2), FactorizedConv2d(4, 5, 3, 2, padding=1)
    x, images = torch.randn(3, 6), torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(F.linear(x, linear.weight, linear.bias), linear(x))
    torch.testing.assert_close(F.conv2d(images, conv.weight, conv.bias, padding=1), conv(images))


def test_a_double_layer_is_split_in_doubles():
    model = nn.Sequential(nn.Linear(8, 8)).double()
    model[0].weight.data = torch.randn(8, 2).double() @ torch.randn(2, 8).double()
    x = torch.randn(4, 8).double()
    before = model(x)
    apply_factorization(model, min_features=1, latent_features=2, initialize="svd")
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
