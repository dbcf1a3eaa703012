"""The loader as a whole: epochs, place, resume at every batch, seeds, live iterators, bad input."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from drivetrain.core.errors import DistributedError, ParameterError, ResumeError, StateError
from drivetrain.data.loader import SmartDataLoader
from drivetrain.runtime.run import Run, set_current_run
from drivetrain.runtime.seeds import derive_seed


class Augmented(Dataset):
    """Samples with random numbers of all three generators in them."""

    def __init__(self, length=11):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, torch.rand(()), random.random(), np.random.rand(), float(np.random.randn())


def make(data, **kwargs):
    return SmartDataLoader(data, **{"batch_size": 3, "shuffle": True, "random_seed": 5, **kwargs})


def plain(batches):
    return [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist() for batch in batches]


DATA = TensorDataset(torch.arange(11), torch.arange(11.0) * 2)


# ------------------------------------------------------------------ epochs and place


def test_it_is_a_torch_dataloader_with_torchs_attributes():
    loader = SmartDataLoader(DATA, batch_size=4, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is DATA and loader.batch_size == 4 and loader.drop_last and loader.num_workers == 0
    assert list(loader.sampler) == list(range(11)) and len(loader.batch_sampler) == 2
    assert len(loader) == 2 and len(SmartDataLoader(DATA, batch_size=4)) == 3
    assert len(SmartDataLoader(DATA)) == 11


def test_each_iteration_is_the_next_epoch_also_after_a_break():
    loader = make(DATA)
    epochs = [plain(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again = make(DATA)
    next(iter(again))
    assert plain(again) == epochs[1], "the broken iteration was epoch 0"
    again.set_epoch(2)
    assert plain(again) == epochs[2]
    again.set_epoch(0)
    assert plain(again) == epochs[0]


def test_the_place_follows_what_the_user_received():
    loader = make(DATA, batch_size=4)
    assert (loader.epoch, loader.position, loader.batch_info) == (0, 0, None)
    seen = []
    for _ in loader:
        info = loader.batch_info
        seen.append(
            (loader.epoch, loader.position, info.epoch, info.index, info.first, info.size, info.global_size, info.pad)
        )
    assert seen == [(0, 4, 0, 0, 0, 4, 4, 0), (0, 8, 0, 1, 4, 4, 4, 0), (0, 11, 0, 2, 8, 3, 3, 0)]
    assert (loader.epoch, loader.position) == (1, 0), "the epoch is closed"
    assert loader.batch_info.index == 2, "a loop that reads ahead still has the last batch in hand"


@pytest.mark.parametrize("kwargs", [{}, {"shuffle": False}, {"sampler": [4, 2, 2, 9], "shuffle": False}])
def test_the_sample_index_names_the_rows_in_hand(kwargs):
    loader = make(DATA, **kwargs)
    for index, _ in loader:
        assert torch.equal(loader.sample_index, index)
    batches = SmartDataLoader(DATA, batch_sampler=[[1, 2], [7]])
    assert [batches.sample_index.tolist() for _ in batches] == [[1, 2], [7]]


def test_two_live_iterators_do_not_disturb_each_other():
    loader = make(DATA)
    expected = [plain(loader) for _ in range(2)]
    loader = make(DATA)
    first, second = iter(loader), iter(loader)
    mixed: list[list[Any]] = [[], []]
    for one, other in zip(first, second):
        mixed[0].append(one)
        mixed[1].append(other)
    assert [plain(batches) for batches in mixed] == expected


def test_the_state_follows_the_newest_iterator():
    loader = make(DATA)
    first, second = iter(loader), iter(loader)
    next(second), next(second), next(first)
    assert (loader.epoch, loader.position) == (1, 6)
    list(first)
    assert (loader.epoch, loader.position) == (1, 6)


def test_an_iterator_draws_nothing_from_the_global_generators():
    for kwargs in ({}, {"sampler": RandomSampler(DATA), "shuffle": False}):
        loader = make(DATA, **kwargs)
        torch.manual_seed(3)
        expected = torch.rand(3)
        torch.manual_seed(3)
        list(loader)
        iter(loader)
        assert torch.equal(torch.rand(3), expected)


def test_a_dataset_that_grows_is_read_whole_in_the_next_epoch():
    data = [1, 2, 3]
    loader = make(data, batch_size=2)
    assert len(loader) == 2 and len(list(loader)) == 2
    data += [4, 5]
    assert len(loader) == 3 and sorted(torch.cat(list(loader)).tolist()) == [1, 2, 3, 4, 5]


def test_an_empty_dataset_yields_nothing():
    loader = make(TensorDataset(torch.zeros(0, 2)))
    assert len(loader) == 0 and list(loader) == []
    assert list(make([])) == []


# ------------------------------------------------------------------ resume


@pytest.mark.parametrize("data", [DATA, Augmented()], ids=["gathered", "augmented"])
@pytest.mark.parametrize("kwargs", [{}, {"shuffle": False}, {"drop_last": True}, {"rng": "sample"}], ids=str)
def test_resume_at_every_position_is_bit_identical(data, kwargs):
    loader = make(data, **kwargs)
    states, batches = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
            torch.rand(1), random.random(), np.random.randn()  # the training step draws, too
    expected = plain(batches)
    per_epoch = len(loader)
    for count, state in enumerate(states):
        torch.manual_seed(count), random.seed(count), np.random.seed(count)
        resumed = make(data, **{**kwargs, "random_seed": None})
        resumed.load_state_dict(state)
        rest = []
        while count + len(rest) < 2 * per_epoch:
            rest += plain(resumed)
        assert rest == expected[count:]


def test_a_state_taken_after_the_loop_starts_the_next_epoch():
    loader = make(DATA)
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    resumed = make(DATA)
    resumed.load_state_dict(state)
    assert plain(resumed) == plain(loader)


def test_the_end_of_an_epoch_yields_nothing_and_closes_it():
    loader = make(DATA)
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 11)
    resumed = make(DATA)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert resumed.epoch == 1


def test_the_state_has_no_rank_world_or_worker_and_loads_safely(tmp_path):
    loader = make(DATA)
    next(iter(loader))
    state = loader.state_dict()
    assert state == {"seed": 5, "epoch": 0, "position": 3, "length": 11, "version": 1}
    torch.save(state, tmp_path / "state.pt")
    resumed = make(DATA)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.position == 3


def test_a_restored_place_survives_set_epoch_of_the_same_epoch():
    loader = make(DATA)
    loader.load_state_dict({"seed": 5, "epoch": 2, "position": 6, "length": 11, "version": 1})
    loader.set_epoch(2)
    assert loader.position == 6
    loader.set_epoch(3)
    assert (loader.epoch, loader.position) == (3, 0)


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_users_sampler_resumes_at_every_position(own_generator):
    def build():
        generator = torch.Generator().manual_seed(3) if own_generator else None
        return make(DATA, shuffle=False, sampler=RandomSampler(DATA, generator=generator))

    loader = build()
    states, expected = [], []
    for _ in range(2):
        for batch in loader:
            expected.append(batch)
            states.append(loader.state_dict())
    expected = plain(expected)
    for count, state in enumerate(states, start=1):
        resumed, rest = build(), []
        resumed.load_state_dict(state)
        while count + len(rest) < len(expected):
            rest += plain(resumed)
        assert rest == expected[count:]


def test_a_batch_sampler_resumes():
    batches = [[1, 2, 3], [4], [5, 6], [7, 8, 9]]
    loader = SmartDataLoader(DATA, batch_sampler=batches)
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = SmartDataLoader(DATA, batch_sampler=batches)
    resumed.load_state_dict(loader.state_dict())
    assert plain(resumed) == plain(iterator)


def test_other_data_and_other_seeds_are_noticed():
    state = {"seed": 5, "epoch": 0, "position": 3, "length": 12, "version": 1}
    with pytest.raises(ResumeError, match="11 samples, the saved state is of 12"):
        make(DATA).load_state_dict(state)
    loader = make(DATA)
    with pytest.warns(UserWarning, match="starts from its beginning"):
        loader.load_state_dict(state, strict=False)
    assert loader.position == 0
    state = {**state, "length": 11, "seed": 6}
    with pytest.warns(UserWarning, match="the saved seed is used"):
        loader.load_state_dict(state)
    assert loader.seed == 6
    follower = make(DATA, random_seed=None)
    follower.load_state_dict(state)
    assert plain(follower) == plain(loader)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ([1], "got a list"),
        ({"seed": 1}, "missing: epoch, position, length, version"),
        ({"seed": 1, "epoch": 0, "position": 0, "length": 11, "version": 1, "rank": 0}, "unknown: rank"),
        ({"seed": 1, "epoch": -1, "position": 0, "length": 11, "version": 1}, "epoch is -1"),
        ({"seed": 1, "epoch": 0, "position": 12, "length": 11, "version": 1}, "is past the end"),
        ({"seed": "x", "epoch": 0, "position": 12, "length": 11, "version": 1}, "seed is 'x'"),
    ],
)
def test_a_damaged_state_is_refused(state, text):
    loader = make(DATA, random_seed=None)
    before = loader.state_dict()
    with pytest.raises(StateError, match=text):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_a_state_of_a_later_version_and_of_none():
    with pytest.raises(ResumeError, match="version 2"):
        make(DATA).load_state_dict({"seed": 1, "epoch": 0, "position": 0, "length": 11, "version": 2})
    with pytest.warns(UserWarning, match="is None"):
        make(DATA).load_state_dict(None)


def test_without_seeding_a_place_inside_an_epoch_is_refused_where_it_would_be_wrong():
    state = {"seed": 5, "epoch": 0, "position": 3, "length": 11, "version": 1}
    with pytest.raises(ResumeError, match="rng='off'"):
        make(Augmented(), rng="off").load_state_dict(state)
    with pytest.warns(UserWarning, match="rng='off'"):
        make(Augmented(), rng="off").load_state_dict(state, strict=False)
    make(Augmented(), rng="off", prefetch=0).load_state_dict(state)
    make(Augmented(), rng="off").load_state_dict({**state, "position": 0})
    make(DATA, rng="off").load_state_dict(state)


# ------------------------------------------------------------------ random numbers in datasets


def test_augmentation_does_not_depend_on_what_else_draws_and_restores_the_generators():
    loader = make(Augmented())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = torch.rand(1), random.random(), np.random.randn()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = plain(loader)
    assert (torch.rand(1), random.random(), np.random.randn()) == before
    assert plain(make(Augmented())) == first
    assert plain(loader) != first


def test_sample_randomness_belongs_to_the_sample_not_to_the_batch():
    def by_index(**kwargs):
        rows = [zip(*batch) for batch in plain(make(Augmented(), rng="sample", **kwargs))]
        return {row[0]: row for batch in rows for row in batch}

    assert by_index(batch_size=3) == by_index(batch_size=5, shuffle=False)


def test_off_leaves_the_generators_to_the_user():
    loader = make(Augmented(), rng="off", shuffle=False)
    torch.manual_seed(4)
    expected = torch.rand(11).tolist()
    torch.manual_seed(4)
    assert [value for batch in loader for value in batch[1].tolist()] == expected


# ------------------------------------------------------------------ seeds


def test_seeds_decide_the_shuffle():
    orders = {seed: plain(make(DATA, random_seed=seed)) for seed in (1, 2)}
    assert orders[1] != orders[2] and plain(make(DATA, random_seed=1)) == orders[1]
    torch.manual_seed(11)
    one = plain(make(DATA, random_seed=None))
    torch.manual_seed(12)
    other = plain(make(DATA, random_seed=None))
    torch.manual_seed(11)
    assert one != other and plain(make(DATA, random_seed=None)) == one


def test_a_run_gives_each_loader_its_own_seed(tmp_path):
    set_current_run(Run(folder=tmp_path, seed=9))
    try:
        seeds = [make(DATA, random_seed=None).seed for _ in range(2)]
        named = make(DATA, random_seed=None, name="train").seed
        assert seeds == [derive_seed(9, "loader", 0), derive_seed(9, "loader", 1)]
        assert named == derive_seed(9, "loader:train") and make(DATA, random_seed=None, name="train").seed == named
        assert make(DATA, random_seed=3).seed == 3
    finally:
        set_current_run(None)


def test_a_given_generator_is_a_seed_and_is_not_drawn_from():
    generator = torch.Generator().manual_seed(21)
    loader = make(DATA, random_seed=None, generator=generator)
    assert loader.seed == 21
    before = generator.get_state()
    list(loader)
    assert torch.equal(generator.get_state(), before)


# ------------------------------------------------------------------ moving, rebuilding


@dataclass
class Sample:
    x: torch.Tensor
    name: str


def test_containers_keep_their_types_on_the_way_to_a_device():
    collate = lambda samples: Sample(torch.tensor(samples), "batch")
    loader = SmartDataLoader(list(range(4)), batch_size=2, collate_fn=collate).to("cpu")
    batch = next(iter(loader))
    assert type(batch) is Sample and batch.x.tolist() == [0, 1] and batch.name == "batch"
    assert next(iter(SmartDataLoader([1, 2], move_output=False).to("cpu"))).tolist() == [1]


def test_a_loader_can_be_rebuilt_with_other_arguments():
    loader = make(DATA, random_seed=None).to("cpu")
    other = loader.rebuild(batch_size=11)
    assert other.seed == loader.seed
    assert [row for batch in plain(other) for row in batch[0]] == [row for batch in plain(loader) for row in batch[0]]
    assert loader.rebuild(dataset=Subset(DATA, [1, 2])).batch_size == 3
    assert SmartDataLoader.from_loader(loader, random_seed=5).seed == make(DATA, random_seed=5).seed != loader.seed


def test_a_plain_loader_becomes_a_smart_one():
    assert plain(SmartDataLoader.from_loader(DataLoader(DATA, batch_size=4, drop_last=True))) == plain(
        DataLoader(DATA, batch_size=4, drop_last=True)
    )
    shuffled = SmartDataLoader.from_loader(DataLoader(DATA, batch_size=4, shuffle=True), random_seed=3)
    assert plain(shuffled) == plain(make(DATA, batch_size=4, random_seed=3))
    sampled = SmartDataLoader.from_loader(DataLoader(DATA, batch_size=2, sampler=[3, 1, 2]))
    assert [row for batch in plain(sampled) for row in batch[0]] == [3, 1, 2]
    batched = SmartDataLoader.from_loader(DataLoader(DATA, batch_sampler=[[1], [2, 3]], collate_fn=len))
    assert list(batched) == [1, 2]
    assert SmartDataLoader.from_loader(DataLoader(DATA, batch_size=None)).batch_size is None
    assert SmartDataLoader.from_loader(DataLoader(DATA, sampler=SequentialSampler(DATA)))._order.shuffle is False


def test_a_plain_loader_keeps_the_samplers_it_was_given():
    ordered = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, True))
    assert plain(SmartDataLoader.from_loader(ordered)) == plain(ordered)
    shuffled = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False))
    assert plain(SmartDataLoader.from_loader(shuffled, random_seed=3)) == plain(make(DATA, batch_size=4, random_seed=3))
    part = DataLoader(DATA, batch_size=2, sampler=SequentialSampler(range(3)))
    assert plain(SmartDataLoader.from_loader(part)) == plain(part)
    shuffled_part = SmartDataLoader.from_loader(DataLoader(DATA, sampler=RandomSampler(range(3))))
    assert sorted(row for batch in plain(shuffled_part) for row in batch[0]) == [0, 1, 2]


def test_tensors_and_indices_that_were_replaced_are_read_from_the_next_epoch_on():
    data = TensorDataset(torch.arange(4))
    part, columns = Subset(data, [0, 1]), {"x": torch.arange(3)}
    loaders = [SmartDataLoader(one, batch_size=8) for one in (data, part, columns)]
    assert [plain(loader) for loader in loaders[:2]] == [[[[0, 1, 2, 3]]], [[[0, 1]]]]
    part.indices.append(3)
    assert plain(loaders[1]) == [[[0, 1, 3]]] and loaders[1].state_dict()["length"] == 3
    part.indices = []
    assert plain(loaders[1]) == []
    data.tensors, columns["x"] = (torch.arange(10, 15),), torch.arange(5, 7)
    assert plain(loaders[0]) == [[[10, 11, 12, 13, 14]]] == plain(DataLoader(data, batch_size=8))
    assert [batch["x"].tolist() for batch in loaders[2]] == [[5, 6]]
    sampled = SmartDataLoader(data, sampler=SequentialSampler(data), batch_size=8)
    data.tensors = (torch.arange(7),)
    assert plain(sampled) == [[[0, 1, 2, 3, 4, 5, 6]]]
    columns["x"] = [5, 6]
    with pytest.raises(ParameterError, match="held tensors when the loader was made, and does not now"):
        iter(loaders[2])


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(6))


@pytest.mark.parametrize("data", [DATA, list(range(6)), Numbers()], ids=["tensors", "list", "stream"])
def test_a_collation_that_was_replaced_makes_the_batches_of_the_next_epoch(data):
    ours, theirs = SmartDataLoader(data, batch_size=4), DataLoader(data, batch_size=4)
    next(iter(ours))
    ours.collate_fn = theirs.collate_fn = str
    assert list(ours) == list(theirs) and ours.epoch == 2


def test_numbers_of_numpy_are_whole_numbers():
    loader = SmartDataLoader(DATA, shuffle=True, random_seed=np.int64(3), global_batch_size=np.int64(4))
    next(iter(loader))
    state = loader.state_dict()
    assert {type(value) for value in state.values()} == {int}
    again = SmartDataLoader(DATA, shuffle=True, random_seed=3, batch_size=np.int64(4))
    again.load_state_dict(state)
    assert again.position == 4 and plain(again) == plain(make(DATA, batch_size=4, random_seed=3))[1:]
    with pytest.raises(ParameterError, match="random_seed=False"):
        SmartDataLoader(DATA, random_seed=False)


def test_the_global_batch_is_divided(monkeypatch):
    loader = SmartDataLoader(DATA, global_batch_size=8)
    assert loader.batch_size == 8 and len(loader) == 2
    monkeypatch.setattr("drivetrain.data.loader.num_data_ranks", lambda: 4)
    assert loader.batch_size == 2 and len(loader) == 2
    monkeypatch.setattr("drivetrain.data.loader.num_data_ranks", lambda: 3)
    with pytest.raises(ParameterError, match=r"8 does not divide over 3 processes.*6 or 9"):
        iter(loader)
    with pytest.raises(ParameterError, match="nearest sizes that do: 3"):
        SmartDataLoader(DATA, global_batch_size=2)


def test_ddp_without_a_group_says_how_to_start_one():
    with pytest.raises(DistributedError, match="torchrun"):
        make(DATA).ddp()


def test_a_distributed_sampler_is_told_the_epoch():
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1, seed=1)
    loader = SmartDataLoader(DATA, sampler=sampler, batch_size=2)
    assert len(loader) == 3
    epochs = [[row for batch in plain(loader) for row in batch[0]] for _ in range(2)]
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    assert epochs == expected and expected[0] != expected[1]


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"batchsize": 3}, "Did you mean 'batch_size'"),
        ({"rng": "samples"}, "Did you mean 'sample'"),
        ({"iterable": "shard"}, "Did you mean 'sharded'"),
        ({"resident": "yes"}, "resident: unknown value 'yes'"),
        ({"shuffle": 32}, "batch_size=32"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"random_seed": "a"}, "random_seed='a'"),
        ({"name": 3}, "name=3"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"global_batch_size": 4, "batch_size": 4}, "both set"),
        ({"sampler": [1], "shuffle": True}, "sampler and shuffle"),
        ({"batch_sampler": [[1]], "batch_size": 4}, "batch_sampler is set together with batch_size"),
        ({"batch_sampler": [[1]], "shuffle": True}, "batch_sampler is set together with shuffle"),
        ({"batch_sampler": [[1]], "global_batch_size": 4}, "both set"),
        ({"batch_size": None, "drop_last": True}, "drop_last"),
        ({"in_order": False}, "in_order=False"),
    ],
)
def test_wrong_arguments_are_named_while_building(kwargs, text):
    with pytest.raises(ParameterError, match=text):
        SmartDataLoader(DATA, **kwargs)


def test_torchs_own_refusals_remain():
    with pytest.raises(ValueError, match="persistent_workers"):
        SmartDataLoader(DATA, persistent_workers=True)
    with pytest.raises(ValueError, match="set after"):
        SmartDataLoader(DATA).dataset = DATA
    for epoch in (-1, 1.5, True):
        with pytest.raises(ParameterError, match="set_epoch"):
            SmartDataLoader(DATA).set_epoch(epoch)
    with pytest.raises(IndexError, match="index 11"):
        list(SmartDataLoader(DATA, sampler=[0, 11]))


def test_resident_data_must_be_tensors():
    with pytest.raises(ParameterError, match="resident=True needs data that is tensors"):
        SmartDataLoader(Augmented(), resident=True)
    assert plain(SmartDataLoader(DATA, resident=True, batch_size=11)) == plain(SmartDataLoader(DATA, batch_size=11))
