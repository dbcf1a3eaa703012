"""Iterable datasets: the same batches for any number of workers, exact resume with and without a state of their own."""

import itertools
import logging
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from drivetrain.core.errors import ParameterError, ResumeError, StateError
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.order import RankShare
from drivetrain.data.stream import FilterReader, StreamStart
from tests.data.test_loader import plain


class Stream(IterableDataset):
    """Numbers, with random ones of all three generators beside them; shuffled per epoch by `set_epoch`."""

    def __init__(self, length=11):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.length):
            yield number + 100 * self.epoch, torch.rand(()), random.random(), np.random.rand()


class Sized(Stream):
    def __len__(self):
        return self.length


class Stateful(Stream):
    """The same with a place of its own, which it counts in `read`."""

    def __init__(self, length=11):
        super().__init__(length)
        self.at, self.read = 0, 0

    def __iter__(self):
        start, self.at = self.at, 0
        for number in range(start, self.length):
            self.at, self.read = number + 1, self.read + 1
            yield number + 100 * self.epoch, torch.rand(()), random.random(), np.random.rand()
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OwnIterator:
    """An iterator that keeps the place, as some libraries have it."""

    def __init__(self, length):
        self.at, self.length = 0, length

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1, torch.rand(()), random.random(), np.random.rand()

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class StatefulIterator(Stream):
    def __iter__(self):
        return OwnIterator(self.length)


class Split(Stream):
    """A stream that splits itself over workers, as torch's documentation shows."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.length, step):
            yield number, torch.rand(()), random.random(), np.random.rand()


class StatefulSplit(Split):
    def __init__(self, length=11):
        super().__init__(length)
        self.start = None

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        start, self.start = first if self.start is None else self.start, None
        for number in range(start, self.length, step):
            self.at = number + step
            yield number, torch.rand(()), random.random(), np.random.rand()

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


def make(data, **kwargs):
    return SmartDataLoader(data, **{"batch_size": 3, "random_seed": 5, **kwargs})


def test_a_stream_gives_what_torch_gives():
    data = list(range(10))

    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(data)

    for kwargs in (
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 2, "collate_fn": sum},
    ):
        ours = [torch.as_tensor(batch).tolist() for batch in SmartDataLoader(Numbers(), **kwargs)]
        assert ours == [torch.as_tensor(batch).tolist() for batch in DataLoader(Numbers(), **kwargs)]


def test_a_stream_may_have_a_length_or_none():
    assert len(make(Sized())) == 4 and len(make(Sized(), drop_last=True)) == 3
    with pytest.raises(TypeError):
        len(make(Stream()))
    loader = make(Stream())
    assert [loader.batch_info.index for _ in loader] == [0, 1, 2, 3] and loader.sample_index is None
    assert [loader.batch_info.last for _ in loader] == [False, False, False, True]


def test_a_stream_is_read_one_batch_ahead_unless_prefetch_is_0():
    made = []

    class Live(IterableDataset):
        def __iter__(self):
            for number in range(5):
                made.append(number)
                yield number

    for prefetch, expected in ((1, [0, 1, 2, 3]), (0, [0, 1])):
        made.clear()
        loader = make(Live(), batch_size=2, prefetch=prefetch)
        next(iter(loader))
        assert made == expected and loader.position == 2
        assert loader.batch_info.last is (False if prefetch else None)


@pytest.mark.parametrize(
    ("kind", "rng"), [(Stream, "batch"), (Stateful, "sample"), (StatefulIterator, "batch"), (Split, "sample")]
)
def test_filtered_streams_resume_at_every_position_with_and_without_workers(kind, rng, caplog):
    loader = make(kind(), rng=rng)
    batches, states = [], [loader.state_dict()]
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
            torch.rand(1), random.random(), np.random.rand()
    expected = plain(batches)
    assert len(expected) == 8
    workers = make(kind(), rng=rng, num_workers=2, persistent_workers=True)
    assert plain([batch for _ in range(2) for batch in workers]) == expected
    for count, state in enumerate(states):
        for resumed in (make(kind(), rng=rng), workers):
            resumed.load_state_dict(state)
            rest = []
            while count + len(rest) < 8:
                rest += plain(resumed)
            assert rest == expected[count:]
    says = "reading 6 samples again" in caplog.text
    assert says == (kind in (Stream, Split))


class OwnGenerator(IterableDataset):
    """Numbers of a generator that the dataset holds, which goes on from epoch to epoch."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self):
        for _ in range(5):
            yield torch.rand((), generator=self.generator)


@pytest.mark.parametrize("settings", [{}, {"prefetch": 0}, {"iterable": "sharded"}, {"drop_last": True}])
@pytest.mark.parametrize("size", [2, 5])
def test_a_stream_that_draws_from_its_own_generator_resumes_at_every_position(settings, size):
    new = lambda: SmartDataLoader(OwnGenerator(), batch_size=size, **settings)
    whole = new()
    expected = [batch.tolist() for _ in range(9) for batch in whole][:9]
    for position in range(6):
        first, second = new(), new()
        batches = itertools.chain.from_iterable(iter(first) for _ in range(9))
        assert [next(batches).tolist() for _ in range(position)] == expected[:position]
        second.load_state_dict(first.state_dict())
        rest = []
        while position + len(rest) < 9:
            rest += plain(second)
        assert (position, rest[: 9 - position]) == (position, expected[position:])


