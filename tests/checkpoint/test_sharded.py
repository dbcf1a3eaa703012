"""State that is split over ranks, read back by any number of them."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.layout import problem_with, read_manifest
from drivetrain.checkpoint.store import load_checkpoint, save_checkpoint
from drivetrain.context.context import Context
from drivetrain.core.errors import CheckpointError
from drivetrain.runtime.ranks import get_num_processes, get_rank
from tests.checkpoint.training import flat_values


def make_session(sharded: bool) -> Context:
    """A model whose sizes divide by nothing."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.Linear(3, 1, bias=False))
    ctx = Context(model=model, epoch=0)
    ctx.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    if sharded:
        ctx.fsdp()
    return ctx


def train(ctx: Context, first: int, last: int) -> None:
    """Steps on the same data on every rank, so that any number of them computes the same gradients."""
    for step in range(first, last):
        data = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        ctx.optimizer.zero_grad()
        ctx.model(data).square().mean().backward()
        ctx.optimizer.step()


def full_state(ctx: Context) -> dict:
    """The whole state as plain values, on every rank."""
    found = {}
    for path, value in flat_values(ctx.state_dict()).items():
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[path] = value.detach().clone()
    return found


def save_sharded(folder: str, async_save: bool) -> dict:
    ctx = make_session(sharded=True)
    train(ctx, 0, 3)
    with Checkpointer(ctx, dir=folder, async_save=async_save) as keeper:
        keeper.save("three")
        if async_save:
            with torch.no_grad():
                for parameter in ctx.model.parameters():
                    parameter.to_local().fill_(9.0)
            keeper.wait()
    return full_state(ctx)


def resume(folder: str, sharded: bool, has_stepped: bool) -> tuple[dict, dict, bool]:
    ctx = make_session(sharded)
    if has_stepped:
        train(ctx, 50, 52)
    with Checkpointer(ctx, dir=folder) as keeper:
        restored = keeper.restore()
        assert restored.manifest.world_size == 2
    loaded = full_state(ctx)
    moment = ctx.optimizer.state[next(ctx.model.parameters())]["exp_avg"]
    train(ctx, 3, 6)
    return loaded, full_state(ctx), hasattr(moment, "full_tensor")


def reference(steps: int) -> dict:
    ctx = make_session(sharded=False)
    train(ctx, 0, steps)
    return full_state(ctx)


def assert_close(left: dict, right: dict, exact: bool = False) -> None:
    assert left.keys() == right.keys()
    for path, value in left.items():
        torch.testing.assert_close(value, right[path], rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, msg=path)


@pytest.fixture(scope="module")
def saved_on_two(world2, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("sharded")
    states = world2(save_sharded, str(folder), False)
    assert_close(states[0], states[1], exact=True)
    return folder, states[0]


def test_ranks_write_their_parts_and_nothing_twice(saved_on_two):
    folder = saved_on_two[0] / "checkpoint-three"
    manifest = read_manifest(folder)
    assert manifest.world_size == 2 and problem_with(folder) is None
    assert [entry.path for entry in manifest.files if entry.path.startswith("shards/")] == [
        "shards/rank-00000.safetensors",
        "shards/rank-00001.safetensors",
    ]
    from safetensors.torch import load_file

    parts = [load_file(folder / "shards" / f"rank-{rank:05d}.safetensors") for rank in range(2)]
    assert sum(part["model.0.weight"].shape[0] for part in parts) == 7
    assert [("model.3.weight" in part) for part in parts] == [True, False]  # one row: one rank has it


def test_torch_itself_reads_what_we_write(saved_on_two):
    import torch.distributed.checkpoint as dcp

    folder, state = saved_on_two
    wanted = {"model.0.weight": torch.empty(7, 5), "optimizer.state.0.exp_avg_sq": torch.empty(7, 5)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "checkpoint-three" / "shards")))
    assert torch.equal(wanted["model.0.weight"], state[".model.0.weight"])
    assert torch.equal(wanted["optimizer.state.0.exp_avg_sq"], state[".optimizer.state.0.exp_avg_sq"])


def test_two_ranks_load_on_one_process_without_sharding(saved_on_two):
    folder, state = saved_on_two
    loaded, continued, _ = resume(str(folder), False, False)
    assert_close(loaded, state, exact=True)
    assert_close(continued, reference(6))
    whole = load_checkpoint(folder)
    assert torch.equal(whole["model"]["0.weight"], state[".model.0.weight"])


@pytest.mark.parametrize("has_stepped", [False, True])
def test_two_ranks_load_on_two(world2, saved_on_two, has_stepped):
    folder, state = saved_on_two
    for loaded, continued, is_sharded in world2(resume, str(folder), True, has_stepped):
        assert_close(loaded, state, exact=True)
        assert_close(continued, reference(6))
        assert is_sharded


