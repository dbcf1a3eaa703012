"""One order for any number of ranks: slices, tails, samplers, batch samplers."""

import random
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain.core.errors import ParameterError, ResumeError
from drivetrain.data import order as order_module
from drivetrain.data.order import (
    BatchOrder,
    IndexOrder,
    RankShare,
    ReplicaOrder,
    SamplerOrder,
    as_indices,
    epoch_permutation,
    load_sampler_state,
    read_keys,
    sampler_state,
    share_of,
    sliced_batches,
)
from drivetrain.runtime.seeds import derive_seed


def rows_of(info):
    return info.rows.tolist() if isinstance(info.rows, torch.Tensor) else list(info.rows)


def real_rows(info):
    return rows_of(info)[: info.size]


def global_sequence(order, world, batch_size, drop_last=False, epoch=0, position=0, seed=7):
    """Simulate all ranks: the real samples of each global batch, in order of rank."""
    ranks = [
        list(order.batches(seed, epoch, position, RankShare(rank, world, batch_size, drop_last)))
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1, "all ranks yield equally many batches"
    sequence = []
    for infos in zip(*ranks):
        batch = [row for info in infos for row in real_rows(info)]
        assert {info.global_size for info in infos} == {len(batch)}
        assert len({info.end for info in infos}) == len({info.index for info in infos}) == 1
        assert all(len(rows_of(info)) >= 1 and info.pad == (info.size == 0) for info in infos)
        assert all(info.last is (len(sequence) == len(ranks[0]) - 1) for info in infos)
        sequence.append(batch)
    return sequence


def test_the_keys_of_a_sampler_are_never_all_held_as_objects(monkeypatch):
    monkeypatch.setattr(order_module, "_AT_ONCE", 3)
    alive = weakref.WeakSet()

    class Number:
        def __init__(self, value):
            self.value = value
            alive.add(self)

        def __index__(self):
            return self.value

    most = []

    def stream():
        for number in range(20):
            most.append(len(alive))
            yield Number(number)

    assert read_keys(stream()).tolist() == list(range(20)) and max(most) <= 6
    assert read_keys(iter([1, 2, 3, 4, "five", 6])) == [1, 2, 3, 4, "five", 6]


def test_the_permutation_is_torchs_own_from_the_derived_seed():
    generator = torch.Generator().manual_seed(derive_seed(3, "shuffle", 2))
    assert torch.equal(epoch_permutation(50, 3, 2), torch.randperm(50, generator=generator))
    assert not torch.equal(epoch_permutation(50, 3, 2), epoch_permutation(50, 3, 1))


@given(total=st.integers(0, 60), world=st.integers(1, 9))
def test_shares_are_contiguous_even_and_complete(total, world):
    shares = [share_of(total, rank, world) for rank in range(world)]
    places = [place for offset, size in shares for place in range(offset, offset + size)]
    assert places == list(range(total))
    assert max(size for _, size in shares) - min(size for _, size in shares) <= 1


@given(
    length=st.integers(0, 70),
    global_batch=st.sampled_from([4, 8, 12]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    world=st.sampled_from([1, 2, 4]),
)
def test_batches_of_a_global_size_do_not_depend_on_the_world(length, global_batch, shuffle, drop_last, world):
    order = IndexOrder(range(length), shuffle)
    one = global_sequence(order, 1, global_batch, drop_last)
    assert global_sequence(order, world, global_batch // world, drop_last) == one
    assert order.num_batches(RankShare(0, world, global_batch // world, drop_last)) == len(one)


@given(length=st.integers(0, 50), world=st.integers(1, 5), size=st.integers(1, 6), epoch=st.integers(0, 3))
def test_every_sample_comes_once_for_any_world(length, world, size, epoch):
    order = IndexOrder(range(length), True)
    flat = [row for batch in global_sequence(order, world, size, epoch=epoch) for row in batch]
    assert flat == list(order) if length else flat == []
    assert sorted(flat) == list(range(length))


@given(data=st.data(), length=st.integers(1, 40), before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4]))
def test_the_order_goes_on_with_another_world(data, length, before, after):
    order = IndexOrder(range(length), True)
    batches = global_sequence(order, before, 3)
    used = data.draw(st.integers(0, len(batches)))
    position = sum(len(batch) for batch in batches[:used])
    rest = global_sequence(order, after, 3, position=position)
    assert [row for batch in batches[:used] + rest for row in batch] == [row for batch in batches for row in batch]


def test_a_long_order_crosses_the_blocks_in_which_it_is_cut():
    order = IndexOrder(range(1500), True)
    flat = [row for batch in global_sequence(order, 2, 1) for row in batch]
    assert flat == epoch_permutation(1500, 7, 0).tolist()


def test_a_rank_without_samples_gets_one_marked_copy():
    infos = [next(sliced_batches(range(2), 0, 0, RankShare(rank, 4, 1, False))) for rank in range(4)]
    assert [(info.size, info.pad, list(info.rows)) for info in infos] == [
        (1, 0, [0]),
        (1, 0, [1]),
        (0, 1, [1]),
        (0, 1, [1]),
    ]
    assert {info.global_size for info in infos} == {2}


def test_infos_tell_the_place():
    infos = list(sliced_batches(range(11), 5, 0, RankShare(1, 2, 2, False)))
    assert [(i.epoch, i.index, i.first, i.size, i.global_size, i.pad, i.end, i.last) for i in infos] == [
        (5, 0, 2, 2, 4, 0, 4, False),
        (5, 1, 6, 2, 4, 0, 8, False),
        (5, 2, 10, 1, 3, 0, 11, True),
    ]


class Draws:
    """A sampler that draws from all three shared generators."""

    def __len__(self):
        return 6

    def __iter__(self):
        yield from torch.randperm(4).tolist()
        yield random.randrange(4)
        yield int(np.random.randint(4))


@pytest.mark.parametrize(
    "make", [Draws, lambda: RandomSampler(range(4)), lambda: WeightedRandomSampler([1.0, 2, 3, 4], 6)]
)
def test_a_sampler_that_draws_from_shared_generators_repeats_and_disturbs_nothing(make):
    order = SamplerOrder(make(), 4)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    before = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    first = global_sequence(order, 1, 2)
    assert (torch.rand(1), random.random(), np.random.rand()) == before
    assert global_sequence(order, 1, 2) == first
    assert [global_sequence(order, 1, 2, epoch=epoch) for epoch in (1, 2, 3)] != [first] * 3


def test_a_samplers_stream_is_the_global_order():
    order = SamplerOrder([5, 3, 3, 0, 1], 6)
    assert [row for batch in global_sequence(order, 1, 2) for row in batch] == [5, 3, 3, 0, 1]


def test_a_samplers_generator_is_part_of_the_state():
    generator = torch.Generator().manual_seed(1)
    order = SamplerOrder(RandomSampler(range(9), generator=generator), 9)
    kept = sampler_state(order)
    first = global_sequence(order, 1, 9)
    assert global_sequence(order, 1, 9) != first
    load_sampler_state(order, kept)
    assert global_sequence(order, 1, 9) == first


def test_a_sampler_state_without_a_sampler_that_takes_it_is_refused():
    with pytest.raises(ResumeError, match="cannot load one"):
        load_sampler_state(IndexOrder(range(3), True), {"x": 1})


def test_a_distributed_sampler_is_used_as_it_is():
    data = range(10)
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=4)
        infos = list(ReplicaOrder(sampler).batches(0, 3, 0, RankShare(0, 1, 2, False)))
        sampler.set_epoch(3)
        assert [row for info in infos for row in rows_of(info)] == list(sampler)
        assert [info.end for info in infos] == [4, 8, 10] and infos[0].first == rank
        resumed = list(ReplicaOrder(sampler).batches(0, 3, 4, RankShare(0, 1, 2, False)))
        assert [rows_of(info) for info in resumed] == [rows_of(info) for info in infos[1:]]
        with pytest.raises(ResumeError, match="multiple of 2"):
            ReplicaOrder(sampler).batches(0, 3, 3, RankShare(0, 1, 2, False))


def test_a_batch_samplers_batches_go_round_the_ranks():
    order = BatchOrder(BatchSampler(SequentialSampler(range(10)), 3, drop_last=False))
    hands = [list(order.batches(0, 0, 0, RankShare(rank, 3, 1, False))) for rank in range(3)]
    assert [[rows_of(info) for info in hand] for hand in hands] == [
        [[0, 1, 2], [9]],
        [[3, 4, 5], [9]],
        [[6, 7, 8], [9]],
    ]
    assert [hand[1].pad for hand in hands] == [0, 1, 1] and hands[2][1].size == 0
    assert [hand[0].first for hand in hands] == [0, 3, 6] and {hand[0].global_size for hand in hands} == {9}
    assert order.num_batches(RankShare(0, 3, 1, False)) == 2
    assert [rows_of(info) for info in order.batches(0, 0, 9, RankShare(0, 1, 1, False))] == [[9]]
    with pytest.raises(ResumeError, match="start of one"):
        order.batches(0, 0, 4, RankShare(0, 1, 1, False))


def test_a_batch_sampler_over_a_distributed_sampler_is_not_split_again():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)
    order = BatchOrder(BatchSampler(sampler, 2, drop_last=False))
    infos = list(order.batches(0, 0, 0, RankShare(1, 2, 1, False)))
    assert [rows_of(info) for info in infos] == [[1, 3], [5, 7]]
    assert [info.end for info in infos] == [4, 8]


def test_indices_are_checked_and_counted_from_the_end():
    assert as_indices([-1, np.int64(0), torch.tensor(2)], 3).tolist() == [2, 0, 2]
    assert as_indices(["a", "b"], 3) == ["a", "b"]
    with pytest.raises(IndexError, match="index 3, but the dataset has 3"):
        as_indices([0, 3], 3)


def test_keys_become_a_tensor_of_their_numbers():
    assert as_indices([3, np.int64(1), "a", 2], 3) == [3, 1, "a", 2]
    assert as_indices([3, 1, 2**40], None).tolist() == [3, 1, 2**40]
    assert as_indices([], 3).tolist() == [] and as_indices([], 3).dtype == torch.int64
    assert as_indices([1, 2.0], None) == [1, 2.0] and as_indices([True, 0], 3).tolist() == [1, 0]


def test_a_sampler_without_a_length_is_refused():
    with pytest.raises(ParameterError, match="no __len__"):
        SamplerOrder(iter([1, 2]), 3)
    with pytest.raises(ParameterError, match="batch 1 is empty"):
        BatchOrder([[1], []]).batches(0, 0, 0, RankShare(0, 1, 1, False))


@pytest.mark.parametrize(
    "indices", [[5, 2, 9, 9, -1], range(3, 40, 2), torch.arange(7), torch.arange(4, dtype=torch.int32), [], ["a", "b"]]
)
@pytest.mark.parametrize("is_own", [False, True])
def test_a_subset_in_random_order_is_read_at_once_with_torchs_draw(indices, is_own, monkeypatch):
    def sampler():
        torch.manual_seed(3)
        return SubsetRandomSampler(indices, torch.Generator().manual_seed(4) if is_own else None)

    expected, after = [item if isinstance(item, str) else int(item) for item in sampler()], torch.rand(1)
    if not isinstance(expected[0] if expected else 0, str):
        monkeypatch.setattr(SubsetRandomSampler, "__iter__", lambda self: pytest.fail("read one by one"))
    assert list(read_keys(sampler())) == expected
    assert torch.equal(torch.rand(1), after)
