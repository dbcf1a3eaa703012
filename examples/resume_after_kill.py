"""Kill a training run again and again, in the middle of its saves too; it ends as if nothing had happened.

python examples/resume_after_kill.py
"""

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Checkpointer, Context, SmartDataLoader
from drivetrain.checkpoint.chaos import kill_repeatedly


def train(folder: Path, num_epochs: int) -> str:
    """Train, or go on training; return a fingerprint of all weights, moments and losses."""
    torch.manual_seed(0)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    ctx = Context(epoch=0, losses=[])
    ctx.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    ctx.optimizer = torch.optim.AdamW(ctx.model.parameters(), lr=0.01)
    ctx.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(ctx.optimizer, 6 * num_epochs)
    ctx.loader = SmartDataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), shuffle=True, batch_size=16, loading_bar=False
    )
    with Checkpointer(ctx, every="2ba", keep=2, dir=folder) as keeper:
        keeper.restore()  # nothing there yet: a fresh start
        while ctx.epoch < num_epochs:
            for inputs, targets in ctx.loader:  # after a resume: goes on inside the epoch
                loss = nn.functional.mse_loss(ctx.model(inputs), targets)
                ctx.optimizer.zero_grad()
                loss.backward()
                ctx.optimizer.step()
                ctx.scheduler.step()
                ctx.losses.append(loss.item())
                keeper.step()
            ctx.epoch += 1
    values = [*ctx.model.state_dict().values(), *ctx.optimizer.state[ctx.model[0].weight].values(), torch.rand(3)]
    content = b"".join(value.numpy().tobytes() for value in values) + repr(ctx.losses).encode()
    return hashlib.sha256(content).hexdigest()


def main(kills: int = 5, num_epochs: int = 20) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        undisturbed = train(Path(folder, "undisturbed"), num_epochs)
        longest = (time.monotonic() - begun) / (2 * kills)  # so that the run does not end before the last kill
        killed = Path(folder, "killed")
        command = [sys.executable, __file__, str(killed), str(num_epochs)]
        attempts = kill_repeatedly(
            lambda: subprocess.Popen(command), killed, kills=kills, longest=longest, in_saves=1.0
        )
        if attempts[-1].ended != "finished":
            print(f"the run did not come to its end: {attempts}")
            return False
        same = Path(killed, "fingerprint").read_text(encoding="utf-8") == undisturbed
    struck = [attempt for attempt in attempts if attempt.ended == "killed"]
    print(
        f"killed {len(struck)} times, {sum(attempt.during_save for attempt in struck)} of them in the middle of a save"
    )
    print("bit-identical to the undisturbed run" if same else "DIFFERENT from the undisturbed run")
    return same


if __name__ == "__main__":
    if len(sys.argv) == 3:  # one start of the run that is being killed
        Path(sys.argv[1], "fingerprint").write_text(train(Path(sys.argv[1]), int(sys.argv[2])), encoding="utf-8")
    else:
        sys.exit(0 if main() else 1)
