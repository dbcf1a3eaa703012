"""Sequence parallelism, alone and combined, follows the plain model: same first loss, same curve, same weights."""

import json

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConflictError, MethodConfigError, StrategyError, UnsupportedMethodError
from drivetrain.runtime.launch import launch
from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.strategy.methods.fsdp import shard_mesh
from drivetrain.strategy.value import Strategy
from drivetrain.train.auto import auto_accelerate
from tests.strategy.tasks import ADAM, LENGTH, Block, TinyGPT, loss_func, make_data, make_model, plain_losses
from tests.strategy.test_semantics import check_against_plain, follow_all, in_parts

ON_TWO = {
    "sequence": [("parallel_mode", [("sequence", 2)]), "sequence_parallel"],
    "sequence, checkpoint, micro batches": [
        ("parallel_mode", [("sequence", 2), ("data", 1)]),
        ("sequence_parallel", 2),
        "checkpoint",
        ("micro_batch", 2),
    ],
    "sequence, fsdp": [("parallel_mode", [("cp", 2)]), "sequence_parallel", "fsdp"],
    "sequence, compile": [("parallel_mode", [("cp", 2)]), "sequence_parallel", ("compile", "eager")],
}
ON_FOUR = {
    "sequence of four": [("parallel_mode", [("sequence", 4)]), "sequence_parallel"],
    "sequence x data": [("parallel_mode", [("sequence", 2), ("data", 2)]), "sequence_parallel"],
    "data x sequence, zero1": [("parallel_mode", [("data", 2), ("sequence", 2)]), "sequence_parallel", "zero1"],
    "sequence x fsdp, checkpoint": [
        ("parallel_mode", [("sequence", 2), ("zero", 2)]),
        "sequence_parallel",
        "fsdp",
        "checkpoint",
    ],
    "sequence x data, zero2": [("parallel_mode", [("sequence", 2), ("data", 2)]), "sequence_parallel", "zero2"],
}


@in_parts(ON_TWO, {"sequence, checkpoint, micro batches", "sequence, fsdp"})
def test_sequence_plans_follow_the_plain_model_on_two(world2, plans):
    results = world2(follow_all, plans)
    check_against_plain(results, plans)
    assert all(result[name][2] == 1 for result in results for name in plans), "ranks along the sequence share samples"


@in_parts(ON_FOUR, {"sequence of four", "data x sequence, zero1", "sequence x fsdp, checkpoint"})
def test_sequence_plans_follow_the_plain_model_on_four(world4, plans):
    check_against_plain(world4(follow_all, plans), plans)


def train(model, plan, steps=2, loss=loss_func, verify=False):
    """Take steps by a plan; return the losses and the plan's explanation."""
    status, result, applied = auto_accelerate(
        model, torch.optim.AdamW, make_data(), loss, None, "unpack_dict", ADAM,
        dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=plan, device="cpu",
        ignore_dryrun_on_load_strategy=not verify,
    )  # fmt: skip
    assert status, applied.failure
    losses = []
    for _, batch in zip(range(steps), result.dataloader):
        batch = result.prepare_input(batch, result.context.device)
        loss_now = result.loss_func(batch, result.model(**batch))
        loss_now.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss_now.item())
    clear_data_ranks()
    return losses, applied.explain(200)