def test_workers_carry_the_streams_state():
    loader = make(Stateful(), num_workers=2)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    assert state["stream"] == {"state": {"at": 6}, "ended": False} and state["position"] == 6
    alone = make(Stateful())
    alone.load_state_dict(state)
    assert plain(alone) == plain(iterator)


def test_a_stateful_stream_is_not_read_again():
    data = Stateful(30)
    loader = make(data)
    loader.load_state_dict(
        {
            "seed": 5,
            "epoch": 0,
            "position": 27,
            "length": None,
            "version": 1,
            "stream": {"state": {"at": 27}, "ended": False},
        }
    )
    assert plain(loader)[0][0] == [27, 28, 29]
    assert data.read == 3


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("length", [11, 12, 13])
def test_filtered_ranks_together_read_the_stream_once(world, length):
    def read(rank, position=0):
        reader = FilterReader(Stream(length), list, batched=True, rng="sample")
        return list(reader.batches(StreamStart(0, 5, 0, position, RankShare(rank, world, 4 // world, False))))

    one = FilterReader(Stream(length), list, batched=True, rng="sample")
    expected = [
        sample for _, batch in one.batches(StreamStart(0, 5, 0, 0, RankShare(0, 1, 4, False))) for sample in batch
    ]
    for position in (0, 4, 8):
        rounds = zip(*[read(rank, position) for rank in range(world)])
        seen = [sample for parts in rounds for info, batch in parts for sample in batch[: info.size]]
        assert seen == expected[position:]


def test_a_stream_that_became_shorter_is_refused():
    loader = make(Stream(4))
    loader.load_state_dict({"seed": 5, "epoch": 0, "position": 6, "length": None, "version": 1})
    with pytest.raises(ResumeError, match="ended after 4 samples"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Split, StatefulSplit])
def test_sharded_streams_resume_at_every_position(kind, workers, caplog):
    caplog.set_level(logging.WARNING)
    kwargs = {"iterable": "sharded", "num_workers": workers, "batch_size": 2, "persistent_workers": workers > 0}
    loader = make(kind(), **kwargs)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    expected = plain(batches)
    assert sorted(number for batch in expected for number in batch[0]) == list(range(11))
    if workers:
        assert [batch[0] for batch in expected] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9]]
    for count, state in enumerate(states, start=1):
        resumed = loader if workers else make(kind(), **kwargs)
        resumed.load_state_dict(state)
        assert plain(resumed) == expected[count:]
        assert resumed.epoch == 1
    assert ("samples again" in caplog.text) == (kind is Split)


def test_a_sharded_stream_needs_the_same_number_of_workers():
    loader = make(Split(), iterable="sharded")
    next(iter(loader))
    other = make(Split(), iterable="sharded", num_workers=2)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ResumeError, match="1 ranks of 0 workers and cannot be continued with 1 ranks of 2"):
        next(iter(other))


def shift(worker_id):
    get_worker_info().dataset.length = 3


def test_a_worker_that_would_split_a_filtered_stream_fails_loudly():
    assert len(list(make(Stream(), num_workers=2, iterable="sharded", worker_init_fn=shift))) == 2
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'dataset'"):
        list(make(Stream(), num_workers=2, worker_init_fn=shift))


def test_the_callers_generators_and_two_live_iterators_are_undisturbed():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    loader = make(StatefulIterator())
    alone = [plain(loader), plain(loader)]
    again = make(StatefulIterator())
    pairs = list(zip(again, again))
    assert [plain([pair[side] for pair in pairs]) for side in (0, 1)] == alone
    assert torch.equal(torch.rand(2), expected)


def test_a_collate_fn_of_the_user_draws_its_own_numbers():
    def noisy(samples):
        return torch.rand(1).item(), len(samples)

    loader = make(Stream(), collate_fn=noisy)
    first = list(loader)
    assert len({value for value, _ in first}) == 4
    assert list(make(Stream(), collate_fn=noisy)) == first == list(make(Stream(), collate_fn=noisy, num_workers=2))


def test_streams_have_no_order_to_choose():
    for name in ("shuffle", "sampler", "batch_sampler"):
        with pytest.raises(ParameterError, match=f"{name} is set together with an IterableDataset"):
            SmartDataLoader(Stream(), **{name: [[1]] if name != "shuffle" else True})
    with pytest.raises(ParameterError, match="resident=True"):
        SmartDataLoader(Stream(), resident=True)
    with pytest.raises(StateError, match="missing"):
        make(Stream()).load_state_dict({})


def test_without_seeding_a_stream_inside_an_epoch_is_refused():
    loader = make(Stream(), rng="off")
    next(iter(loader))
    with pytest.raises(ResumeError, match="rng='off'"):
        make(Stream(), rng="off").load_state_dict(loader.state_dict())
