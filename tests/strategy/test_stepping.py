"""Clipping and counting in the loop that people write around what `auto_accelerate` returns."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.train.auto import auto_accelerate
from tests.strategy.tasks import TENSOR_PLAN, loss_func, make_data, make_model

MAX_NORM = 0.5
SGD = {"lr": 0.5, "momentum": 0.9}
ON_TWO = {
    "fsdp": ["fsdp", ("micro_batch", 2)],
    "tensor": [("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"plan": TENSOR_PLAN})],
    "pipe": [("parallel_mode", [("pipe", 2)]), ("pipeline_parallel", {"chunks": 2})],
    "offload": ["parallel_mode", "cpu_offload"],
}


def start(plan, **kwargs):
    status, result, applied = auto_accelerate(
        make_model(tied=False), torch.optim.SGD, make_data(16), kwargs.pop("loss_func", loss_func), None, "unpack_dict",
        SGD, dataloader_args={"batch_size": 8, "num_workers": 0}, load_strategy=plan, device="cpu",
        ignore_dryrun_on_load_strategy=True, **kwargs,
    )  # fmt: skip
    assert status, applied.failure
    return result


def clipped(plan):
    """Train two steps with clipping; return the norms and this rank's parameters."""
    result, norms = start(plan), []
    for batch in result.dataloader:
        batch = result.prepare_input(batch, result.context.device)
        result.loss_func(batch, result.model(**batch)).backward()
        norm = result.clip_grad_norm_(MAX_NORM)
        if norm is not None:
            norms.append(norm.item())
        result.optim.step()
        result.optim.zero_grad()
    values = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in result.model.named_parameters()}
    clear_data_ranks()
    return norms, {name.removeprefix("module."): value.detach().clone() for name, value in values.items()}


def clipped_by_all(plans):
    return {name: clipped(plan) for name, plan in plans.items()}


def plain_clipped():
    model = make_model(tied=False)
    optimizer, norms = torch.optim.SGD(model.parameters(), **SGD), []
    result = start([])
    for batch in result.dataloader:
        loss_func(batch, model(**batch)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(model.named_parameters())


def check(found, rel=1e-5):
    expected, theirs = plain_clipped()
    norms, ours = found
    assert min(expected) > MAX_NORM and norms == pytest.approx(expected, rel=rel)
    assert ours
    for name, value in ours.items():
        torch.testing.assert_close(value.float(), theirs[name].detach(), rtol=rel, atol=rel)


@pytest.mark.parametrize("plan", [["cpu_offload"], [("micro_batch", 2)], ["cpu_offload", ("micro_batch", 4)]], ids=str)
def test_clipping_sees_the_gradients_that_are_stepped_with(plan):
    check(clipped(plan))


def test_clipping_sees_the_float32_copies_of_a_model_of_16_bits():
    check(clipped([("half", "bf16")]), rel=3e-2)


def test_clipping_uses_the_norm_of_the_whole_model_on_two_ranks(world2):
    for rank in world2(clipped_by_all, ON_TWO):
        for found in rank.values():
            check(found)


@pytest.mark.parametrize("plan", [["cpu_offload"], [("half", "bf16")]], ids=str)
def test_the_spelling_that_would_clip_nothing_raises(plan):
    result = start(plan)
    with pytest.raises(ConfigError, match=r"Call optim.clip_grad_norm_\(max_norm\)"):
        result.optim.unscale_()


IGNORED = -100


def masked_data(size=16):
    """Rows of very different numbers of labels."""
    rows = [dict(row) for row in make_data(size)]
    for index, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][: (index * 3) % 8] = IGNORED
    return rows


def token_loss(batch, logits):
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def count_labels(batch):
    return (batch["labels"] != IGNORED).sum()


def counted(plan):
    status, result, applied = auto_accelerate(
        make_model(tied=False), torch.optim.SGD, masked_data(), token_loss, None, "unpack_dict", SGD,
        dataloader_args={"batch_size": 8, "num_workers": 0, "shuffle": False}, load_strategy=plan, device="cpu",
        ignore_dryrun_on_load_strategy=True, count_items=count_labels,
    )  # fmt: skip
    assert status, applied.failure
    for batch in result.dataloader:
        batch = result.prepare_input(batch, result.context.device)
        result.loss_func(batch, result.model(**batch)).backward()
        result.optim.step()
        result.optim.zero_grad()
    values = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in result.model.named_parameters()}
    clear_data_ranks()
    return {name.removeprefix("module."): value.detach().clone() for name, value in values.items()}


def plain_counted():
    model, rows = make_model(tied=False), masked_data()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for first in (0, 8):
        batch = {name: torch.stack([row[name] for row in rows[first : first + 8]]) for name in rows[0]}
        token_loss(batch, model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def check_counted(ours):
    for name, value in plain_counted().items():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-5, atol=1e-6)


def test_micro_batches_of_losses_over_tokens_are_weighted_by_their_items():
    check_counted(counted([("micro_batch", 2)]))


def test_ranks_of_losses_over_tokens_are_weighted_by_their_items(world2):
    for ours in world2(counted, ["parallel_mode"]):
        check_counted(ours)
    for ours in world2(counted, ["parallel_mode", ("micro_batch", 2)]):
        check_counted(ours)
