"""A run that was saved under one plan goes on under another: model, optimizer state and place in the data, through the Checkpointer.

The reference is one uninterrupted hand-written loop on one process. Losses of the steps after the change must be its losses, and the
weights at the end its weights, whatever the two plans and the two numbers of processes are.
"""

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.store import save_checkpoint
from drivetrain.core.errors import CheckpointError
from drivetrain.module.pipeline_schedule import PipelinedModel
from drivetrain.module.wrapping import named_clean_parameters
from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.train.auto import auto_accelerate
from tests.strategy.tasks import ADAM, TENSOR_PLAN, loss_func, make_data, make_model, plain_losses

TENSOR = ("tensor_parallel", {"plan": TENSOR_PLAN})
PIPE = ("pipeline_parallel", {"chunks": 2})
PLANS = {
    "plain": (1, []),
    "micro batches": (1, [("micro_batch", 4)]),
    "ddp": (2, ["parallel_mode"]),
    "ddp, fused, micro batches": (2, ["parallel_mode", "fused_optimizer", ("micro_batch", 2)]),
    "zero1": (2, ["zero1"]),
    "fsdp": (2, ["fsdp"]),
    "tensor": (2, [("parallel_mode", [("tensor", 2)]), "tensor_parallel"]),
    "pieces": (2, [("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"sequence_parallel": True})]),
    "sequence": (2, [("parallel_mode", [("sequence", 2)]), "sequence_parallel"]),
    "pipe": (2, [("parallel_mode", [("pipe", 2)]), PIPE]),
    "zero1 of four": (4, ["zero1"]),
    "tensor x fsdp": (4, [("parallel_mode", [("tensor", 2), ("zero", 2)]), TENSOR, "fsdp"]),
    "hybrid": (4, [("parallel_mode", [("zero", 2), ("data", 2)]), "fsdp"]),
    "sequence x zero2": (4, [("parallel_mode", [("sequence", 2), ("data", 2)]), "sequence_parallel", "zero2"]),
    "pipe x fsdp": (4, [("parallel_mode", [("pipe", 2), ("zero", 2)]), PIPE, "fsdp"]),
    "tensor x pipe": (4, [("mixed_parallel", {"parallel_mode": [("tensor", 2), ("pipe", 2)], "tensor_config": TENSOR_PLAN})]),
}  # fmt: skip
PAIRS = [
    ("plain", "ddp"), ("plain", "tensor x fsdp"), ("plain", "pipe"), ("plain", "hybrid"), ("plain", "sequence"),
    ("micro batches", "ddp, fused, micro batches"),
    ("ddp", "zero1"), ("ddp", "fsdp"), ("ddp", "tensor x pipe"), ("ddp", "plain"), ("ddp", "sequence"),
    ("ddp, fused, micro batches", "fsdp"),
    ("zero1", "plain"), ("zero1", "fsdp"), ("zero1", "zero1 of four"), ("zero1", "tensor"), ("zero1", "pipe"),
    ("fsdp", "plain"), ("fsdp", "zero1"), ("fsdp", "hybrid"), ("fsdp", "tensor"), ("fsdp", "pipe x fsdp"),
    ("tensor", "plain"), ("tensor", "ddp"), ("tensor", "pieces"), ("tensor", "tensor x fsdp"), ("tensor", "sequence"),
    ("pieces", "fsdp"), ("pieces", "tensor x pipe"),
    ("sequence", "tensor"), ("sequence", "sequence x zero2"), ("sequence", "zero1 of four"),
    ("pipe", "plain"), ("pipe", "ddp"), ("pipe", "fsdp"), ("pipe", "tensor x fsdp"), ("pipe", "pipe x fsdp"),
    ("zero1 of four", "ddp"), ("zero1 of four", "hybrid"),
    ("tensor x fsdp", "plain"), ("tensor x fsdp", "hybrid"), ("tensor x fsdp", "tensor"), ("tensor x fsdp", "pipe"),
    ("hybrid", "tensor x fsdp"), ("hybrid", "zero1"), ("hybrid", "sequence x zero2"),
    ("sequence x zero2", "pieces"), ("sequence x zero2", "plain"),
    ("pipe x fsdp", "plain"), ("pipe x fsdp", "tensor x pipe"), ("pipe x fsdp", "sequence"),
    ("tensor x pipe", "fsdp"), ("tensor x pipe", "hybrid"),
]  # fmt: skip


QUICK = [
    ("plain", "pipe"), ("micro batches", "ddp, fused, micro batches"), ("ddp", "zero1"), ("ddp, fused, micro batches", "fsdp"),
    ("zero1", "zero1 of four"), ("fsdp", "tensor"), ("tensor", "pieces"), ("pieces", "tensor x pipe"),
    ("sequence", "sequence x zero2"), ("pipe", "tensor x fsdp"), ("pipe", "pipe x fsdp"), ("zero1 of four", "ddp"),
    ("tensor x fsdp", "hybrid"), ("hybrid", "zero1"), ("sequence x zero2", "plain"), ("pipe x fsdp", "sequence"),
    ("tensor x pipe", "fsdp"),
]  # fmt: skip
"""Every plan is left and entered once; `make test-slow` runs the other pairs."""


def start(plan, seed=0, tied=False):
    status, result, applied = auto_accelerate(
        make_model(seed, tied=tied), torch.optim.AdamW, make_data(), loss_func, None, "unpack_dict", ADAM,
        dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=plan, device="cpu",
        ignore_dryrun_on_load_strategy=True,
    )  # fmt: skip
    assert status, applied.failure
    return result


def train(result, steps):
    """Take some steps from where the loader stands; return the loss of each global batch."""
    losses, total, weight, batches = [], 0.0, 0.0, iter(result.dataloader)
    while len(losses) < steps:
        batch = result.prepare_input(next(batches), result.context.device)
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        size = result.dataloader.batch_info.size
        total, weight, closes = total + loss.item() * size, weight + size, result.optim.window_closed
        result.optim.step()
        result.optim.zero_grad()
        if closes:
            losses.append((total, weight))
            total = weight = 0.0
    return losses


def save_under(folder, names, tied=False):
    """Train two steps by each plan and save; a pipeline saves its stages joined."""
    found = {}
    for name in names:
        result = start(PLANS[name][1], tied=tied)
        found[name] = train(result, 2)
        if isinstance(result.model, PipelinedModel):
            save_checkpoint(result.context.state_dict(full=True), 2, path=f"{folder}/{name}")
            if dist.is_initialized():
                dist.barrier()
        else:
            Checkpointer(result.context, dir=f"{folder}/{name}", signals=False).save(2, final=True)
        clear_data_ranks()
    return found


def resume_under(folder, pairs, tied=False):
    """Go on by the second plan of each pair from what the first one saved; the model starts from other weights."""
    found = {}
    for first, second in pairs:
        result = start(PLANS[second][1], seed=1, tied=tied)
        assert Checkpointer(result.context, dir=f"{folder}/{first}", signals=False).restore("last") is not None
        losses = train(result, 2)
        weights = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in named_clean_parameters(result.model)
        }
        found[first, second] = losses, weights
        clear_data_ranks()
    return found


def mean_losses(per_rank):
    return [sum(t for t, _ in step) / sum(w for _, w in step) for step in zip(*per_rank)]


@pytest.fixture(scope="module")
def worlds(world2, world4):
    return {1: lambda function, *args: [function(*args)], 2: world2, 4: world4}


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory):
    """A checkpoint under every plan, in a folder of its name."""
    folder = tmp_path_factory.mktemp("saved")
    expected, _ = plain_losses(tied=False, steps=2)
    for size, world in worlds.items():
        names = [name for name, (own, _) in PLANS.items() if own == size]
        results = world(save_under, str(folder), names)
        for name in names:
            assert mean_losses([result[name] for result in results]) == pytest.approx(expected, rel=2e-4), name
    return str(folder)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["quick", "rest"])
