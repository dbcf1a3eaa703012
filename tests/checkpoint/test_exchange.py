import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint.chaos import full_disk
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.exchange import RankExchange, control_exchange
from drivetrain.checkpoint.store import load_checkpoint, save_checkpoint
from drivetrain.checkpoint.writer import WriteFailedError
from drivetrain.context.context import Context
from drivetrain.core.errors import CheckpointError, ResumeError, StateError
from drivetrain.runtime.ranks import get_rank


def test_alone_an_exchange_returns_what_was_said():
    exchange = RankExchange()
    exchange.meet("anything")
    assert exchange.gather(3) == [3]
    outcome = exchange.attempt(lambda: 1 + 1)
    assert outcome.results == [2] and not outcome.problems

    def fail():
        raise OSError("disk")

    outcome = exchange.attempt(fail)
    assert outcome.explain() == "OSError: disk" and isinstance(outcome.own, OSError)

    with pytest.raises(OSError, match="disk"):
        exchange.first(fail)


def meet_without_rank_1() -> str:
    """Rank 1 comes late; the deadline is over by then."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    dist.barrier()  # the others are here in time, whatever else the machine does
    if get_rank() == 1:
        return "absent"
    with pytest.raises(CheckpointError) as error:
        RankExchange(group, deadline=timedelta(seconds=2)).meet("saving checkpoint-1")
    return str(error.value)


def test_ranks_that_do_not_come_are_named(world4):
    texts = world4(meet_without_rank_1)
    assert re.match(r"saving checkpoint-1: not every rank arrived within 2 s \(.*[Rr]anks? 1 ", texts[0])
    assert "All ranks must call it" in texts[0]


def unexpected_error() -> str:
    exchange = control_exchange()
    with pytest.raises((TypeError, CheckpointError)) as error:
        exchange.attempt(lambda: 1 + "1" if get_rank() == 1 else 2)
    return f"{type(error.value).__name__}: {error.value}"


def test_an_unexpected_error_of_one_rank_is_raised_on_all(world2):
    texts = world2(unexpected_error)
    assert texts[1].startswith("TypeError") and texts[0].startswith("CheckpointError: rank 1 failed: TypeError")


def full_on_rank(folder: str, rank: int) -> tuple[str, list[str], int]:
    """One rank's disk is full while all save; then it is not."""
    ctx = Context(x=torch.ones(3))
    with Checkpointer(ctx, dir=folder, keep=None) as keeper:
        keeper.save(1)
        with full_disk(10 if get_rank() == rank else 10**9), pytest.raises(WriteFailedError) as error:
            keeper.save(2, final=True)
        control_exchange().gather(None)
        left = sorted(path.name for path in Path(folder).iterdir())
        control_exchange().gather(None)
        keeper.save(3)
        return str(error.value), left, len(keeper.list())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fails_on_one_rank_fails_the_save_on_all(world2, tmp_path, rank):
    for text, left, count in world2(full_on_rank, str(tmp_path), rank):
        assert f"rank {rank}: OSError" in text and "No space left" in text
        assert left == ["checkpoint-1", "last", "writer.lock"] and count == 2


def save_dict(folder: str) -> tuple[str, bool]:
    path = save_checkpoint({"rank": get_rank()}, "plain", path=folder)
    control_exchange().gather(None)
    return str(path), load_checkpoint(path) == {"rank": 0}


def test_of_a_plain_dict_rank_0_writes_and_the_others_get_the_path(world2, tmp_path):
    assert world2(save_dict, str(tmp_path)) == [(str(tmp_path / "checkpoint-plain"), True)] * 2


def does_not_fit_on_rank_1(folder: str) -> str:
    ctx = Context(x=1)
    with Checkpointer(ctx, dir=folder) as keeper:
        keeper.save(1)
        if get_rank() == 1:
            ctx.y = torch.ones(1)
        with pytest.raises((StateError, CheckpointError)) as error:
            keeper.restore()
    return str(error.value)


def test_a_state_that_does_not_fit_on_one_rank_stops_all(world2, tmp_path):
    texts = world2(does_not_fit_on_rank_1, str(tmp_path))
    assert "rank 1 could not load" in texts[0] and "y" in texts[1]