def test_two_ranks_load_on_four_with_uneven_shapes(world4, saved_on_two):
    folder, state = saved_on_two
    for loaded, continued, is_sharded in world4(resume, str(folder), True, False):
        assert_close(loaded, state, exact=True)
        assert_close(continued, reference(6))
        assert is_sharded


def test_two_ranks_load_on_four_that_do_not_shard(world4, saved_on_two):
    folder, state = saved_on_two
    for loaded, _, is_sharded in world4(resume, str(folder), False, False):
        assert_close(loaded, state, exact=True)
        assert not is_sharded


def test_an_async_save_of_shards_is_a_snapshot(world2, tmp_path, saved_on_two):
    world2(save_sharded, str(tmp_path), True)
    loaded, _, _ = resume(str(tmp_path), False, False)
    assert_close(loaded, saved_on_two[1], exact=True)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"DCP_SHARDING_INFO": "not json"},
        {"DCP_SHARDING_INFO": "{}"},
        {"DCP_SHARDING_INFO": '{"x": {"saved_offsets": [-5]}}'},
        {"DCP_SHARDING_INFO": '{"x": {"saved_offsets": [1000000]}}'},
        {"DCP_SHARDING_INFO": '{"x": {"saved_offsets": ["a"]}}'},
    ],
)
def test_forged_headers_of_shards_are_checkpoint_errors_or_plain_tensors(tmp_path, header):
    from drivetrain.checkpoint.files import safetensors_pieces, write_file
    from drivetrain.checkpoint.sharded import read_parts

    write_file(tmp_path, "rank-00000.safetensors", safetensors_pieces({"x": torch.ones(3)}, header))
    try:
        tensor = read_parts(tmp_path, ["x"], {})["x"]
    except CheckpointError:
        return
    assert header == {} and tensor.tolist() == [1.0, 1.0, 1.0]  # without a header the tensor is whole
    with pytest.raises(CheckpointError, match="y is missing"):
        read_parts(tmp_path, ["y"], {})


def layouts_of_optimizer_state(folder: str) -> dict[str, str]:
    """What the reader reads for an optimizer that has no state yet: shards, not whole tensors."""
    from drivetrain.checkpoint import sharded

    ctx, seen = make_session(sharded=True), {}
    real = sharded.read_parts

    def spy(where, names, live):
        result = real(where, names, live)
        seen.update({name: type(value).__name__ for name, value in result.items()})
        return result

    sharded.read_parts = spy
    try:
        with Checkpointer(ctx, dir=folder) as keeper:
            keeper.restore()
    finally:
        sharded.read_parts = real
    return seen


def test_a_fresh_optimizer_reads_only_its_own_parts(world2, saved_on_two):
    for seen in world2(layouts_of_optimizer_state, str(saved_on_two[0])):
        assert set(seen.values()) == {"DTensor"} and "optimizer.state.0.exp_avg" in seen


def damaged_shard(folder: str) -> list[str]:
    ctx = make_session(sharded=True)
    with Checkpointer(ctx, dir=folder) as keeper:
        keeper.save("good")
        keeper.save("bad")
        path = keeper.directory / "checkpoint-bad" / "shards" / "rank-00001.safetensors"
        if get_rank() == 1:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        restored = keeper.restore()
        return [restored.id, restored.rejected[0].reason]


def test_a_damaged_shard_of_one_rank_is_seen_by_all(world2, tmp_path):
    for id, reason in world2(damaged_shard, str(tmp_path)):
        assert id == "good" and "shards/rank-00001.safetensors does not match its SHA-256" in reason


def save_a_dict_of_shards(folder: str) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (get_num_processes(),))
    whole = torch.arange(15.0).reshape(5, 3)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "copies": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": whole + 1,
        "rank": get_rank(),
    }
    save_checkpoint(state, 1, path=folder)
    return load_checkpoint(Path(folder) / "checkpoint-1")


def test_save_checkpoint_takes_a_dict_with_sharded_tensors(world2, tmp_path):
    whole = torch.arange(15.0).reshape(5, 3)
    for state in world2(save_a_dict_of_shards, str(tmp_path)):
        assert state["rank"] == 0 and torch.equal(state["plain"], whole + 1)
        assert all(torch.equal(state[name], whole) for name in ("rows", "columns", "copies"))
    header = (tmp_path / "checkpoint-1" / "shards" / "rank-00001.safetensors").read_bytes()
    names = set(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]))
    assert names == {"__metadata__", "rows", "columns"}


def save_a_partial_sum(folder: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (get_num_processes(),))
    with pytest.raises(CheckpointError, match="half is a partial sum") as error:
        save_checkpoint({"half": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, 1, path=folder)
    return str(error.value)


def test_a_sum_that_is_not_added_up_is_refused(world2, tmp_path):
    assert all("Reduce it" in text for text in world2(save_a_partial_sum, str(tmp_path)))
