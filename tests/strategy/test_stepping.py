"""Clipping and counting in the loop that people write around what `auto_accelerate` returns."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.strategy.dry_run import with_counted_loss
from drivetrain.strategy.task import CallModel, TrainingTask
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


def shifted_loss(batch, logits):
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORED)


def weighted_loss(batch, logits):
    weight = torch.linspace(0.2, 3.0, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), weight, ignore_index=IGNORED)


def sum_over_a_number(batch, logits):
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
    return losses / 64


def hidden_mean(batch, logits):
    """A masked mean that cannot be followed."""
    kept = batch["labels"] != IGNORED
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"].clamp(min=0), reduction="none")
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def loss_with_balance(batch, logits):
    """As of a mixture of experts: a mean over tokens, and a product of means over all of them."""
    share = logits.softmax(-1).mean((0, 1))
    return token_loss(batch, logits) + 5.0 * (share * share).sum()


def count_labels(batch):
    return (batch["labels"] != IGNORED).sum()


LOSSES = {loss.__name__: loss for loss in (token_loss, shifted_loss, sum_over_a_number, hidden_mean)}


def trained(plan, name, **kwargs):
    """Train two steps in float64; return this rank's parameters."""
    kwargs = {"count_items": count_labels if name == "hidden_mean" else None, **kwargs}
    kwargs.setdefault("ignore_dryrun_on_load_strategy", True)
    status, result, applied = auto_accelerate(
        make_model(tied=False).double(), torch.optim.SGD, masked_data(), LOSSES[name], None, "unpack_dict", SGD,
        dataloader_args={"batch_size": 8, "num_workers": 0, "shuffle": False}, load_strategy=plan, device="cpu", **kwargs,
    )  # fmt: skip
    assert status, applied.failure
    losses = []
    for batch in result.dataloader:
        batch = result.prepare_input(batch, result.context.device)
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        losses.append(loss.item())
        result.optim.step()
        result.optim.zero_grad()
    values = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in result.model.named_parameters()}
    clear_data_ranks()
    return losses, {name.removeprefix("module."): value.detach().clone() for name, value in values.items()}


def trained_with_all(plan):
    return {name: trained(plan, name) for name in LOSSES}


def plain_trained(name):
    model, rows = make_model(tied=False).double(), masked_data()
    optimizer, losses = torch.optim.SGD(model.parameters(), **SGD), []
    for first in (0, 8):
        batch = {name: torch.stack([row[name] for row in rows[first : first + 8]]) for name in rows[0]}
        loss = LOSSES[name](batch, model(**batch))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def check_trained(ours, name, compares_losses=False):
    losses, parameters = plain_trained(name)
    if compares_losses:
        assert ours[0] == pytest.approx(losses, rel=1e-6)
    assert ours[1]
    for key, value in ours[1].items():
        torch.testing.assert_close(value, parameters[key].detach(), rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_of_a_loss_that_is_not_a_mean_over_samples_are_weighted_by_its_items(name):
    check_trained(trained([("micro_batch", 2)], name), name)


@pytest.mark.parametrize(
    "plan",
    [
        ["parallel_mode"],
        ["fsdp", ("micro_batch", 2)],
        [("parallel_mode", [("tensor", 2)]), ("tensor_parallel", {"plan": TENSOR_PLAN}), ("micro_batch", 4)],
        [("parallel_mode", [("pipe", 2)]), ("pipeline_parallel", {"chunks": 2})],
        [("parallel_mode", [("pipe", 2)]), ("pipeline_parallel", {"chunks": 2}), ("micro_batch", 4)],
    ],
    ids=str,
)
def test_ranks_and_pipelines_weight_losses_by_their_items(world2, plan):
    has_whole_loss = "pipe" in str(plan) and "micro_batch" not in str(plan)
    for rank in world2(trained_with_all, plan):
        for name, found in rank.items():
            check_trained(found, name, compares_losses=has_whole_loss)


def test_a_pipeline_beside_data_ranks_weights_losses_by_their_items(world4):
    plan = [("parallel_mode", [("pipe", 2), ("data", 2)]), ("pipeline_parallel", {"chunks": 2})]
    for rank in world4(trained_with_all, plan):
        for name, found in rank.items():
            check_trained(found, name, compares_losses=True)


@pytest.mark.parametrize("name", ["token_loss", "sum_over_a_number"])
def test_the_check_of_a_plan_passes_for_losses_whose_items_are_known(name):
    check_trained(trained([("micro_batch", 2)], name, ignore_dryrun_on_load_strategy=False), name)


@pytest.mark.parametrize("size", [16, 11])
def test_gradients_over_tokens_are_complete_after_the_last_backward_of_a_window(size):
    rows, plain = masked_data(size), make_model(tied=False).double()
    _, result, _ = auto_accelerate(
        make_model(tied=False).double(), torch.optim.SGD, rows, token_loss, None, "unpack_dict", {"lr": 0.0},
        dataloader_args={"batch_size": 8, "num_workers": 0, "shuffle": False}, load_strategy=[("micro_batch", 2)], device="cpu",
        ignore_dryrun_on_load_strategy=True,
    )  # fmt: skip
    seen = []
    for batch in result.dataloader:
        result.loss_func(batch, result.model(**batch)).backward()
        if result.optim.window_closed:
            seen.append([p.grad.clone() for p in result.model.parameters()])
        result.optim.step()
        result.optim.zero_grad()
    assert len(seen) == 2
    for grads, part in zip(seen, (rows[:8], rows[8:])):
        plain.zero_grad()
        batch = default_collate(part)
        token_loss(batch, plain(**batch)).backward()
        for ours, parameter in zip(grads, plain.parameters()):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_loss_whose_parts_do_not_add_up_is_trained_with_a_warning_of_the_measured_error(monkeypatch):
    monkeypatch.setitem(LOSSES, "loss_with_balance", loss_with_balance)
    with pytest.warns(
        DrivetrainWarning, match=r"not exact: the loss is not a mean over samples.*relative error 0\.\d+"
    ):
        trained([("micro_batch", 2)], "loss_with_balance", ignore_dryrun_on_load_strategy=False)


def test_class_weights_and_factors_that_depend_on_the_batch_are_told_apart():
    task = TrainingTask(
        model=make_model(tied=False),
        call=CallModel("unpack_dict"),
        loss_func=weighted_loss,
        samples=default_collate(masked_data()),
    )
    assert with_counted_loss(task).items.kind == "unknown"  # the weights are made again in each call
    assert with_counted_loss(replace(task, loss_func=times_rows)).items.kind == "unknown"
    items = with_counted_loss(replace(task, loss_func=shifted_loss)).items
    assert (items.kind, items.path, items.cut) == ("labels", ("labels",), (1, None))
    on_meta = replace(task, model=make_model(tied=False).to("meta"), loss_func=shifted_loss)
    assert with_counted_loss(on_meta).items.same_as(items)


def times_rows(batch, logits):
    return token_loss(batch, logits) * len(logits)
