"""Tensor parallelism by plans that nobody wrote, alone and combined, follows the plain model."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from drivetrain.core.errors import ConflictError, MethodConfigError, StrategyError
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.tensor_parallel import parallelize
from drivetrain.module.vocabulary_parallel import wrap_loss_for_split_logits
from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.strategy.value import Strategy
from drivetrain.train.auto import auto_accelerate
from tests.strategy.tasks import TENSOR_PLAN, loss_func, make_data, make_model, plain_losses
from tests.strategy.test_semantics import check_against_plain, follow_all, in_parts

PIECES = ("tensor_parallel", {"sequence_parallel": True})
ON_TWO = {
    "tensor": [("parallel_mode", [("tensor", 2)]), "tensor_parallel"],
    "tensor, whole head": [("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"loss_parallel": False})],
    "tensor, given plan, split head": [
        ("parallel_mode", [("tensor", 2)]),
        ("tensor_parallel", {"plan": TENSOR_PLAN, "loss_parallel": True}),
        ("micro_batch", 4),
    ],
    "pieces": [("parallel_mode", [("tensor", 2)]), PIECES],
    "pieces, given plan, checkpoint": [
        ("parallel_mode", [("tensor", 2)]),
        ("tensor_parallel", {"plan": TENSOR_PLAN, "sequence_parallel": True}),
        "checkpoint",
    ],
}
ON_FOUR = {
    "tensor of four": [("parallel_mode", [("tensor", 4)]), "tensor_parallel", "checkpoint"],
    "tensor x data": [("parallel_mode", [("tensor", 2), ("data", 2)]), "tensor_parallel"],
    "tensor x fsdp": [("parallel_mode", [("tensor", 2), ("zero", 2)]), "tensor_parallel", "fsdp"],
    "tensor x sequence": [
        ("parallel_mode", [("tensor", 2), ("sequence", 2)]),
        "tensor_parallel",
        "sequence_parallel",
        "checkpoint",
    ],
    "pieces of four, checkpoint": [("parallel_mode", [("tensor", 4)]), PIECES, "checkpoint"],
    "pieces x fsdp": [("parallel_mode", [("tensor", 2), ("zero", 2)]), PIECES, "fsdp"],
    "pieces x data": [("parallel_mode", [("tensor", 2), ("data", 2)]), PIECES, ("micro_batch", 2)],
    "pieces x sequence": [("parallel_mode", [("tensor", 2), ("sequence", 2)]), PIECES, "sequence_parallel"],
}


@in_parts(ON_TWO, {"tensor, whole head", "tensor, given plan, split head", "pieces, given plan, checkpoint"})
def test_inferred_plans_follow_the_plain_model_on_two(world2, plans):
    check_against_plain(world2(follow_all, plans), plans)


@in_parts(ON_FOUR, {"tensor x sequence", "pieces x data"})
def test_inferred_plans_follow_the_plain_model_on_four(world4, plans):
    check_against_plain(world4(follow_all, plans), plans)


def normalised_model():
    model = make_model(tied=False)
    for block in model.blocks:
        block.up, block.down = weight_norm(block.up), weight_norm(block.down)
    return model


def train_once(model, optim_func, plan):
    """Return the loss and the parameters after one step, or the error."""
    batch = {"tokens": (rows := make_data(8).tokens)[:, :-1], "labels": rows[:, 1:]}
    if plan is None:
        optimizer = optim_func(model.parameters(), lr=0.1)
        loss_func(batch, model(**batch)).backward()
        optimizer.step()
        return dict(model.named_parameters())
    try:
        _, result, _ = auto_accelerate(
            model, optim_func, make_data(8), loss_func, None, "unpack_dict", {"lr": 0.1}, dataloader_args={"batch_size": 8},
            load_strategy=plan, device="cpu", ignore_dryrun_on_load_strategy=True,
        )  # fmt: skip
    except StrategyError as error:
        return f"{type(error).__name__}: {error}"
    for rows in result.dataloader:
        result.loss_func(rows, result.model(**rows)).backward()
        result.optim.step()
    values = {n: p.full_tensor() if is_dtensor(p) else p for n, p in result.model.named_parameters()}
    clear_data_ranks()
    return {name.removeprefix("module."): value.detach() for name, value in values.items()}


def odd_parameters():
    tensor = ("parallel_mode", [("tensor", 2)])
    given = [tensor, ("tensor_parallel", {"plan": TENSOR_PLAN})]
    return {
        "norm, given": train_once(normalised_model(), torch.optim.SGD, given),
        "norm, found": train_once(normalised_model(), torch.optim.SGD, [tensor, "tensor_parallel"]),
        "adafactor, fsdp": train_once(make_model(tied=False), torch.optim.Adafactor, ["fsdp"]),
        "adafactor, tensor": train_once(make_model(tied=False), torch.optim.Adafactor, given),
        "adafactor, zero1": train_once(make_model(tied=False), torch.optim.Adafactor, ["parallel_mode", "zero1"]),
    }


def test_weights_that_cannot_be_split_stay_whole_or_are_rejected_before_the_first_step(world2):
    normalised = train_once(normalised_model(), torch.optim.SGD, None)
    adafactor = train_once(make_model(tied=False), torch.optim.Adafactor, None)
    for found in world2(odd_parameters):
        assert re.match("MethodConfigError: .*blocks.0.down is computed from other parameters", found["norm, given"])
        assert re.match("UnsupportedMethodError: Adafactor and fsdp cannot", found["adafactor, fsdp"])
        assert re.match("UnsupportedMethodError: Adafactor and a tensor axis cannot", found["adafactor, tensor"])
        for ours, plain in ((found["norm, found"], normalised), (found["adafactor, zero1"], adafactor)):
            assert set(ours) == set(plain)
            for name, value in ours.items():
                torch.testing.assert_close(value, plain[name].detach(), rtol=1e-5, atol=1e-6)


def losses_of_split_logits():
    """Return how far losses and gradients of split logits are from those of whole ones."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, errors = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    rows = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = rows[:, 1:].clone()
    labels[0, :3] = -100

    def cases(logits):
        flat, target = logits.flatten(0, 1), labels.flatten()
        yield "mean", F.cross_entropy(flat.float(), target)
        yield "sum", F.cross_entropy(logits.view(-1, logits.size(-1)), target, reduction="sum")
        yield "none", F.cross_entropy(flat, target, reduction="none").square().mean()
        yield "shifted", F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].flatten())
        yield "smoothed", F.cross_entropy(flat, target, label_smoothing=0.1)
        yield "classes second", F.cross_entropy(logits.transpose(1, 2), labels)
        yield "joined", torch.cat([logits, 2 * logits]).square().mean()
        yield "another loss", (logits.softmax(-1) ** 2).sum() + F.cross_entropy(flat, target)

    plain, split = make_model(), make_model()
    parallelize(split, mesh, {"embedding": "rowwise", "head": "vocabulary"})
    assert split.head.weight is split.embedding.weight
    whole, parts = plain(rows[:, :-1]), split(rows[:, :-1])
    assert is_dtensor(parts) and not is_dtensor(split.eval()(rows[:, :-1]))
    expected = dict(cases(whole))
    found = wrap_loss_for_split_logits(lambda logits: dict(cases(logits)))(parts)
    for name, loss in expected.items():
        for model, value in ((plain, loss), (split, found[name])):
            model.zero_grad()
            value.backward(retain_graph=True)
        gradient = split.embedding.weight.grad.full_tensor() - plain.embedding.weight.grad
        errors[name] = abs(loss.item() - found[name].item()), gradient.abs().max().item()
    return errors


