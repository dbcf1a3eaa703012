"""A block is tried without memory or arithmetic, and what cannot be tried is said."""

import logging

import pytest
import torch
from torch import nn

from drivetrain.module.probing import call_on_fake_tensors, copy_model, keeps_shape, restore_buffers_after


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv1(x)))


class Needy(nn.Module):
    def __init__(self, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, stride, 1)

    def forward(self, x, other):
        return self.conv(x) + other


@pytest.mark.parametrize(
    ("block", "answer"),
    [
        (ConvBlock(4), True),
        (nn.Conv2d(4, 4, 3, stride=2, padding=1), False),
        (nn.Conv2d(4, 8, 1), False),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), True),
        (nn.Linear(8, 8), True),
        (nn.Linear(8, 4), False),
        (nn.ReLU(), None),
        (Needy(), None),
        (Needy(stride=2), False),
    ],
)
def test_what_a_block_does_to_shapes(block, answer):
    assert keeps_shape(block) is answer


def test_the_trial_leaves_buffers_and_random_numbers_alone():
    block = ConvBlock(4)
    before, generator = {name: b.clone() for name, b in block.named_buffers()}, torch.get_rng_state()
    assert keeps_shape(block)
    assert all(torch.equal(b, before[name]) for name, b in block.named_buffers())
    assert torch.equal(torch.get_rng_state(), generator)


def test_statistics_of_batch_normalisation_are_restored_in_place():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mean = model[0].running_mean
    with restore_buffers_after(model):
        model(torch.randn(8, 4) + 3)
        assert mean.abs().max() > 0.1
    assert model[0].running_mean is mean
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_buffers_that_did_not_change_are_not_written_to():
    model = nn.BatchNorm1d(4).eval()
    versions = [buffer._version for buffer in model.buffers()]
    with restore_buffers_after(model):
        model(torch.randn(8, 4))
    assert [buffer._version for buffer in model.buffers()] == versions


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x):
        return self.out(self.second(torch.relu(self.first(x))))


def test_a_module_with_two_names_keeps_its_weights():
    block = Shared()
    before = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    assert keeps_shape(block)
    assert call_on_fake_tensors(block, (torch.randn(2, 4),)).shape == (2, 4)
    assert all(torch.equal(parameter, before[name]) for name, parameter in block.named_parameters())
    assert block.second is block.first


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_model_is_copied_with_what_a_forward_pass_left_in_it():
    model = nn.Sequential(nn.Linear(4, 4), torch.nn.utils.weight_norm(nn.Linear(4, 2)))
    model.last = {"hidden": model[0](torch.randn(3, 4))}  # with a graph, as an auxiliary loss keeps it
    copied, x = copy_model(model), torch.randn(3, 4)
    torch.testing.assert_close(copied(x), model(x))
    copied(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters())
    torch.testing.assert_close(copied.last["hidden"], model.last["hidden"].detach())


def test_a_block_that_cannot_be_tried_on_fake_tensors_logs_nothing():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(4), nn.Linear(6, 4)

        def forward(self, x):
            return self.norm(x) * torch.ones(3, 5, 7)

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        assert keeps_shape(Two()) is None
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not records
