"""The test for numbers that are not finite, and the policy about them."""

import math

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.finite import (
    NonFinitePolicy,
    StepGuard,
    any_nonfinite,
    nonfinite_flag,
    nonfinite_names,
    nonfinite_state,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_entry_of_one_tensor_sets_the_flag(dtype, value):
    tensors = [torch.ones(3, dtype=dtype), torch.ones(2, 2, dtype=dtype)]
    assert nonfinite_flag(tensors).item() == 0
    tensors[1][1, 0] = value
    assert nonfinite_flag(tensors).item() == 1


def test_the_test_changes_no_gradient():
    tensors = [torch.randn(5, 7), torch.full((3,), 1e38)]
    before = [tensor.clone() for tensor in tensors]
    nonfinite_flag(tensors)
    assert all(map(torch.equal, tensors, before))


def test_sparse_gradients_are_tested_too():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 1])).sum().backward()
    assert nonfinite_flag([layer.weight.grad]).item() == 0
    assert nonfinite_flag([layer.weight.grad * math.nan]).item() == 1


@pytest.mark.parametrize("module", [nn.Linear(3, 2), nn.Linear(512, 256), nn.Embedding(4, 2, sparse=True)])
def test_a_guard_skips_one_bad_entry_of_small_large_and_sparse_gradients(module):
    guard, optimizer = StepGuard(NonFinitePolicy()), torch.optim.SGD(module.parameters(), lr=0.1)
    guard.prepare(optimizer, module, is_exchanged=False, is_tested_elsewhere=False)
    taken = []
    for factor in (1.0, math.nan, math.inf, 1.0):
        weight = module.weight
        if isinstance(module, nn.Embedding):
            weight.grad = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [factor, 1.0]]).to_sparse(1)
        else:
            weight.grad = torch.ones_like(weight)
            weight.grad[1, 2] = factor
        taken.append(guard.should_step())
        guard.close()
    assert taken == [True, False, False, True] and (guard.total, guard.in_a_row) == (2, 0)


@pytest.mark.parametrize("earlier", [0, 4])  # copies are kept of some updates
def test_statistics_of_an_open_window_are_restored_after_resuming_too(earlier):
    """The second micro-batch of a window is bad, and the run was stopped between the two."""
    norm = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    first, second = StepGuard(NonFinitePolicy()), StepGuard(NonFinitePolicy())
    first.prepare(optimizer, norm, is_exchanged=False, is_tested_elsewhere=False)
    for _ in range(earlier):
        first.open()
        first.close()
        norm(torch.randn(4, 2))
    before = [norm.running_mean.clone(), norm.running_var.clone()]
    first.open()
    norm(torch.randn(4, 2))
    second.load_state_dict(first.state_dict(is_open=True))
    second.prepare(optimizer, norm, is_exchanged=False, is_tested_elsewhere=False)
    norm(torch.full((4, 2), math.nan)).sum().backward()
    assert not second.should_step()
    assert torch.equal(norm.running_mean, before[0]) and torch.equal(norm.running_var, before[1])


def test_parameters_without_gradients_are_finite():
    assert any_nonfinite([nn.Parameter(torch.ones(2))]) is False and any_nonfinite([]) is False


def test_a_flag_on_the_device_rejects_as_a_known_one_does():
    layer = nn.Linear(2, 1)
    guard, optimizer = StepGuard(NonFinitePolicy()), torch.optim.SGD(layer.parameters(), lr=0.1)
    guard.prepare(optimizer, layer, is_exchanged=False, is_tested_elsewhere=False)
    layer.weight.grad = torch.ones(1, 2)
    taken = []
    for flags in ([False], [torch.tensor(False), True], [True], [False, torch.tensor(True)], [torch.tensor([False])]):
        for flag in flags:
            guard.reject(flag)
        taken.append(guard.should_step())
        guard.close()
    assert taken == [True, False, False, False, True]


def test_a_norm_that_overflows_does_not_make_finite_numbers_suspect():
    named = [("a", torch.full((9,), 3e38)), ("b", torch.tensor([1.0, math.inf])), ("c", torch.tensor([0, 1]))]
    assert nonfinite_names(named) == ["b"]
    assert nonfinite_names(named, only_nan=True) == []


def test_a_state_names_weights_and_optimizer_states_and_leaves_masks_alone():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    items = {"model": model, "optimizers.0": optimizer, "epoch": 3}
    assert nonfinite_state(items) == []
    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = math.inf
    with torch.no_grad():
        model.bias[0] = math.nan
    model.mask[0, 0] = math.nan
    assert nonfinite_state(items) == ["model.bias", "optimizers.0.0.exp_avg_sq", "model.mask"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_has_gradients_that_are_not(value):
    guard, weight = StepGuard(NonFinitePolicy()), torch.ones(2, requires_grad=True)
    loss = weight.sum() + value  # its own gradient is one
    loss.backward(guard.seed(loss))
    assert weight.grad.isnan().all()
    weight.grad = None
    guard.mark(weight.sum() + value).backward()
    assert weight.grad.isnan().all()
    good = weight.sum()
    assert guard.mark(good) is good and guard.seed(good) is None


def test_raise_is_another_name_for_stop_and_others_are_named():
    assert NonFinitePolicy.of("raise").action == "stop"
    with pytest.raises(ConfigError, match="rollback"):
        NonFinitePolicy.of("rolback")
    with pytest.raises(ConfigError, match="limit"):
        NonFinitePolicy(limit=0)