def test_a_run_goes_on_under_another_plan_as_if_it_had_not_stopped(worlds, saved, size, is_quick):
    pairs = [pair for pair in PAIRS if PLANS[pair[1]][0] == size and (pair in QUICK) == is_quick]
    expected, weights = plain_losses(tied=False)
    results = worlds[size](resume_under, saved, pairs)
    for pair in pairs:
        losses = mean_losses([result[pair][0] for result in results])
        assert losses == pytest.approx(expected[2:], rel=2e-4), pair
        seen = set()
        for result in results:
            for name, value in result[pair][1].items():
                assert torch.allclose(value, weights[name], rtol=1e-3, atol=2e-3), (pair, name)
                seen.add(name)
        assert seen == set(weights), pair


def test_a_tied_parameter_in_two_stages_is_saved_once_and_taken_by_both(worlds, tmp_path):
    expected, weights = plain_losses()
    worlds[1](save_under, str(tmp_path), ["plain"], True)
    worlds[2](save_under, str(tmp_path), ["pipe"], True)
    for pair in [("plain", "pipe"), ("pipe", "plain"), ("pipe", "fsdp")]:
        results = worlds[PLANS[pair[1]][0]](resume_under, str(tmp_path), [pair], True)
        assert mean_losses([result[pair][0] for result in results]) == pytest.approx(expected[2:], rel=2e-4), pair
        for result in results:
            for name, value in result[pair][1].items():
                assert torch.allclose(value, weights[name], rtol=1e-3, atol=2e-3), (pair, name)