def check_split_logits(world):
    for errors in world(losses_of_split_logits):
        assert len(errors) == 8
        for name, (loss, gradient) in errors.items():
            assert loss < 1e-4 and gradient < 1e-4, (name, loss, gradient)


def test_a_loss_of_split_logits_is_that_of_whole_ones_whatever_it_does(world2):
    check_split_logits(world2)


@pytest.mark.slow
def test_a_loss_of_logits_split_in_four_is_that_of_whole_ones(world4):
    check_split_logits(world4)


def test_models_on_the_meta_device_are_initialised_layer_by_layer_as_the_whole_model_is(world2):
    from tests.strategy.test_pipeline import from_nothing

    expected, plain = plain_losses(tied=False, steps=3)[0], make_model(tied=False)
    for method in ("tensor_parallel", PIECES):
        for losses, first in world2(from_nothing, [("tensor", 2)], [method]):
            assert losses == pytest.approx(expected, rel=2e-4)
            assert all(torch.equal(first[name], value) for name, value in plain.named_parameters())


@pytest.mark.slow
def test_sixteen_bits_stay_close_to_the_plain_model(world4):
    grid = ("parallel_mode", [("tensor", 2), ("data", 2)])
    plans = {
        "tensor x data, half": [grid, "tensor_parallel", ("half", "bf16")],
        "pieces x data, amp": [grid, PIECES, ("amp_native", "bf16")],
    }
    check_against_plain(world4(follow_all, plans), plans, curve=2e-2, first=1e-2, parameters=None)


def test_wrong_settings_are_refused_by_name():
    def check(config, model=None, world=2):
        methods = [("parallel_mode", [("tensor", world)]), ("tensor_parallel", config)]
        Strategy(methods).validate(make_model() if model is None else model, device="cpu", world_size=world)

    check(None)
    check({"loss_parallel": True})
    check({"sequence_parallel": True})
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4), 2, enable_nested_tensor=False)
    with pytest.raises(MethodConfigError, match="cannot run layers.0"):
        check({"sequence_parallel": True}, encoder)
    for config, error, text in (
        ({"sequence_parallel": 1}, MethodConfigError, "True or False"),
        ({"loss_parallel": "yes"}, MethodConfigError, "'auto', True or False"),
        ({"los_parallel": True}, MethodConfigError, "loss_parallel"),
        ({"plan": {"head": "vocabulari"}}, MethodConfigError, "vocabulary"),
    ):
        with pytest.raises(error, match=text):
            check(config)
    with pytest.raises(MethodConfigError, match="no plan for Linear: there are no repeated blocks"):
        check(None, nn.Linear(4, 4))
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9)) for _ in range(2)])
    with pytest.raises(MethodConfigError, match="no plan for Sequential"):
        check(None, layers)
    even = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)])
    with pytest.raises(MethodConfigError, match="Sequential has none"):
        check({"plan": {"0.0": "colwise", "0.2": "rowwise"}, "loss_parallel": True}, even)
    plan = Strategy([("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"loss_parallel": False})])
    assert Strategy.from_json(plan.to_json()) == plan


def test_whole_blocks_are_not_computed_again_by_the_compiler_where_layers_are_split():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)

    def check(mode):
        mesh = ("parallel_mode", [("tensor", 2)])
        plan = Strategy([mesh, "tensor_parallel", ("checkpoint", {"mode": mode}), ("native_dynamo", "aot_eager")])
        plan.validate(model, device="cpu", world_size=2)

    with pytest.raises(ConflictError, match="mode='full', tensor_parallel and native_dynamo cannot .*mode='selective'"):
        check("full")
    check("selective")
    check("offload")
