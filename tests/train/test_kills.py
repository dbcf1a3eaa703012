"""Killed again and again: a Trainer run with dropout, EMA, accumulation and a schedule ends as if nothing had happened."""

import random
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.algorithms import EMA
from drivetrain.callbacks import TrainerCallback
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.train.trainer import Trainer
from tests.checkpoint.victim import Forked


class Die(TrainerCallback):
    """Let the kernel end the process some seconds after a number of steps, in the middle of whatever it does then."""

    def __init__(self, steps: int, seconds: float):
        self.steps, self.seconds = steps, seconds

    def batch_end(self, state, logger):
        self.steps -= 1
        if self.steps == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.seconds)


def run(folder: Path, epochs: int, *callbacks: TrainerCallback) -> None:
    """Train to the end, from the newest checkpoint if there is one; keep everything that the run ends with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 2)
    average = EMA("4ba", update_interval="1ba")
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks, algorithms=[average], seed=3
    )
    history = trainer.train(
        data, num_epochs=epochs, eval_dataset=data, per_device_batch_size=8, gradient_accumulation_steps=3,
        checkpoint_dir=str(folder), checkpoint_every="1ba", resume_from="auto",
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        train_dataloader_kwargs={"num_workers": 0}, eval_dataloader_kwargs={"num_workers": 0},
    )  # fmt: skip
    end = {
        "model": model.state_dict(), "average": average.state_dict(), "optimizer": trainer.optimizer.state_dict(),
        "rate": trainer.optimizer.param_groups[0]["lr"], "random": torch.get_rng_state(),
        "history": {name: list(history.get_metric_values(name)) for name in history.get_metric_names()},
    }  # fmt: skip
    torch.save(end, folder / "end.pt")


@pytest.fixture(scope="module", autouse=True)
def everything_imported(tmp_path_factory):
    """Run the program once here, so that its forks need not import again what a first step loads."""
    before = capture_rng()
    run(tmp_path_factory.mktemp("first"), 1)
    restore_rng(before)


def flat(value, path=""):
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}.{key}").items()}
    return {path: value}


def check_kills_change_nothing(tmp_path: Path, epochs: int, kills: int) -> None:
    ends, chance = [], random.Random(kills)
    for name, number in (("whole", 0), ("killed", kills)):
        folder = tmp_path / name
        folder.mkdir()
        for _ in range(number):
            last = Die(chance.randint(1, 4), chance.uniform(1e-4, 0.02))
            assert Forked(lambda folder=folder, last=last: run(folder, epochs, last)).wait() == -signal.SIGALRM
        assert Forked(lambda folder=folder: run(folder, epochs)).wait() == 0
        ends.append(flat(torch.load(folder / "end.pt", weights_only=True)))
    whole, killed = ends
    assert whole.keys() == killed.keys()
    for name, value in whole.items():
        same = torch.equal(value, killed[name]) if isinstance(value, torch.Tensor) else value == killed[name]
        assert same, name


def test_four_kills_change_nothing(tmp_path):
    check_kills_change_nothing(tmp_path, epochs=8, kills=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_kills_change_nothing(tmp_path):
    check_kills_change_nothing(tmp_path, epochs=100, kills=50)
