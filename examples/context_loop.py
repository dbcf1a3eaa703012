"""A training loop written by hand around a Context: stop it anywhere, start it again, and it goes on bit for bit.

python examples/context_loop.py                      # trains, and keeps its session in session.pt
python examples/context_loop.py --stop-after 7       # stops in the middle of an epoch
python examples/context_loop.py --resume             # continues there
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import drivetrain as dt


def make_data(size: int = 256) -> TensorDataset:
    """Points in the plane, labelled by the ring they are in."""
    points = torch.randn(size, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) > 1.0).long())


def main(
    epochs: int = 5, file: str | Path = "session.pt", resume: bool = False, stop_after: int | None = None
) -> dt.Context:
    """Train a small classifier; the whole session is one object."""
    torch.manual_seed(1)
    ctx = dt.Context(epoch=0, step=0, losses=[])
    ctx.model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
    ctx.optimizer = torch.optim.AdamW(ctx.model.parameters(), lr=0.05)
    ctx.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(ctx.optimizer, T_max=epochs)
    ctx.loader = dt.SmartDataLoader(make_data(), batch_size=64, shuffle=True, random_seed=3, loading_bar=False)
    ctx.autotransform()  # the best device at hand; under torchrun also DDP

    if resume:
        saved = torch.load(file, weights_only=True)
        ctx.load_state_dict(saved["session"])
        dt.runtime.restore_rng(saved["random"])  # dropout continues too

    while ctx.epoch < epochs:
        for x, y in ctx.loader:  # after a restore: the rest of the epoch
            loss = cross_entropy(ctx.model(x), y)
            ctx.optimizer.zero_grad()
            loss.backward()
            ctx.optimizer.step()
            ctx.losses.append(loss.item())
            ctx.step += 1
            if ctx.step == stop_after:
                torch.save({"session": ctx.state_dict(), "random": dt.runtime.capture_rng()}, file)
                return ctx
        ctx.scheduler.step()
        ctx.epoch += 1
    torch.save({"session": ctx.state_dict(), "random": dt.runtime.capture_rng()}, file)
    return ctx


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--file", default="session.pt")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop-after", type=int)
    session = main(**vars(parser.parse_args()))
    print(session.explain())
    print(f"loss {session.losses[0]:.3f} -> {session.losses[-1]:.3f} in {session.step} steps")
