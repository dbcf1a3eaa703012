"""The resume certificate tells exact runs from inexact ones."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from drivetrain.core.errors import ConfigError
from drivetrain.train.run import EvaluationState
from drivetrain.train.trainer import Trainer
from drivetrain.train.verification import difference, verify_resume
from tests.train.tasks import make_data, make_model, make_trainer


def test_an_ordinary_run_is_bit_exact():
    verdict = verify_resume(
        lambda: make_trainer(make_model(dropout=0.5)),
        make_data(30),
        per_device_batch_size=4,
        gradient_accumulation_steps=2,
    )
    assert verdict.is_exact, str(verdict)
    assert "bit-exact: yes" in str(verdict)


def test_hidden_state_is_found_and_named():
    calls = []

    class Counting(nn.Linear):
        def forward(self, x):
            calls.append(None)  # of no part of the run: no checkpoint can know it
            return super().forward(x) * (1 + 0.01 * len(calls))

    verdict = verify_resume(lambda: make_trainer(nn.Sequential(Counting(6, 3))), make_data(30), per_device_batch_size=4)
    assert not verdict.is_exact
    assert verdict.first_difference == "model.0.weight" and verdict.largest_error > 0


def test_a_plain_loader_goes_on_exactly():
    loader = torch.utils.data.DataLoader(make_data(32), batch_size=4, shuffle=True)
    assert verify_resume(make_trainer, loader, num_steps=10).is_exact


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="num_steps"):
        verify_resume(make_trainer, make_data(), num_steps=1)
    with pytest.raises(ConfigError, match="resume_from"):
        verify_resume(make_trainer, make_data(), resume_from="auto")


X, Y = make_data(32).tensors


class Noisy(Dataset):
    """Samples with noise, drawn from the process's generator or from one that the dataset holds."""

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if isinstance(self.generator, np.random.Generator):
            return X[index] + torch.tensor(self.generator.standard_normal(6), dtype=torch.float32), Y[index]
        return X[index] + 3 * torch.randn(6, generator=self.generator), Y[index]


def verify_random_evaluation(eval_dataset, num_steps=10, metric="eval_loss_epoch", **kwargs):
    return verify_resume(
        lambda: make_trainer(make_model()),
        make_data(32),
        num_steps,
        per_device_batch_size=8,
        eval_dataset=eval_dataset,
        scheduler_interval="epoch",
        scheduler_metric=metric,
        create_scheduler_fn=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        eval_dataloader_kwargs={"num_workers": 0},
        **kwargs,
    )


@pytest.mark.parametrize(
    "settings", [{}, {"limit_eval_batches": 2}, {"sanity_eval_batches": 1}, {"eval_interval": "3ba"}], ids=str
)
def test_a_schedule_that_follows_random_evaluations_is_bit_exact(settings):
    verdict = verify_random_evaluation(Noisy(), **settings)
    assert verdict.is_exact, str(verdict)


def test_random_evaluations_of_several_sets_are_bit_exact():
    sets = {"a": Noisy(), "b": Noisy(torch.Generator().manual_seed(3)), "c": Noisy(np.random.default_rng(4))}
    verdict = verify_random_evaluation(sets, metric="eval_b_loss_epoch")
    assert verdict.is_exact, str(verdict)


def test_a_plain_loader_with_a_generator_is_bit_exact_in_evaluation():
    loader = torch.utils.data.DataLoader(
        Noisy(), batch_size=5, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(1)
    )
    verdict = verify_random_evaluation(loader)
    assert verdict.is_exact, str(verdict)


def test_random_evaluations_whose_state_is_not_restored_are_found_and_named(monkeypatch):
    monkeypatch.setattr(EvaluationState, "load_state_dict", lambda self, state: None)
    verdict = verify_random_evaluation(Noisy(), num_steps=16)
    assert not verdict.is_exact and verdict.differences["evaluation"].startswith("evaluation.eval_loss_epoch.")
    assert "evaluation (first: evaluation.eval_loss_epoch" in str(verdict)


def test_a_dataset_that_draws_from_hidden_state_is_found_and_named():
    class Counting(Noisy):
        drawn = 0  # no generator: no checkpoint can know it

        def __getitem__(self, index):
            self.drawn += 1
            return X[index] + self.drawn % 7, Y[index]

    verdict = verify_random_evaluation(Counting())
    assert not verdict.is_exact and "evaluation" in verdict.differences


def test_learning_rates_are_compared_update_by_update():
    class Forgetful(torch.optim.lr_scheduler.LambdaLR):
        def load_state_dict(self, state):
            pass

        def state_dict(self):
            return {}

    verdict = verify_resume(
        lambda: make_trainer(),
        make_data(32),
        8,
        per_device_batch_size=8,
        create_scheduler_fn=lambda optimizer: Forgetful(optimizer, lambda step: 0.5 if step == 5 else 1.0),
    )
    assert verdict.differences["learning rates"].startswith("learning rates.update 6")


def test_training_metrics_and_logged_values_of_an_interrupted_epoch_are_bit_exact():
    class Logging(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            self.log("twice", output["loss"] * 2)
            return output

    def build():
        accuracy = lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()
        return make_trainer(cls=Logging, train_metrics={"accuracy": accuracy})

    assert verify_resume(build, make_data(), num_steps=6, per_device_batch_size=4).is_exact


def test_a_nan_is_not_the_same_as_a_zero():
    nan, zero = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0])
    assert (
        difference(nan, zero) is not None
        and difference(nan, nan.clone()) is None
        and difference(zero, zero.clone()) is None
    )
