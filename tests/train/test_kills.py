"""SIGKILL again and again: a Trainer run with dropout, EMA, accumulation and a schedule ends as if nothing had happened."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

PROGRAM = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import Trainer
from drivetrain.algorithms import EMA
from drivetrain.callbacks import TrainerCallback

class Speak(TrainerCallback):
    def batch_end(self, state, logger):
        print("step", flush=True)

torch.set_num_threads(1)
torch.manual_seed(0)
folder, epochs = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
data = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 2)
average = EMA("4ba", update_interval="1ba")
trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=[Speak()], algorithms=[average], seed=3)
history = trainer.train(
    data, num_epochs=epochs, eval_dataset=data, per_device_batch_size=8, gradient_accumulation_steps=3, checkpoint_dir=folder,
    checkpoint_every="1ba", resume_from="auto",
    create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
)
end = {
    "model": model.state_dict(), "average": average.state_dict(), "optimizer": trainer.optimizer.state_dict(),
    "rate": trainer.optimizer.param_groups[0]["lr"], "random": torch.get_rng_state(),
    "history": {name: list(history.get_metric_values(name)) for name in history.get_metric_names()},
}
torch.save(end, folder + "/end.pt")
"""


def start(folder: Path, epochs: int) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(epochs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run_with_kills(folder: Path, epochs: int, kills: int, seed: int) -> int:
    """Kill the program at random moments after its first step, so many times, then let it finish; return the kills that hit."""
    chance, hits = random.Random(seed), 0
    for life in range(kills + 1):
        with start(folder, epochs) as process:
            if life < kills and any(line.strip() == "step" for line in process.stdout):
                time.sleep(chance.uniform(0, 0.12))
                hits += process.poll() is None
                process.kill()
            process.communicate()
            if (folder / "end.pt").exists():
                break
    return hits


def flat(value, path=""):
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}.{key}").items()}
    return {path: value}


def check_kills_change_nothing(tmp_path: Path, epochs: int, kills: int) -> None:
    ends = []
    for name, number in (("whole", 0), ("killed", kills)):
        (tmp_path / name).mkdir()
        hits = run_with_kills(tmp_path / name, epochs, number, seed=kills)
        assert hits == number, f"the run was over after {hits} of {number} kills"
        ends.append(flat(torch.load(tmp_path / name / "end.pt", weights_only=True)))
    whole, killed = ends
    assert whole.keys() == killed.keys()
    for name, value in whole.items():
        same = torch.equal(value, killed[name]) if isinstance(value, torch.Tensor) else value == killed[name]
        assert same, name


def test_two_kills_change_nothing(tmp_path):
    check_kills_change_nothing(tmp_path, epochs=8, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_kills_change_nothing(tmp_path):
    check_kills_change_nothing(tmp_path, epochs=150, kills=50)
