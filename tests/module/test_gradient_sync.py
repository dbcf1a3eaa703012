"""Gradients that no wrapper averages, and numbers that ranks add up."""

import pytest
import torch
from torch import nn

from drivetrain.module import gradient_sync
from drivetrain.module.gradient_sync import average_gradients, start_sum_over_ranks
from drivetrain.runtime.ranks import get_rank


def averaged(bucket_bytes: int) -> list[torch.Tensor | None]:
    """Parameters of two types, a frozen one, and gradients that are missing on one rank or on both."""
    gradient_sync.BUCKET_BYTES, before = bucket_bytes, gradient_sync.BUCKET_BYTES
    rank = get_rank()
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(5)]
    parameters += [nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)), nn.Parameter(torch.zeros(3))]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, index + 10.0 * rank)
    parameters[1].grad = None
    if rank == 0:
        parameters[2].grad = None
    parameters[3].requires_grad = False
    try:
        average_gradients(parameters, None)
        average_gradients(parameters[3:4], None)
    finally:
        gradient_sync.BUCKET_BYTES = before
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("bucket_bytes", [1, 30, 1 << 20])
def test_gradients_become_their_mean_whatever_the_size_of_a_message(world2, bucket_bytes):
    for rank, gradients in enumerate(world2(averaged, bucket_bytes)):
        assert gradients[1] is None  # as on one process
        expected = {0: 5.0, 2: 6.0, 3: 3.0 + 10 * rank, 4: 9.0, 5: 10.0, 6: 11.0}
        for index, value in expected.items():
            assert gradients[index].unique().tolist() == [value]
        assert gradients[5].dtype == torch.float64 and gradients[5].shape == (2, 2)


def sparse_averages() -> list[torch.Tensor | None]:
    """Gradients of embeddings: of both ranks, of rank 1 alone, and of none."""
    tables, rank = [nn.Embedding(4, 2, sparse=True) for _ in range(3)], get_rank()
    used = tables[0](torch.tensor([0, 1 + rank])).sum()
    (used + tables[1](torch.tensor([3])).sum() if rank else used).backward()
    average_gradients([table.weight for table in tables], None)
    return [table.weight.grad for table in tables]


def test_sparse_gradients_become_their_mean_and_stay_sparse(world2):
    for both, one, none in world2(sparse_averages):
        assert both.is_sparse and one.is_sparse and none is None
        assert both.to_dense()[:, 0].tolist() == [1.0, 0.5, 0.5, 0.0]
        assert one.coalesce().indices().tolist() == [[3]] and one.to_dense()[3].tolist() == [0.5, 0.5]


def summed() -> list[object]:
    value = torch.tensor(3)
    sums = [start_sum_over_ranks(number, None) for number in (1 << 24 | 1, 0.5, value)]
    return [*(result() for result in sums), value.item()]


def test_counts_of_ranks_add_up_exactly(world2):
    assert world2(summed) == [[2 * (1 << 24 | 1), 1.0, 6, 3]] * 2
