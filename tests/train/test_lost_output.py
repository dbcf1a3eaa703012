"""A run whose terminal, pipe or log is gone."""

import io

import pytest
import torch

from drivetrain.core.display import SafeOutput
from drivetrain.train.callbacks import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from tests.train.tasks import make_trainer, train


class Terminal(io.StringIO):
    """A terminal that goes away after some text."""

    encoding = "utf-8"

    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        if self.tell() > 200:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_run_outlives_its_terminal(is_terminal, monkeypatch, tmp_path):
    monkeypatch.setattr(SafeOutput, "lost", set())
    callbacks = [ProgressBarCallback(), LogMetricsCallback(), PrintProgressCallback()]
    whole, lost = make_trainer(), make_trainer(callbacks=callbacks)
    train(whole, num_epochs=3)
    if is_terminal:
        monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Terminal(is_terminal))
        train(lost, num_epochs=3, checkpoint_dir=tmp_path)
    assert SafeOutput.lost
    assert all(map(torch.equal, whole.model.parameters(), lost.model.parameters()))