VERIFIED = {
    "sequence": [("parallel_mode", [("sequence", 2)]), "sequence_parallel"],
    "tensor": [("parallel_mode", [("tensor", 2)]), "tensor_parallel"],
    "pieces": [("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"sequence_parallel": True})],
    "pipe": [("parallel_mode", [("pipe", 2)]), "pipeline_parallel"],
}


def verified(plans):
    return {name: train(make_model(tied=False), plan, verify=True) for name, plan in plans.items()}


@pytest.mark.slow
def test_dry_runs_agree_with_plans_of_every_axis(world2):
    expected, _ = plain_losses(steps=2, tied=False)
    for found in world2(verified, VERIFIED, timeout=300):
        for name, (losses, text) in found.items():
            assert losses == pytest.approx(expected, rel=2e-4), name
            assert "dry run: loss" in text, name


EIGHT = {
    "data x zero x sequence": [
        ("parallel_mode", [("sequence", 2), ("zero", 2), ("data", 2)]),
        "sequence_parallel",
        "fsdp",
        "checkpoint",
    ],
    "data x sequence x tensor": [
        ("parallel_mode", [("tensor", 2), ("sequence", 2), ("data", 2)]),
        "tensor_parallel",
        "sequence_parallel",
    ],
    "data x zero x pieces": [
        ("parallel_mode", [("tensor", 2), ("zero", 2), ("data", 2)]),
        ("tensor_parallel", {"sequence_parallel": True}),
        "fsdp",
    ],
}


def on_eight():
    from drivetrain.runtime.group import destroy_group, init_distributed

    torch.set_num_threads(1)
    init_distributed("gloo")
    try:
        return follow_all(EIGHT)
    finally:
        destroy_group()


@pytest.mark.slow
def test_meshes_of_three_axes_follow_the_plain_model_on_eight():
    results = launch(on_eight, 8)
    check_against_plain(results, EIGHT)
    assert {result["data x zero x sequence"][2] for result in results} == {4}, "ranks along the sequence share samples"


class Positioned(nn.Module):
    """Finds its positions in the batch, so that it can run on a part of it; attention is told to by `set_sp`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.position, self.inner, self.told = nn.Embedding(LENGTH, 16), TinyGPT(), None

    def set_sp(self, sp_size, sp_rank, sp_group):
        self.told = (sp_size, sp_rank, sp_group)

    def forward(self, tokens, positions=None, labels=None):
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.inner.embedding(tokens) + self.position(positions)
        if self.told is not None and tokens.shape[1] < LENGTH:
            import torch.distributed._functional_collectives as collectives

            size, rank, group = self.told
            pieces = (
                collectives.all_gather_tensor_autograd
                if not hasattr(collectives, "all_gather_single_autograd")
                else collectives.all_gather_single_autograd
            )
            x = pieces(x.contiguous(), 1, group)
            for block in self.inner.blocks:
                x = block(x)
            x = x.chunk(size, 1)[rank]
        else:
            for block in self.inner.blocks:
                x = block(x)
        return self.inner.head(self.inner.norm(x))


def part_of_batch(batch, size, rank):
    positions = torch.arange(batch["tokens"].shape[1])
    parts = {key: value.chunk(size, 1)[rank] for key, value in batch.items()}
    return {**parts, "positions": positions.chunk(size)[rank]}


def self_managed():
    return train(
        Positioned(),
        [("parallel_mode", [("sequence", 2)]), ("sequence_parallel", {"batch_sp_processing_fn": part_of_batch})],
    )


def test_a_model_with_set_sp_manages_itself_on_its_part_of_the_batch(world2):
    model = Positioned()
    rows = make_data().tokens[:8]
    expected = loss_func({"labels": rows[:, 1:]}, model(rows[:, :-1])).item()
    for losses, text in world2(self_managed):
        assert losses[0] == pytest.approx(expected, rel=1e-5)
        assert "the model splits its sequence itself" in text


def test_wrong_settings_and_places_are_refused_by_name():
    def check(methods, world=2, model=None, device="cpu"):
        Strategy(methods).validate(make_model() if model is None else model, device=device, world_size=world)

    axis = ("parallel_mode", [("sequence", 2)])
    check([axis, "sequence_parallel"])
    for config, error, text in (
        ({"sp_sise": 2}, MethodConfigError, "sp_size"),
        ({"sp_size": 0}, MethodConfigError, "whole number"),
        ({"impl": "ulises"}, MethodConfigError, "ulysses"),
        ({"seq_dim": -1}, MethodConfigError, "seq_dim"),
        ({"set_sp_func_name": "a b"}, MethodConfigError, "name of a method"),
        ({"batch_sp_processing_fn": 3}, MethodConfigError, "is not a function"),
        ({"module": 3}, MethodConfigError, "classes or names"),
        ({"module": "Blok"}, MethodConfigError, "Block"),
        ({"module": Block}, MethodConfigError, "has no method 'set_sp'"),
        ({"sp_size": 4}, MethodConfigError, "sequence axis of 2"),
        ({"impl": "ring"}, UnsupportedMethodError, "needs CUDA"),
    ):
        with pytest.raises(error, match=text):
            check([axis, ("sequence_parallel", config)])
    with pytest.raises(StrategyError, match="no 'sequence' axis"):
        check(["sequence_parallel"])
    with pytest.raises(StrategyError, match="no sequence_parallel in the plan"):
        check([axis])
    heads = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 3), 2, enable_nested_tensor=False)
    with pytest.raises(MethodConfigError, match="3 heads"):
        check([axis, "sequence_parallel"], model=heads)
    with pytest.raises((ConflictError, StrategyError), match="pipe"):
        check([("parallel_mode", [("sequence", 2), ("pipe", 2)]), "sequence_parallel", "pipeline_parallel"], 4)
    plan = Strategy([axis, ("sequence_parallel", {"sp_size": 2, "module": Positioned})])
    assert Strategy.from_json(plan.to_json()) == plan and "Positioned" in json.dumps(plan.to_json())


def flattened(axes):
    from drivetrain.strategy.mesh import build_mesh, gradient_group

    mesh = build_mesh(axes, None, "cpu")
    names = [axis for axis in ("data", "zero") if dict(axes).get(axis, 1) > 1]
    found = shard_mesh(mesh, names, has_sequence=True)
    clear_data_ranks()
    return found.mesh.tolist(), gradient_group(mesh).size()


def test_ranks_along_the_sequence_shard_parameters_too(world4):
    assert world4(flattened, (("sequence", 2), ("zero", 2))) == [([0, 1, 2, 3], 4)] * 4
    assert world4(flattened, (("tensor", 2), ("sequence", 2))) == [([0, 2], 2), ([1, 3], 2)] * 2
