"""Real processes: together they read what one process reads, and continue where any other number of them stopped."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset

from drivetrain.core.errors import ParameterError, ResumeError
from drivetrain.data.loader import SmartDataLoader
from drivetrain.runtime.ranks import clear_data_ranks, set_data_ranks
from tests.data.test_loader import Augmented
from tests.data.test_stream import Stateful, Stream

LENGTH = 21


def dataset():
    return TensorDataset(torch.arange(LENGTH))


def read(loader, limit=None):
    """Return (real rows, size, global size, padding) of each batch, and the state after the last."""
    seen = []
    for batch in loader:
        info, rows = loader.batch_info, batch[0].tolist()
        assert len(rows) == info.size + info.pad
        seen.append((rows[: info.size], info.size, info.global_size, info.pad))
        if len(seen) == limit:
            break
    return seen, loader.state_dict()


def together(ranks):
    """Join what the ranks read, batch by batch."""
    assert len({len(seen) for seen, _ in ranks}) == 1
    batches = []
    for parts in zip(*[seen for seen, _ in ranks]):
        rows = [row for part in parts for row in part[0]]
        assert all(part[2] == len(rows) for part in parts)
        batches.append(rows)
    states = [repr(state) for _, state in ranks]
    assert states == states[:1] * len(ranks), "the state has no rank in it"
    return batches


def flat(batches):
    return [row for batch in batches for row in batch]


KINDS = {
    "gathered": lambda: {"dataset": dataset(), "shuffle": True, "batch_size": 4},
    "in order": lambda: {"dataset": dataset(), "batch_size": 4, "random_seed": 1},
    "drop last": lambda: {"dataset": dataset(), "shuffle": True, "batch_size": 4, "drop_last": True, "random_seed": 1},
    "global": lambda: {"dataset": dataset(), "shuffle": True, "global_batch_size": 8, "random_seed": 1},
    "sampled": lambda: {"dataset": dataset(), "sampler": RandomSampler(dataset()), "batch_size": 4},
    "own generator": lambda: {
        "dataset": dataset(),
        "sampler": RandomSampler(dataset(), generator=torch.Generator().manual_seed(2)),
        "batch_size": 4,
    },
    "batches": lambda: {"dataset": dataset(), "batch_sampler": [[1, 2, 3], [4], [5, 6], [7, 8, 9], [0]]},
    "stream": lambda: {"dataset": Stream(LENGTH), "global_batch_size": 8, "random_seed": 1},
    "stateful stream": lambda: {"dataset": Stateful(LENGTH), "global_batch_size": 8, "random_seed": 1},
}


def read_everything(states=None):
    """What one rank reads, for every kind of loader: an epoch, a first batch, and the rest from a state."""
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    results = {}
    for name, arguments in KINDS.items():
        whole = read(SmartDataLoader(**arguments()))
        stopped = read(SmartDataLoader(**arguments()), limit=1)
        loader = SmartDataLoader(**arguments())
        loader.load_state_dict(states[name] if states else loader.state_dict())
        results[name] = whole, stopped, read(loader)
    return results


SAME_BATCHES = ("global", "stream", "stateful stream")


@pytest.fixture(scope="module")
def alone():
    return read_everything()


def check_against_one_process(ranks, alone):
    for name in alone:
        whole = together([rank[name][0] for rank in ranks])
        expected = together([alone[name][0]])
        if name == "drop last":
            assert flat(whole) == flat(expected)[: len(flat(whole))]
        else:
            assert flat(whole) == flat(expected)
        if name in SAME_BATCHES:
            assert whole == expected


def test_two_processes_read_what_one_reads_and_take_over_from_it(world2, alone):
    states = {name: results[1][1] for name, results in alone.items()}
    ranks = world2(read_everything, states)
    check_against_one_process(ranks, alone)
    for name in alone:
        whole = flat(together([alone[name][0]]))
        seen = flat(together([alone[name][1]])) + flat(together([rank[name][2] for rank in ranks]))
        assert seen == whole[: len(seen)]
        assert len(seen) == len(whole) or name == "drop last"


def test_four_processes_take_over_from_two_and_one_from_four(world2, world4, alone):
    two = world2(read_everything)
    states = {name: results[1][1] for name, results in two[0].items()}
    four = world4(read_everything, states)
    check_against_one_process(four, alone)
    last = read_everything({name: results[1][1] for name, results in four[0].items()})
    for name in alone:
        whole = flat(together([alone[name][0]]))
        for ranks, rest in (
            ([rank[name][1] for rank in two], [rank[name][2] for rank in four]),
            ([rank[name][1] for rank in four], [last[name][2]]),
        ):
            seen = flat(together(ranks)) + flat(together(rest))
            assert seen == whole[: len(seen)]
            assert len(seen) == len(whole) or name == "drop last"


def augmented_rows(num_workers, rng):
    workers = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    loader = SmartDataLoader(Augmented(10), True, 3, global_batch_size=4, rng=rng, **workers)
    return [list(zip(*[part.tolist() for part in batch]))[: loader.batch_info.size] for batch in loader]


@pytest.mark.parametrize("rng", ["sample", "batch"])
def test_ranks_with_workers_draw_as_without_and_share_no_random_numbers(world2, rng):
    ranks = world2(augmented_rows, 1, rng)
    assert ranks == world2(augmented_rows, 0, rng)
    numbers = [{row[2] for batch in rank for row in batch} for rank in ranks]
    assert not numbers[0] & numbers[1]
    if rng == "sample":
        rows = [row for parts in zip(*ranks) for part in parts for row in part]
        assert rows == [row for batch in augmented_rows(0, rng) for row in batch]


class Shard(IterableDataset):
    """Each rank has its own part, of unequal size."""

    def __init__(self, sizes):
        self.sizes, self.at = sizes, 0

    def __iter__(self):
        rank = dist.get_rank()
        start, self.at = self.at, 0
        for number in range(start, self.sizes[rank]):
            self.at = number + 1
            yield torch.tensor([100 * rank + number])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def read_shards(sizes, limit=None, state=None):
    loader = SmartDataLoader(Shard(sizes), batch_size=2, iterable="sharded")
    if state is not None:
        loader.load_state_dict(state)
    rows = []
    for batch in loader:
        info = loader.batch_info
        rows.append((batch.flatten().tolist(), info.size, info.global_size, info.pad, info.first, info.end))
        if len(rows) == limit:
            break
    return rows, loader.state_dict()


def test_sharded_streams_of_unequal_length_end_together_and_resume(world2):
    ranks = world2(read_shards, [5, 2])
    assert ranks[0][0] == [([0, 1], 2, 4, 0, 0, 4), ([2, 3], 2, 2, 0, 4, 6), ([4], 1, 1, 0, 6, 7)]
    assert ranks[1][0] == [([100, 101], 2, 4, 0, 2, 4), ([100, 101], 0, 2, 2, 6, 6), ([100, 101], 0, 1, 2, 7, 7)]
    stopped = world2(read_shards, [5, 4], 1)
    assert stopped[0][1] == stopped[1][1]
    resumed = world2(read_shards, [5, 4], None, stopped[0][1])
    whole = world2(read_shards, [5, 4])
    assert [rank[0] for rank in resumed] == [rank[0][1:] for rank in whole]


def refuses():
    rank = dist.get_rank()
    with pytest.raises(ParameterError, match="nearest sizes that do: 6 or 8"):
        SmartDataLoader(dataset(), global_batch_size=7)
    loader = SmartDataLoader(Shard([4, 4]), iterable="sharded")
    stream = {"ranks": [None], "num_workers": 0}
    loader.load_state_dict({"seed": 1, "epoch": 0, "position": 1, "length": None, "version": 1, "stream": stream})
    with pytest.raises(ResumeError, match="1 ranks of 0 workers"):
        iter(loader)
    torch.manual_seed(rank)
    loader = SmartDataLoader(dataset(), True)
    assert loader.seed == rank
    assert loader.ddp() is loader
    built_before = SmartDataLoader(dataset(), batch_size=4)
    set_data_ranks(0, 1)  # as a mesh does whose ranks share their samples
    try:
        shared = [batch[0].tolist() for batch in built_before]
    finally:
        clear_data_ranks()
    return loader.seed, shared, [batch[0].tolist() for batch in built_before]


def test_seeds_agree_and_data_ranks_are_asked_at_each_iteration(world2):
    ranks = world2(refuses)
    assert [seed for seed, _, _ in ranks] == [0, 0]
    assert ranks[0][1] == ranks[1][1] and len(ranks[0][1]) == 6
    assert ranks[0][2][0] == [0, 1, 2, 3] and ranks[1][2][0] == [4, 5, 6, 7]