def save_in_background(folder: str) -> list[int]:
    ctx = Context(x=torch.zeros(100))
    with Checkpointer(ctx, every=1, dir=folder, async_save=True, keep=None) as keeper:
        for _ in range(5):
            ctx.x += 1
            keeper.step()
        keeper.wait()
        values = []
        for entry in keeper.list():
            keeper.restore(entry.path)
            values.append(int(ctx.x[0]))
    return values


def test_background_saves_of_two_ranks_meet_on_their_own_group(world2, tmp_path):
    assert world2(save_in_background, str(tmp_path)) == [[1, 2, 3, 4, 5]] * 2


def save_by_the_clock(folder: str) -> list[bool]:
    """Ranks whose clocks differ save at the same steps: rank 0's."""
    with Checkpointer(Context(x=1), every="3600sec", dir=folder) as keeper:
        saved = []
        for step in range(4):
            if step == 1 and get_rank() == 0:
                keeper.progress._started -= 3601
            saved.append(keeper.step() is not None)
        control_exchange().gather(None)
    return saved


def test_ranks_agree_on_wall_clock_time(world2, tmp_path):
    saved = world2(save_by_the_clock, str(tmp_path))
    assert saved[0] == saved[1] and saved[0][:3] == [False, False, True]


def told_to_stop(folder: str, told: int) -> tuple[int, list[int]]:
    import os
    import signal

    ctx = Context(steps=0)
    keeper = Checkpointer(ctx, dir=folder)
    code = None
    try:
        for _ in range(10):
            ctx.steps += 1
            if ctx.steps == 3 and get_rank() == told:
                os.kill(os.getpid(), signal.SIGTERM)
            keeper.step()
    except SystemExit as stop:
        code = stop.code
    return code, ctx.steps, [entry.manifest.step for entry in keeper.list()]


@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_to_one_rank_stops_both_one_step_later(world2, tmp_path, told):
    assert world2(told_to_stop, str(tmp_path), told) == [(143, 4, [4])] * 2


def save_stages(folder: str) -> tuple[list[str], float, str]:
    """Each rank holds another stage of a model, as under pipeline parallelism."""
    rank = get_rank()
    ctx = Context(model=torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(2, 2 + rank)}), epoch=4)
    with torch.no_grad():
        ctx.model[f"stage{rank}"].weight.fill_(rank + 1)
    with Checkpointer(ctx, dir=folder, async_save=rank >= 0) as keeper:
        keeper.save(1)
        keeper.wait()
        with torch.no_grad():
            ctx.model[f"stage{rank}"].weight.zero_()
        keeper.restore()
    state = load_checkpoint(folder)
    return sorted(state["model"]), ctx.model[f"stage{rank}"].weight.mean().item(), str(keeper.directory)


def test_ranks_with_different_names_keep_a_state_each(world2, tmp_path):
    results = world2(save_stages, str(tmp_path))
    assert [names for names, _, _ in results] == [["stage0.bias", "stage0.weight"], ["stage1.bias", "stage1.weight"]]
    assert [weight for _, weight, _ in results] == [1.0, 2.0]
    files = sorted(path.name for path in (tmp_path / "checkpoint-1").iterdir())
    assert "state-rank-00001.json" in files and "tensors-rank-00001.safetensors" in files
    with pytest.raises(ResumeError, match="Load it with 2 processes"):
        load_checkpoint(tmp_path)


def one_name_two_tensors(folder: str) -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    meshes = [DeviceMesh("cpu", [rank]) for rank in range(2)]  # both ranks take part in making both
    ctx = Context(x=DTensor.from_local(torch.ones(2), meshes[get_rank()], [Shard(0)]))
    with pytest.raises(CheckpointError, match="x is a different sharded tensor on rank 1") as error:
        save_checkpoint(ctx, 1, path=folder)
    return str(error.value)


def test_one_name_for_two_sharded_tensors_is_refused(world2, tmp_path):
    assert all("different names" in text for text in world2(one_name_two_tensors, str(tmp_path)))
