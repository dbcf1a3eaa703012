"""Loaders that cannot restore their position go on inside an epoch: their first batches are read again."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from drivetrain import Trainer
from drivetrain.callbacks import TrainerCallback
from drivetrain.core.errors import ResumeError
from drivetrain.runtime import seeds
from drivetrain.train import run


class Samples(Dataset):
    def __init__(self, size=37):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, x.sum()[None]


class Noisy(Samples):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand(), y


class Stream(IterableDataset):
    """Shuffles with a generator of its own, which goes on from epoch to epoch."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        return (Samples()[i] for i in torch.randperm(37, generator=self.generator).tolist())


class Batches:
    """Draws its order from numpy, and has no length."""

    def __iter__(self):
        order = np.random.permutation(37).tolist()
        return (order[i : i + 5] for i in range(0, 37, 5))


class Fixed:
    """Any iterable of batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter([columns([Samples()[i + j] for i in range(5)]) for j in range(self.batches)])


class Stateful(Fixed):
    """Saves its position, and begins again only when it was read to its end, as torchdata's loader does."""

    def __init__(self):
        super().__init__(8)
        self.place = 0

    def __iter__(self):
        for batch in list(super().__iter__())[self.place :]:
            self.place += 1
            yield batch
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class StatefulOfKnownLength(Stateful):
    def __len__(self):
        return self.batches


def columns(samples):
    return tuple(torch.stack(column) for column in zip(*samples))


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(), batch_size=5, shuffle=True),
    "in order": lambda: DataLoader(Noisy(), batch_size=5),
    "workers": lambda: DataLoader(Noisy(), batch_size=5, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(Noisy(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(9)),
    "weighted": lambda: DataLoader(Samples(), batch_size=5, sampler=WeightedRandomSampler(torch.arange(1.0, 38), 37)),
    "without a length": lambda: DataLoader(Samples(), batch_sampler=Batches()),
    "stream": lambda: DataLoader(Stream(), batch_size=5),
    "any iterable": lambda: Fixed(7),
    "with a state": Stateful,
    "with a state and a length": StatefulOfKnownLength,
}


def train(loader, folder=None, duration="19ba", resume_from=None, callbacks=(), **settings):
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks)
    settings = {"gradient_accumulation_steps": 2, **settings, "checkpoint_dir": folder, "resume_from": resume_from}
    trainer.train(loader, num_epochs=None, max_duration=duration, **settings)
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_equal(found, expected):
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class NoisyStream(Stream):
    def __iter__(self):
        return (Noisy()[i] for i in torch.randperm(37, generator=self.generator).tolist())


@pytest.mark.parametrize("stop", ["3ba", "8ba", "11ba"])
@pytest.mark.parametrize("limit", [None, 6])
def test_a_stream_is_read_ahead_only_where_a_window_must_know_its_last_batch(stop, limit, tmp_path, monkeypatch):
    read = []

    class Counted:
        def __iter__(self):
            for batch in DataLoader(NoisyStream(), batch_size=5):
                read.append(None)
                yield batch

    class Noting(TrainerCallback):
        def batch_start(self, state, logger):
            ahead.append(len(read) - state.clock.batch)

    settings = {"gradient_accumulation_steps": 1, "limit_train_batches": limit}
    captures, ahead = count_captures(monkeypatch), []
    train(Counted(), duration="6ba", callbacks=[Noting()], **settings)
    assert set(ahead) == {1} and len(captures) == 1  # the batch itself; how the epoch began
    train(Counted(), duration="6ba", **settings | {"gradient_accumulation_steps": 2})
    assert len(captures) >= 1 + 1 + 6
    make = lambda: DataLoader(NoisyStream(), batch_size=5)
    train(make(), tmp_path, stop, **settings)
    check_equal(train(make(), tmp_path, resume_from="auto", **settings), train(make(), **settings))


def count_captures(monkeypatch):
    calls = []
    monkeypatch.setattr(run, "capture_rng", lambda: calls.append(None) or seeds.capture_rng())
    return calls


@pytest.mark.parametrize(
    ("kind", "stop"),
    [("workers", "11ba")] + [(kind, stop) for kind in LOADERS if kind != "workers" for stop in ("3ba", "8ba", "11ba")],
)
def test_a_run_goes_on_inside_an_epoch_as_if_it_had_not_stopped(kind, stop, tmp_path):
    make = LOADERS[kind]
    train(make(), tmp_path, stop)
    check_equal(train(make(), tmp_path, resume_from="auto"), train(make()))


@pytest.mark.parametrize("kind", [Stateful, StatefulOfKnownLength])
def test_a_loader_with_a_state_of_its_own_gives_whole_epochs_also_after_a_resume_between_two(kind, tmp_path):
    expected = train(Fixed(8))
    check_equal(train(kind(), tmp_path, checkpoint_every="1ep"), expected)
    check_equal(train(kind(), resume_from=tmp_path / "checkpoint-ep1-ba8"), expected)


def test_a_resumed_run_can_be_stopped_and_resumed_again(tmp_path, capsys):
    make = LOADERS["shuffled"]
    train(make(), tmp_path, "10ba")
    train(make(), tmp_path, "13ba", resume_from="auto")
    assert "DataLoader cannot skip 2 batches, so they are read again" in capsys.readouterr().out
    check_equal(train(make(), tmp_path, resume_from="auto"), train(make()))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Samples(), batch_size=4), "Its batch_size was 5 and is 4"),
        (lambda: DataLoader(Samples(60), batch_size=5), "Its number of batches was 8 and is 12"),
    ],
)
def test_another_loader_is_rejected(loader, message, tmp_path):
    train(DataLoader(Samples(), batch_size=5), tmp_path, "3ba")
    with pytest.raises(ResumeError, match=message):
        train(loader(), tmp_path, resume_from="auto")


def test_too_few_batches_are_rejected(tmp_path):
    train(Fixed(6), tmp_path, "4ba")
    with pytest.raises(ResumeError, match="has 2 batches, but the checkpoint was taken after 4"):
        train(Fixed(2), tmp_path, resume_from="auto")


def test_another_number_of_workers_is_named(tmp_path):
    train(DataLoader(Samples(), batch_size=5), tmp_path, "3ba")
    with pytest.warns(UserWarning, match="had num_workers=0 and has 1"):
        train(DataLoader(Samples(), batch_size=5, num_workers=1), tmp_path, "5ba", resume_from="auto")


def train_on_ranks(folder, stop):
    def make():
        return DataLoader(Samples(), batch_size=5, sampler=DistributedSampler(Samples()))

    expected = train(make())
    train(make(), folder, stop)
    return train(make(), folder, resume_from="auto"), expected


def test_several_ranks_read_their_own_batches_again(world2, tmp_path):
    for found, expected in world2(train_on_ranks, tmp_path, "6ba"):
        check_equal(found, expected)
