"""Worker processes change nothing but the speed: order, random numbers, place, resume."""

import multiprocessing
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from drivetrain.data.loader import SmartDataLoader
from tests.data.test_loader import DATA, Augmented, plain


def make(data, **kwargs):
    return SmartDataLoader(data, **{"batch_size": 3, "shuffle": True, "random_seed": 5, "num_workers": 2, **kwargs})


@pytest.mark.parametrize("rng", ["batch", "sample"])
def test_workers_give_what_no_workers_give_and_resume_at_every_position(rng):
    alone = make(Augmented(), num_workers=0, rng=rng)
    expected = plain([batch for _ in range(2) for batch in alone])
    loader = make(Augmented(), rng=rng, persistent_workers=True)
    seen, states = [], []
    for _ in range(2):
        for batch in loader:
            seen.append(batch)
            states.append(loader.state_dict())
    assert plain(seen) == expected
    for count, state in enumerate(states, start=1):
        # One set of workers serves all: they hold no place of their own.
        loader.load_state_dict(state)
        rest = []
        while count + len(rest) < len(expected):
            rest += plain(loader)
        assert rest == expected[count:]


def test_the_place_counts_what_was_received_not_what_was_read_ahead():
    loader = make(Augmented(30), prefetch_factor=4)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.05)
    assert loader.position == 3 and loader.batch_info.index == 0
    assert torch.equal(loader.sample_index, loader.sample_index)
    state = loader.state_dict()
    alone = make(Augmented(30), num_workers=0)
    alone.load_state_dict(state)
    assert plain(alone) == plain(iterator)


def test_gathered_data_works_in_workers_and_indices_are_known():
    loader = make(DATA)
    for index, _ in loader:
        assert torch.equal(loader.sample_index, index)
    loader.set_epoch(0)
    assert plain(loader) == plain(make(DATA, num_workers=0))


def test_starting_workers_draws_nothing_from_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    list(make(DATA))
    assert torch.equal(torch.rand(2), expected)


def test_two_live_iterators_share_persistent_workers_without_disturbing_each_other():
    alone = make(Augmented(), num_workers=0)
    expected = [plain(alone), plain(alone)]
    loader = make(Augmented(), persistent_workers=True)
    pairs = list(zip(loader, loader))
    assert [plain([pair[side] for pair in pairs]) for side in (0, 1)] == expected
    next(iter(loader))
    loader.set_epoch(0)
    assert plain(loader) == expected[0]


class Seeds(Dataset):
    """What a worker draws without any seeding of ours."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(()), random.random(), np.random.rand(), get_worker_info().id


def test_workers_left_alone_repeat_for_a_seed_and_do_not_share_random_numbers():
    first = plain(make(Seeds(), rng="off", shuffle=False, batch_size=4))
    assert first == plain(make(Seeds(), rng="off", shuffle=False, batch_size=4))
    assert first != plain(make(Seeds(), rng="off", shuffle=False, batch_size=4, random_seed=6))
    assert [batch[3][0] for batch in first] == [0, 1]
    for generator in range(3):
        assert not set(first[0][generator]) & set(first[1][generator])


def double_what_the_worker_reads(worker_id):
    get_worker_info().dataset.factor = 2 * get_worker_info().dataset.factor


class Scaled(Dataset):
    def __init__(self):
        self.factor = 3

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * self.factor


def test_a_worker_init_fn_reaches_the_users_dataset():
    loader = make(Scaled(), shuffle=False, worker_init_fn=double_what_the_worker_reads, batch_size=2)
    assert plain(loader) == [[0, 6], [12, 18]]


class Broken(Scaled):
    def __getitem__(self, index):
        if index == 3:
            raise KeyError("sample 3 is broken")
        return index


def test_an_error_in_a_worker_comes_back_with_its_cause():
    loader = make(Broken(), shuffle=False, batch_size=2)
    with pytest.raises(KeyError, match="sample 3 is broken"):
        list(loader)
    assert loader.position == 2


def test_breaking_off_leaves_no_process_behind():
    before = set(multiprocessing.active_children())
    next(iter(make(Augmented(60))))
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
def test_spawned_workers_give_the_same():
    loader = make(Augmented(), multiprocessing_context="spawn")
    assert plain(loader) == plain(make(Augmented(), num_workers=0))
    loader = make(TensorDataset(torch.arange(11)), multiprocessing_context="spawn")
    assert plain(loader) == plain(make(TensorDataset(torch.arange(11)), num_workers=0))
