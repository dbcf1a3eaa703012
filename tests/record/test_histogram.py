"""Histograms against numpy's."""

import numpy as np
import pytest
import torch

from drivetrain.record import buffer
from drivetrain.record.buffer import count_values, read_histogram


@pytest.mark.parametrize("bins", [1, 7, 64])
def test_counts_and_edges_are_those_of_numpy(bins, monkeypatch):
    monkeypatch.setattr(buffer, "_PIECE", 100)  # several pieces
    values = torch.randn(1234, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts, edges = np.histogram(values.numpy(), bins)
    found = read_histogram(*count_values(values.reshape(2, 617), bins))
    assert found.counts == counts.tolist() and np.allclose(found.edges, edges)
    assert found.total == pytest.approx(values.sum().item())
    assert found.total_of_squares == pytest.approx(values.square().sum().item())


def test_equal_values_get_a_range_around_them_as_in_numpy():
    counts, edges = np.histogram(np.full(5, 3.0), 4)
    found = read_histogram(*count_values(torch.full((5,), 3), 4))
    assert found.counts == counts.tolist() and np.allclose(found.edges, edges)


def test_values_that_are_not_finite_are_counted_apart():
    values = torch.tensor([0.0, float("nan"), 1.0, float("inf"), -float("inf")])
    found = read_histogram(*count_values(values, 2))
    assert (found.counts, found.nonfinite, found.low, found.high, found.total) == ([1, 1], 3, 0.0, 1.0, 1.0)
    nothing = read_histogram(*count_values(torch.tensor([float("nan")]), 3))
    assert sum(nothing.counts) == 0 and nothing.nonfinite == 1


@pytest.mark.parametrize(
    ("values", "bins"), [(torch.empty(0), 4), (torch.ones(2), 0), (torch.ones(2), 2.5), (torch.ones(2) * 1j, 4)]
)
def test_what_cannot_be_counted_is_refused(values, bins):
    with pytest.raises(ValueError, match="expected|record"):
        count_values(values, bins)
