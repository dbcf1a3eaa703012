"""Worker processes change nothing but the speed: order, random numbers, place, resume."""

import copy
import gc
import multiprocessing
import os
import random
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from drivetrain import Trainer
from drivetrain.callbacks import TrainerCallback
from drivetrain.data import workers
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.workers import WorkerStart, contents_mark, end_workers, ending_workers
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


class Labelled(Dataset):
    """Labels of one kind of container."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return int(self.labels[index])


KINDS = [torch.zeros(4), np.zeros(4), [0] * 4, [0] * 100, {0: 0, 1: 0, 2: 0, 3: 0}]


@pytest.mark.parametrize("labels", KINDS, ids=["tensor", "array", "list", "long list", "dict"])
def test_the_mark_of_a_dataset_changes_with_its_contents_and_with_nothing_else(labels):
    data = Subset(Labelled(copy.deepcopy(labels)), range(4))
    before = contents_mark(data)
    assert [data[index] for index in range(4)] == [0] * 4 and contents_mark(data) == before
    data.dataset.labels[2] = 1
    written = contents_mark(data)
    assert written != before
    data.dataset.labels = copy.deepcopy(labels)
    assert contents_mark(data) != written
    data.dataset = data  # a dataset that refers to itself has an end
    contents_mark(data)


def test_persistent_workers_read_labels_that_were_written_between_epochs():
    data = Labelled(np.zeros(4))
    loader = make(data, num_workers=1, persistent_workers=True, batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0] * 4]
    kept = loader._pool._inner._iterator
    assert [batch.tolist() for batch in loader] == [[0] * 4] and loader._pool._inner._iterator is kept
    data.labels[:] = 1
    assert [batch.tolist() for batch in loader] == [[1] * 4]
    loader.close()


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
    dataset = get_worker_info().dataset
    if isinstance(dataset, Scaled):  # as programs do that know several kinds
        dataset.factor = 2 * dataset.factor


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


class Samples(Dataset):
    """Samples that user code makes, together with the process that made them."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(index), float(os.getpid())]), torch.tensor(0.0)


class Stuck(Samples):
    def __getitem__(self, index):
        if index >= 2:
            time.sleep(600)
        return super().__getitem__(index)


class Record(TrainerCallback):
    """Notes which processes made the batches of each epoch and evaluation, and may fail."""

    def __init__(self, fails_at=None):
        self.trained, self.evaluated, self.fails_at = [], [], fails_at

    def on_train_epoch_start(self, trainer, **kwargs):
        self.trained.append(set())

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.evaluated.append(set())

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        self.trained[-1] |= set(batch[0][:, 1].tolist())
        if trainer.state.clock.batch + 1 == self.fails_at:
            raise RuntimeError("the callback fails")

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        self.evaluated[-1] |= set(batch[0][:, 1].tolist())


_before = set()


def own_children():
    """Return the child processes that the test started; worlds of other tests may live beside them."""
    return [child for child in multiprocessing.active_children() if child not in _before]


@pytest.fixture(autouse=True)
def nothing_is_collected():
    """Ending workers must not depend on the garbage collector; nothing of a test may be left to it."""
    _before.clear()
    _before.update(multiprocessing.active_children())
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            yield
        assert own_children() == []
    finally:
        gc.enable()


def make_trainer(*callbacks):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    loss = lambda outputs, targets: (outputs.squeeze(1) - targets).abs().mean() * 1e-9
    return Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=1e-9), callbacks=callbacks)


WORKERS = {"train_dataloader_kwargs": {"num_workers": 2}, "eval_dataloader_kwargs": {"num_workers": 1}}


def test_workers_live_through_epochs_and_evaluations_and_end_with_the_run():
    record = Record()
    trainer = make_trainer(record)
    trainer.train(Samples(), num_epochs=2, eval_dataset=Samples(), per_device_batch_size=2, **WORKERS)
    assert own_children() == []
    assert [len(pids) for pids in record.trained] == [2, 2] and record.trained[0] == record.trained[1]
    assert [len(pids) for pids in record.evaluated] == [1, 1] and record.evaluated[0] == record.evaluated[1]
    trainer.evaluate(Samples(), dataloader_kwargs={"num_workers": 1})
    trainer.predict([torch.zeros(2)] * 4, dataloader_kwargs={"num_workers": 1})
    assert own_children() == []


