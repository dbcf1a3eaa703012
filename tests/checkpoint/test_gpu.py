"""Checkpoints of a state on an accelerator."""

import multiprocessing
import warnings

import pytest
import torch
from torch import nn

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.context.context import Context
from drivetrain.runtime.group import destroy_group, init_distributed
from drivetrain.runtime.seeds import set_deterministic
from tests.checkpoint.training import assert_same_state

pytestmark = pytest.mark.gpu


def make_session(seed: int = 0) -> Context:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4)).cuda()
    ctx = Context(model=model)
    ctx.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ctx.noise = torch.Generator("cuda").manual_seed(seed)
    return ctx


def train(ctx: Context, num_steps: int, keeper: Checkpointer | None = None) -> None:
    for _ in range(num_steps):
        x = torch.randn(32, 16, device="cuda", generator=ctx.noise)
        ctx.optimizer.zero_grad()
        ctx.model(x).square().mean().backward()
        ctx.optimizer.step()
        if keeper is not None:
            keeper.step()


def resume_in_deterministic_mode(folder) -> None:
    warnings.simplefilter("error")  # also where CUDA has started before the setting
    set_deterministic("strict")
    whole = make_session()
    torch.manual_seed(3)
    train(whole, 12)
    first = make_session()
    torch.manual_seed(3)
    with Checkpointer(first, every=1, dir=folder) as keeper:
        train(first, 7, keeper)
    second = make_session(seed=9)
    with Checkpointer(second, every=1, dir=folder) as keeper:
        assert keeper.restore().step == 7
        train(second, 5, keeper)
    assert_same_state(whole.state_dict(), second.state_dict())


def test_a_resumed_run_is_bit_identical_in_deterministic_mode(tmp_path):
    """In a process of its own: cuBLAS reads its setting when CUDA starts, and an earlier test may have started it."""
    process = multiprocessing.get_context("spawn").Process(target=resume_in_deterministic_mode, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0, "see the traceback on standard error"


def test_values_changed_right_after_save_do_not_reach_the_file(tmp_path):
    """The device is kept busy, so that the copies are still queued when the values are overwritten."""
    ctx = Context(x=torch.zeros(64 * 2**20, device="cuda"))
    heavy = torch.randn(8192, 8192, device="cuda")
    with Checkpointer(ctx, dir=tmp_path) as keeper:
        keeper.save("warm")
        keeper.wait()
        for value in (1.0, 2.0, 3.0):
            ctx.x.fill_(value)
            for _ in range(20):
                heavy = heavy @ heavy * 1e-4
            keeper.save(f"value{value:.0f}")
            ctx.x.fill_(-1.0)
            keeper.wait()
            keeper.restore(f"value{value:.0f}")
            assert torch.equal(ctx.x, torch.full_like(ctx.x, value))


def test_saving_waits_for_nothing_but_whether_the_state_is_finite(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.checkpoint.checkpointer.nonfinite_state", lambda items: [])
    ctx = make_session()
    train(ctx, 2)
    with Checkpointer(ctx, dir=tmp_path) as keeper:
        keeper.save("warm")
        keeper.wait()
        pinned = [name for (part, name), buffer in keeper._buffers._buffers.items() if buffer.is_pinned()]
        assert set(pinned) >= {"model.0.weight", "optimizer.state.0.exp_avg"}
        torch.cuda.set_sync_debug_mode("error")
        try:
            keeper.save("next")
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_checkpoint_of_the_device_loads_on_the_cpu(tmp_path):
    ctx = make_session()
    train(ctx, 2)
    with Checkpointer(ctx, dir=tmp_path) as keeper:
        keeper.save(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    other = Context(model=model, optimizer=torch.optim.AdamW(model.parameters()), noise=torch.Generator("cuda"))
    with Checkpointer(other, dir=tmp_path) as keeper:
        keeper.restore()
    assert all(
        torch.equal(a.cpu(), b) for a, b in zip(ctx.model.state_dict().values(), other.model.state_dict().values())
    )


def test_a_sharded_model_on_the_device_restores_through_the_host(tmp_path, monkeypatch):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29517,
    }.items():
        monkeypatch.setenv(name, str(value))
    init_distributed()
    try:
        first = make_session()
        first.fsdp()
        train(first, 3)
        with Checkpointer(first, dir=tmp_path) as keeper:
            keeper.save("three")
        train(first, 2)
        second = make_session(seed=4)
        second.fsdp()
        with Checkpointer(second, dir=tmp_path) as keeper:
            keeper.restore()
        moment = next(iter(second.optimizer.state.values()))["exp_avg"]
        assert moment.device.type == "cuda" and type(moment).__name__ == "DTensor"
        train(second, 2)
        for mine, other in zip(first.model.parameters(), second.model.parameters()):
            torch.testing.assert_close(mine.full_tensor(), other.full_tensor())
    finally:
        destroy_group()
