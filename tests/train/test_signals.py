"""SIGTERM in the middle of a run: the step is finished, the state saved, and the same command goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import Trainer
from drivetrain.callbacks import TrainerCallback

class Slow(TrainerCallback):
    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        print("step", flush=True)
        time.sleep(float(sys.argv[2]))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 2)
trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=[Slow()], seed=3)
trainer.train(data, num_epochs=3, per_device_batch_size=8, checkpoint_dir=sys.argv[1], checkpoint_every=None, resume_from="auto")
torch.save(model.state_dict(), sys.argv[1] + "/final.pt")
"""


def start(folder: Path, seconds: float) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True, env=environment
    )


def wait_for_steps(process: subprocess.Popen, number: int) -> None:
    seen = 0
    while seen < number:
        line = process.stdout.readline()
        assert line, "the program ended early"
        seen += line.strip() == "step"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_saves_and_the_same_command_continues_bit_for_bit(tmp_path, number, status):
    import torch

    (tmp_path / "whole").mkdir()
    with start(tmp_path / "whole", 0) as whole:
        whole.communicate(timeout=60)
    assert whole.returncode == 0
    broken = start(tmp_path / "broken", 0.05)
    wait_for_steps(broken, 5)
    broken.send_signal(number)
    began = time.monotonic()
    broken.communicate(timeout=60)
    assert broken.returncode in (status, 128 + number)
    assert time.monotonic() - began < 30
    again = start(tmp_path / "broken", 0)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    assert output.count("step\n") < 24  # it did not start over
    ours, theirs = (torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("broken", "whole"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
