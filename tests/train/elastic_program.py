"""A program on several ranks that goes wrong once, and what it leaves: `python -m tests.train.elastic_program FOLDER RANKS FAULT RESTARTS`.

FAULT is `none`, `hang` (the last rank sleeps at a batch), `kill` (it kills itself there), `slow` or `node`: a rank whose node is to die
(DYING_NODE) writes its process id and sleeps there. Without dropout and in float64, as such a run may end on another number of ranks.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.algorithms import EMA
from drivetrain.callbacks import TrainerCallback
from drivetrain.runtime.group import init_distributed
from drivetrain.runtime.launch import launch
from drivetrain.runtime.ranks import get_num_processes, get_rank
from drivetrain.train.trainer import Trainer

FAULT_AT = 13


class Fault(TrainerCallback):
    """Goes wrong on the last rank, in the first attempt, in the middle of a step."""

    def __init__(self, kind: str):
        self.kind = kind

    def after_loss(self, state, logger):
        if self.kind == "node" and state.clock.batch == FAULT_AT and "DYING_NODE" in os.environ:
            Path(os.environ["DYING_NODE"]).write_text(str(os.getpid()))
            time.sleep(1000)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if attempt != "0" or state.clock.batch != FAULT_AT or get_rank() != get_num_processes() - 1:
            return
        if self.kind == "hang":
            time.sleep(1000)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: str, kind: str, hang_timeout: str | None = None) -> None:
    """Train to the end, from the newest checkpoint if there is one, and keep what the run ends with."""
    init_distributed(backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0 if kind == "node" else 0.5), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(90, 4, generator=torch.Generator().manual_seed(1)), torch.arange(90) % 2)
    if kind == "node":
        model, data = model.double(), TensorDataset(data.tensors[0].double(), data.tensors[1])
    average = EMA("4ba", update_interval="1ba")
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optimizer, [Fault(kind)], algorithms=[average], seed=3, device="cpu"
    )
    trainer.train(
        data, num_epochs=4, eval_dataset=data, global_batch_size=8, gradient_accumulation_steps=2,
        checkpoint_dir=str(Path(folder, "checkpoints")), checkpoint_every="3ba", resume_from="auto", hang_timeout=hang_timeout,
        train_dataloader_kwargs={"num_workers": 0}, eval_dataloader_kwargs={"num_workers": 0},
    )  # fmt: skip
    end = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(end | {"random": torch.get_rng_state()}, Path(folder, f"end-{get_rank()}.pt"))


def ends_of(folder: Path) -> list[dict]:
    """Return what each rank ended with."""
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob("end-*.pt"))]


def main(folder: str, ranks: str, kind: str, restarts: str) -> None:
    launch(run, int(ranks), args=(folder, kind, "3s" if kind == "hang" else None), max_restarts=int(restarts))


if __name__ == "__main__":
    main(*sys.argv[1:])
