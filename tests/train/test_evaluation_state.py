"""Evaluations with random data go on exactly: after a signal in one of several sets, on two ranks, with generators of any kind."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from drivetrain.data.loader import SmartDataLoader
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.run import EvaluationState, held_generators, load_loader_state, loader_state
from tests.train.tasks import make_data, make_trainer, train
from tests.train.test_verification import Noisy


class Stop(TrainerCallback):
    """Sends SIGTERM in the second evaluation of a set."""

    def __init__(self, name):
        self.name, self.passed = name, 0

    def on_eval_step_end(self, trainer, **kwargs):
        if trainer.state.dataloader_label == self.name:
            self.passed += 1
            if self.passed == 6:
                os.kill(os.getpid(), signal.SIGTERM)


def run(folder=None, stop=None, **kwargs):
    trainer = make_trainer(callbacks=[] if stop is None else [Stop(stop)], seed=1)
    if folder is not None:
        kwargs |= {"checkpoint_dir": folder, "resume_from": "auto"}
    sets = {"a": Noisy(), "b": Noisy(torch.Generator().manual_seed(torch.initial_seed()))}
    try:
        history = train(
            trainer, num_epochs=3, eval_dataset=sets, eval_dataloader_kwargs={"num_workers": 0}, **kwargs
        )  # fmt: skip
    except SystemExit:
        return None
    return {name: history.get_metric_values(name) for name in history.get_metric_names()}


@pytest.mark.parametrize("stop", ["a", "b"])
def test_a_signal_in_one_set_neither_repeats_nor_changes_the_evaluation_of_another(tmp_path, stop):
    whole = run()
    assert run(tmp_path, stop) is None
    assert run(tmp_path) == whole
    assert [len(values) for values in whole.values()] == [3] * len(whole)
    assert len(set(whole["eval_a_loss_epoch"])) == 3  # other noise in each evaluation


def test_two_ranks_go_on_with_the_noise_of_each(world2, tmp_path):
    whole = world2(run)
    assert world2(run, tmp_path, "b") == [None, None]
    assert world2(run, tmp_path) == whole


def test_an_evaluation_that_does_not_count_leaves_no_trace():
    loader = SmartDataLoader(Noisy(np.random.default_rng(1)), batch_size=8, loading_bar=False)
    state = EvaluationState(loader)

    def evaluate():
        with state.counting("", loader):
            return [batch[0].sum().item() for batch in loader]

    first = evaluate()
    with state.kept():
        second = evaluate()
    assert evaluate() == second != first


@pytest.mark.parametrize(
    "generator", [torch.Generator(), np.random.default_rng(1), np.random.RandomState(2), random.Random(3)]
)
def test_generators_in_a_dataset_are_found_and_restored(generator):
    class Holding(Noisy):
        def __init__(self):
            self.transforms = [{"noise": generator}, {"again": generator}]

        def __getitem__(self, index):
            return draw()

    def draw():
        if isinstance(generator, torch.Generator):
            return torch.rand((), generator=generator).item()
        return generator.random()

    loader = DataLoader(Subset(Holding(), range(4)))
    assert list(held_generators(loader).values()) == [generator]
    state = loader_state(loader)
    expected = [draw() for _ in range(3)]
    load_loader_state(loader, state, 0)
    assert [draw() for _ in range(3)] == expected


def test_a_checkpoint_of_an_earlier_version_is_resumed(tmp_path, monkeypatch):
    class Pull(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            if trainer.state.clock.batch == 4:
                raise KeyboardInterrupt

    from drivetrain.train.resuming import EpochLoss

    taken = EpochLoss.state_dict
    arguments = {"num_epochs": 2, "eval_dataset": make_data(8), "checkpoint_dir": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr(EpochLoss, "state_dict", lambda self: {k: v for k, v in taken(self).items() if k != "evaluation"})
        with pytest.raises(KeyboardInterrupt):
            train(make_trainer(callbacks=[Pull()]), **arguments)
    history = train(make_trainer(), resume_from="auto", **arguments)
    expected = train(make_trainer(), num_epochs=2, eval_dataset=make_data(8))
    assert history.get_metric_values("eval_loss_epoch") == expected.get_metric_values("eval_loss_epoch")
