"""What belongs to each rank: written by each, read back by each, and made anew when there are more or fewer of them."""

import random

import numpy as np
import pytest
import torch

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.store import load_checkpoint
from drivetrain.context.context import Context
from drivetrain.core.errors import ResumeError
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.seeds import reseed_rank


class Session(Context):
    """A Context with gradients of an open accumulation window, which differ between ranks."""

    rank_local = ("partial", "*.partial")


def make_session(rank: int) -> Session:
    ctx = Session(weight=torch.ones(3), seed=5)
    ctx.own = torch.Generator().manual_seed(100 + rank)
    ctx.shared = torch.Generator().manual_seed(7)
    ctx.numbers = random.Random(rank)
    ctx.array = np.random.default_rng(rank)
    ctx.legacy = np.random.RandomState(rank)
    return ctx


def draws(ctx: Session) -> dict:
    """One draw from every stream, global ones included."""
    return {
        "own": torch.rand(1, generator=ctx.own).item(),
        "shared": torch.rand(1, generator=ctx.shared).item(),
        "numbers": ctx.numbers.random(),
        "array": float(ctx.array.random()),
        "legacy": float(ctx.legacy.random_sample()),
        "torch": torch.rand(1).item(),
        "python": random.random(),
        "numpy": float(np.random.rand()),
    }


def save_then_draw(folder: str) -> dict:
    ctx = make_session(get_rank())
    ctx.partial = {"weight": torch.full((3,), float(get_rank()))}
    reseed_rank(3)
    draws(ctx)
    with Checkpointer(ctx, dir=folder) as keeper:
        keeper.save(1)
    return draws(ctx)


def restore_then_draw(folder: str, with_partial: bool = True) -> tuple[dict, list]:
    ctx = make_session(rank=50 + get_rank())
    if with_partial:
        ctx.partial = {"weight": torch.zeros(3)}
    with Checkpointer(ctx, dir=folder) as keeper:
        keeper.restore()
    return draws(ctx), ctx.partial["weight"].tolist() if with_partial else []


def test_every_rank_continues_its_own_streams_and_gradients(world2, tmp_path):
    expected = world2(save_then_draw, str(tmp_path))
    restored = world2(restore_then_draw, str(tmp_path))
    assert [draw for draw, _ in restored] == expected
    assert [partial for _, partial in restored] == [[0.0] * 3, [1.0] * 3]
    assert expected[0]["shared"] == expected[1]["shared"] and expected[0]["own"] != expected[1]["own"]


def save_without_partial(folder: str) -> dict:
    ctx = make_session(get_rank())
    reseed_rank(3)
    with Checkpointer(ctx, dir=folder) as keeper:
        keeper.save(1)
    return draws(ctx)


def test_another_number_of_ranks_gets_new_streams_that_differ_and_repeat(world2, world4, tmp_path):
    expected = world2(save_without_partial, str(tmp_path))
    first = [draw for draw, _ in world4(restore_then_draw, str(tmp_path), False)]
    again = [draw for draw, _ in world4(restore_then_draw, str(tmp_path), False)]
    assert first == again
    for stream in ("own", "numbers", "array", "legacy", "torch", "python", "numpy"):
        values = [draw[stream] for draw in (*first, *expected)]
        assert len(set(values)) == 6, stream
    assert {draw["shared"] for draw in first} == {expected[0]["shared"]}


def test_gradients_of_several_ranks_cannot_continue_on_one(world2, tmp_path):
    world2(save_then_draw, str(tmp_path))
    state = random.getstate()
    with pytest.raises(ResumeError, match=r"partial.*saved by 2.*Resume with 2 processes"):
        restore_then_draw(str(tmp_path))
    assert random.getstate() == state
    assert load_checkpoint(tmp_path)["partial"]["weight"].tolist() == [0.0] * 3  # looking at it is allowed


def test_one_process_continues_on_its_own(tmp_path):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        expected = save_then_draw(str(tmp_path))
        assert restore_then_draw(str(tmp_path)) == (expected, [0.0] * 3)
    finally:
        torch.set_rng_state(before[0]), random.setstate(before[1]), np.random.set_state(before[2])


class Merging(Context):
    """A Context whose local value goes to the first rank, unless it is negative."""

    def __init__(self, **items):
        super().__init__(**items)
        self._rank_local = {"partial": self.merge}

    @staticmethod
    def merge(values, rank):
        if min(values) < 0:
            raise ResumeError("its partial sums cannot be moved")
        return sum(values) if rank == 0 else 0


def save_parts(folder: str) -> None:
    ctx = Merging(partial=0)
    with Checkpointer(ctx, dir=folder) as keeper:
        for id, partial in enumerate((5 + get_rank(), 7 + get_rank(), -1), start=1):
            ctx.partial = partial
            keeper.save(id)


def restore_parts(folder: str, which: str = "auto") -> tuple[int, str, list[str]]:
    ctx = Merging(partial=0)
    with Checkpointer(ctx, dir=folder) as keeper:
        restored = keeper.restore(which)
    return ctx.partial, restored.id, [entry.reason for entry in restored.rejected]


def test_another_number_of_ranks_merges_or_takes_the_newest_checkpoint_that_it_can(world2, world4, tmp_path, caplog):
    world2(save_parts, str(tmp_path))
    assert [partial for partial, _, _ in world2(restore_parts, str(tmp_path))] == [-1, -1]
    assert restore_parts(str(tmp_path))[:2] == (15, "2")
    assert "checkpoint-3 is skipped: its partial sums cannot be moved" in caplog.text
    assert [answer[:2] for answer in world4(restore_parts, str(tmp_path))] == [(15, "2"), (0, "2"), (0, "2"), (0, "2")]
    with pytest.raises(ResumeError, match="cannot be moved"):
        restore_parts(str(tmp_path), "3")  # the user has named it
