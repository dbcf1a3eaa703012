"""SIGTERM in the middle of a run: the step is finished, the state saved, and the same command goes on."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.callbacks import TrainerCallback
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.runtime.signals import StopSignals
from drivetrain.train import agreement
from drivetrain.train.resuming import handle_signal
from drivetrain.train.trainer import Trainer
from tests.checkpoint.victim import Forked


class Steps(TrainerCallback):
    """Write a byte for each step; after the fifth, wait until a signal has come."""

    def __init__(self, pipe: int, wait: bool):
        self.pipe, self.wait, self.count = pipe, wait, 0

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        os.write(self.pipe, b".")
        self.count += 1
        if self.wait and self.count == 5:
            while StopSignals.active().requested is None:
                time.sleep(0.001)


def run(folder: Path, pipe: int, wait: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 2)
    steps = Steps(pipe, wait)
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=[steps], seed=3)
    try:
        trainer.train(
            data, num_epochs=3, per_device_batch_size=8, checkpoint_dir=str(folder), checkpoint_every=None,
            resume_from="auto", train_dataloader_kwargs={"num_workers": 0},
        )  # fmt: skip
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None  # as a shell reports it
    torch.save(model.state_dict(), folder / "final.pt")


@pytest.fixture(scope="module")
def pipe():
    ours, theirs = os.pipe()
    yield ours, theirs
    os.close(ours), os.close(theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, pipe) -> dict:
    """The weights of a run that nobody disturbs; it also imports what a first step loads."""
    folder, before = tmp_path_factory.mktemp("whole"), capture_rng()
    run(folder, pipe[1])
    restore_rng(before)
    assert os.read(pipe[0], 100) == b"." * 24
    return torch.load(folder / "final.pt", weights_only=True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_continues_bit_for_bit(tmp_path, pipe, whole, number, status):
    broken = Forked(lambda: run(tmp_path, pipe[1], wait=True))
    seen = b""
    while len(seen) < 5:
        seen += os.read(pipe[0], 5 - len(seen))
    os.kill(broken.pid, number)
    assert broken.wait() == status and not (tmp_path / "final.pt").exists()
    assert Forked(lambda: run(tmp_path, pipe[1])).wait() == 0
    assert len(os.read(pipe[0], 100)) == 24 - 5  # it did not start over, and no step is missing
    ours = torch.load(tmp_path / "final.pt", weights_only=True)
    assert all(torch.equal(ours[key], whole[key]) for key in whole)


class Interrupt(TrainerCallback):
    """Sends a signal to this process, or to one rank, after the fifth batch."""

    def __init__(self, rank=0):
        self.rank = rank

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        if trainer.state.clock.batch == 4 and get_rank() == self.rank:  # this batch is counted after the callback
            os.kill(os.getpid(), signal.SIGTERM)


def interrupted_run(folder, seconds=agreement.WINDOW_SECONDS, length=4, rank=0) -> list[str]:
    """Return the checkpoints of a run that a signal has ended inside an accumulation window."""
    torch.manual_seed(0)
    model, before = nn.Linear(4, 2), agreement.WINDOW_SECONDS
    agreement.WINDOW_SECONDS = seconds
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Interrupt(rank)]
    )
    data = TensorDataset(torch.randn(128, 4), torch.arange(128) % 2)
    settings = {"checkpoint_dir": folder, "checkpoint_every": None, "global_batch_size": 8, "num_epochs": 1}
    try:
        with pytest.raises(SystemExit) as ended:
            trainer.train(data, gradient_accumulation_steps=length, **settings)
    finally:
        agreement.WINDOW_SECONDS = before
    assert ended.value.code == 128 + signal.SIGTERM
    return [path.name for path in folder.glob("checkpoint-*")]


def test_a_signal_waits_for_the_end_of_a_window_that_is_near(tmp_path):
    assert interrupted_run(tmp_path / "near", seconds=1e6) == ["checkpoint-ep0-ba8"]
    assert interrupted_run(tmp_path / "far", seconds=0.0) == ["checkpoint-ep0-ba5"]
    assert interrupted_run(tmp_path / "none", seconds=1e6, length=1) == ["checkpoint-ep0-ba5"]


def test_all_ranks_wait_for_the_same_window(world2, tmp_path):
    assert world2(interrupted_run, tmp_path, seconds=1e6, rank=1) == [["checkpoint-ep0-ba8"]] * 2


@pytest.mark.parametrize(("requested", "left"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1, None)])
def test_a_save_does_not_answer_a_stop_that_came_after_the_ranks_agreed_on_it(requested, left):
    signals, finals = StopSignals(), []
    signals.request(requested)
    handle_signal(signal.SIGUSR1, signals, SimpleNamespace(save=lambda final: finals.append(final), wait=lambda: None))
    assert signals.requested == left and finals == [False]