def test_every_plan_is_left_and_entered():
    assert set(QUICK) < set(PAIRS)
    assert {first for first, _ in QUICK} == {second for _, second in QUICK} | {"micro batches"} == set(PLANS)


def keep_stages(folder):
    """Save each rank's own stages; go on on the same mesh, and try to under other plans."""
    pipe = PLANS["pipe"][1]
    Checkpointer((first := start(pipe)).context, dir=folder, signals=False).save(0, final=True)
    again = start(pipe, seed=1)
    Checkpointer(again.context, dir=folder, signals=False).restore("last")
    losses, refused = [train(first, 2), train(again, 2)], []
    clear_data_ranks()
    others = [PLANS["fsdp"][1], [pipe[0], ("pipeline_parallel", {"chunks": 2, "split": ["norm"]})]]
    for plan in others:
        result = start(plan, seed=1)
        before = {name: value.clone() for name, value in named_clean_parameters(result.model)}
        with pytest.raises(Exception) as caught:
            Checkpointer(result.context, dir=folder, signals=False).restore("last")
        changed = [name for name, value in named_clean_parameters(result.model) if not torch.equal(value, before[name])]
        refused.append((type(caught.value).__name__, str(caught.value), changed))
        clear_data_ranks()
    return losses, refused


def resume_alone(folder):
    with pytest.raises(CheckpointError, match="2 ranks that hold different parts") as caught:
        Checkpointer(start([]).context, dir=folder, signals=False).restore("last")
    return str(caught.value)


def test_stages_saved_by_each_rank_resume_on_their_mesh_and_are_refused_by_name_elsewhere(world2, tmp_path):
    for losses, refused in world2(keep_stages, str(tmp_path)):
        assert torch.allclose(*map(torch.tensor, losses), rtol=1e-6)
        (whole, split) = refused
        assert whole[0] == split[0] == "StateError" and whole[2] == split[2] == []
        assert "the model is whole now" in whole[1] and "state_dict(full=True)" in whole[1]
        assert "cut before blocks.1" in split[1] and "cut before norm" in split[1]
    assert "2 processes" in resume_alone(str(tmp_path))
