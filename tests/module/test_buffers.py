"""Buffers are as before after a trial pass."""

import torch
from torch import nn

from drivetrain.module.buffers import buffers_kept


def test_statistics_of_batch_normalisation_are_restored_in_place():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mean = model[0].running_mean
    with buffers_kept(model):
        model(torch.randn(8, 4) + 3)
        assert mean.abs().max() > 0.1
    assert model[0].running_mean is mean
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_buffers_that_did_not_change_are_not_written_to():
    model = nn.BatchNorm1d(4).eval()
    versions = [buffer._version for buffer in model.buffers()]
    with buffers_kept(model):
        model(torch.randn(8, 4))
    assert [buffer._version for buffer in model.buffers()] == versions
