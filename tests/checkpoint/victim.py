"""A program to be killed: trains with dropout, AdamW, a schedule and a shuffled loader, and resumes by itself.

python -m tests.checkpoint.victim FOLDER STEPS WORKERS PROCESSES
"""

import hashlib
import os
import random
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from torch import nn

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.context.context import Context
from drivetrain.data.loader import SmartDataLoader
from drivetrain.runtime.ranks import get_rank, is_distributed
from drivetrain.runtime.seeds import set_seed
from tests.checkpoint.training import flat_values


class Noisy(torch.utils.data.Dataset):
    """Samples with augmentation from all three generators."""

    def __len__(self):
        return 53

    def __getitem__(self, index):
        noise = 0.01 * (random.random() + np.random.rand())
        return torch.full((4,), float(index)) / 53 + 0.1 * torch.randn(4) + noise


class Forked:
    """A child of this process: a real process that needs no new interpreter."""

    def __init__(self, action):
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                action()
                status = 0
            except SystemExit as stop:
                status = stop.code
            except Exception:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(status)
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.001)
        return self._status


def run(folder: str, num_steps: int, workers: int) -> str:
    """Train to `num_steps`, from wherever the folder says, and return the fingerprint of everything."""
    torch.set_num_threads(1)
    set_seed(11)
    ctx = Context(step=0, losses=[])
    ctx._rank_local = ("losses",)
    # Under DDP the running statistics of a rank above 0 last one step only, and are nobody's state.
    norm = nn.LayerNorm(8) if is_distributed() else nn.BatchNorm1d(8)
    ctx.model = nn.Sequential(nn.Linear(4, 8), norm, nn.Dropout(0.5), nn.Linear(8, 2))
    ctx.optimizer = torch.optim.AdamW(ctx.model.parameters(), lr=0.01)
    ctx.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(ctx.optimizer, num_steps)
    ctx.loader = SmartDataLoader(
        Noisy(), shuffle=True, batch_size=8, num_workers=workers, loading_bar=False, drop_last=True, random_seed=3
    )
    ctx.cpu()
    if is_distributed():
        ctx.ddp()
    with Checkpointer(ctx, every="3ba", keep=2, dir=folder, async_save=num_steps % 2 == 0) as keeper:
        keeper.restore()
        while ctx.step < num_steps:
            for batch in ctx.loader:
                loss = nn.functional.mse_loss(ctx.model(batch), batch[:, :2])
                ctx.optimizer.zero_grad()
                loss.backward()
                ctx.optimizer.step()
                ctx.scheduler.step()
                ctx.losses.append(loss.item())
                ctx.step += 1
                keeper.step()
                if ctx.step == num_steps:
                    break
    digest = hashlib.sha256()
    for path, value in sorted(flat_values(ctx.state_dict()).items()):
        content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        digest.update(path.encode() + content)
    digest.update(torch.rand(4).numpy().tobytes() + repr((random.random(), np.random.rand())).encode())
    return digest.hexdigest()


def run_rank(folder: str, num_steps: int, workers: int) -> str:
    """One rank of a launched run."""
    from drivetrain.runtime.group import init_distributed

    init_distributed(backend="gloo")
    return f"{get_rank()}:{run(folder, num_steps, workers)}"


def main(folder: str, num_steps: int, workers: int, processes: int) -> None:
    if processes == 1:
        result = run(folder, num_steps, workers)
    else:
        from drivetrain.runtime.launch import launch

        result = " ".join(sorted(launch(run_rank, processes, args=(folder, num_steps, workers))))
    Path(folder, "result").write_text(result)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
