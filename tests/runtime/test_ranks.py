import pytest
import torch.distributed as dist

from drivetrain.core.errors import DistributedError
from drivetrain.runtime import ranks
from drivetrain.runtime.environment import in_launched_process


def everything() -> tuple:
    return (
        ranks.is_distributed(),
        ranks.is_master(),
        ranks.get_rank(),
        ranks.get_local_rank(),
        ranks.get_num_processes(),
        ranks.data_rank(),
        ranks.num_data_ranks(),
        in_launched_process(),
    )


def test_one_process_is_rank_0_of_1():
    assert everything() == (False, True, 0, 0, 1, 0, 1, False)
    assert ranks.data_group() is None


def test_each_rank_knows_its_place(world4):
    assert world4(everything) == [(True, rank == 0, rank, rank, 4, rank, 4, True) for rank in range(4)]


def _data_ranks_of_a_mesh():
    """A mesh of 2 data ranks times 2 tensor ranks: neighbours share samples."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ranks.set_data_ranks(rank // 2, 2, groups[rank % 2])
    inside = ranks.data_rank(), ranks.num_data_ranks(), dist.get_world_size(ranks.data_group())
    ranks.set_data_ranks(rank // 2, 2)
    with pytest.raises(DistributedError, match="no group of those ranks"):
        ranks.data_group()
    ranks.clear_data_ranks()
    return inside, (ranks.data_rank(), ranks.num_data_ranks(), ranks.data_group())


def test_mesh_tells_which_ranks_share_samples(world4):
    assert world4(_data_ranks_of_a_mesh) == [((rank // 2, 2, 2), (rank, 4, None)) for rank in range(4)]


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_data_rank_is_refused(rank, size):
    with pytest.raises(DistributedError, match="data rank"):
        ranks.set_data_ranks(rank, size)
