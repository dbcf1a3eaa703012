"""The resume certificate tells exact runs from inexact ones."""

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError, ResumeError
from drivetrain.train.verification import verify_resume
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
    class Counting(nn.Linear):
        calls = 0  # not a buffer: no checkpoint can know it

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 0.01 * self.calls)

    verdict = verify_resume(lambda: make_trainer(nn.Sequential(Counting(6, 3))), make_data(30), per_device_batch_size=4)
    assert not verdict.is_exact
    assert verdict.first_difference == "model.0.weight" and verdict.largest_error > 0


def test_a_loader_without_a_place_is_found():
    loader = torch.utils.data.DataLoader(make_data(32), batch_size=4, shuffle=True)
    with pytest.warns(UserWarning, match="no state to save"), pytest.raises(ResumeError, match="SmartDataLoader"):
        verify_resume(make_trainer, loader, num_steps=10)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="num_steps"):
        verify_resume(make_trainer, make_data(), num_steps=1)
    with pytest.raises(ConfigError, match="resume_from"):
        verify_resume(make_trainer, make_data(), resume_from="auto")
