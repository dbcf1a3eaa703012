"""A small training run with everything that makes resuming hard: dropout, AdamW, a schedule, own and global randomness."""

import torch
from torch import nn

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.context.context import Context


def make_context(seed: int = 0) -> Context:
    """Build the session; nothing here depends on what ran before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    ctx = Context(model=model, epoch=0, losses=[])
    ctx.optimizer = torch.optim.AdamW(ctx.model.parameters(), lr=0.01, betas=(0.8, 0.99))
    ctx.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(ctx.optimizer, 50)
    ctx.noise = torch.Generator().manual_seed(seed + 1)
    return ctx


def train(ctx: Context, num_steps: int, keeper: Checkpointer | None = None, metrics=None) -> None:
    """Take steps on data from the Context's own generator, with dropout from the global one."""
    for _ in range(num_steps):
        x = torch.randn(16, 4, generator=ctx.noise)
        loss = nn.functional.mse_loss(ctx.model(x), x[:, :2] * 2)
        ctx.optimizer.zero_grad()
        loss.backward()
        ctx.optimizer.step()
        ctx.scheduler.step()
        ctx.losses.append(loss.item())
        if keeper is not None:
            keeper.step(metrics)


def flat_values(state, path: str = "") -> dict:
    """List every leaf of a state by its path, for comparing two of them."""
    if isinstance(state, dict):
        return {k: v for key, item in state.items() for k, v in flat_values(item, f"{path}.{key}").items()}
    if isinstance(state, list | tuple):
        return {k: v for key, item in enumerate(state) for k, v in flat_values(item, f"{path}.{key}").items()}
    return {path: state}


def assert_same_state(left, right) -> None:
    """Demand bit-equal states."""
    left, right = flat_values(left), flat_values(right)
    assert left.keys() == right.keys()
    for path, value in left.items():
        other = right[path]
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), path
        else:
            assert type(value) is type(other) and (value == other or value != value), path