@pytest.mark.parametrize("kind", ["dataset", "torch", "torch persistent"])
def test_workers_of_a_run_that_fails_end_while_its_traceback_is_held(kind):
    data = Samples()
    if kind != "dataset":
        data = DataLoader(data, batch_size=2, num_workers=2, persistent_workers="persistent" in kind)
    trainer = make_trainer(Record(fails_at=2))
    with pytest.raises(RuntimeError, match="the callback fails") as held:
        trainer.train(data, num_epochs=2, per_device_batch_size=2, **({} if kind != "dataset" else WORKERS))
    assert held.value.__traceback__ is not None and own_children() == []
    if kind != "dataset":  # the user's loader is as it was, and works
        assert data.worker_init_fn is None and "_get_iterator" not in vars(data)
        assert len(list(data)) == 4
        del data._iterator


def test_data_in_memory_starts_no_workers():
    for data in (TensorDataset(torch.arange(8.0)), [torch.zeros(2)] * 8, {"x": torch.arange(8)}, torch.arange(8)):
        loader = SmartDataLoader(data, batch_size=2, num_workers=2, persistent_workers=True, loading_bar=False)
        if loader.columns is None:
            continue
        batches = iter(loader)
        next(batches)
        assert own_children() == []
    assert SmartDataLoader(torch.arange(8), batch_size=2).columns is not None


def test_worker_that_does_not_answer_is_killed_without_an_error(monkeypatch):
    monkeypatch.setattr(workers, "END_SECONDS", 0.3)
    with ending_workers():
        loader = SmartDataLoader(Stuck(), batch_size=2, num_workers=2, persistent_workers=True, loading_bar=False)
        batches = iter(loader)
        next(batches)
        started = own_children()
        assert len(started) == 2
    assert {child.exitcode for child in started} <= {0, -signal.SIGKILL}
    assert own_children() == []
    time.sleep(0.01)  # torch's handler of SIGCHLD would raise here


def test_loader_is_read_again_after_its_workers_were_ended():
    loader = SmartDataLoader(Samples(), batch_size=4, num_workers=1, persistent_workers=True, loading_bar=False)
    with ending_workers():
        first = [batch[0][:, 0].tolist() for batch in loader]
    assert own_children() == []
    second = [batch[0][:, 0].tolist() for batch in loader]
    assert first == second == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(own_children()) == 1
    loader.close()


def test_stop_signals_leave_workers_alone():
    with ending_workers():
        loader = SmartDataLoader(Samples(), batch_size=2, num_workers=2, persistent_workers=True, loading_bar=False)
        batches = iter(loader)
        seen = [next(batches)[0][:, 0].tolist()]
        for child in own_children():
            os.kill(child.pid, signal.SIGTERM)
            os.kill(child.pid, signal.SIGINT)
        seen += [batch[0][:, 0].tolist() for batch in batches]
        assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_does_not_end_the_workers_of_its_parent(capfd):
    with ending_workers():
        loader = SmartDataLoader(Samples(), batch_size=2, num_workers=1, persistent_workers=True, loading_bar=False)
        batches = iter(loader)
        next(batches)
        cycle = [batches, loader]
        cycle.append(cycle)
        del batches, loader
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=_release, args=(cycle, theirs))
        child.start()
        assert ours.recv() == 0
        child.join()
        assert child.exitcode == 0
        assert [batch[0][0, 0].item() for batch in cycle[0]] == [2, 4, 6]
        cycle.clear()
    assert "Error" not in capfd.readouterr().err


def _release(cycle, pipe) -> None:
    cycle.clear()
    gc.collect()
    pipe.send(len(workers._running))


def test_ending_twice_changes_nothing():
    loader = SmartDataLoader(Samples(), batch_size=4, num_workers=1, persistent_workers=True, loading_bar=False)
    batches = iter(loader)
    next(batches)
    iterator = loader._pool._inner._iterator
    loader.close()
    end_workers([iterator])
    loader.close()
    assert isinstance(loader._pool._inner.worker_init_fn, WorkerStart) and loader.worker_init_fn is None
