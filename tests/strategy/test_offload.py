"""Optimizer state in host memory: the same training, saved and resumed as if it were not."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.auto import auto_accelerate
from drivetrain.core.errors import ConflictError, MethodConfigError
from drivetrain.module.optimizers import host_copy, with_master_weights
from drivetrain.strategy import Strategy
from drivetrain.train.trainer import Trainer
from tests.strategy.tasks import ADAM, loss_func, make_data, make_model, pairs_data, plain_losses
from tests.strategy.test_semantics import check_against_plain, follow, follow_all

OFFLOAD = ["cpu_offload", "fused_optimizer"]


def accelerated(plan, **kwargs):
    status, result, applied = auto_accelerate(
        make_model(), torch.optim.AdamW, make_data(32), loss_func, None, "unpack_dict", ADAM, load_strategy=plan,
        dataloader_args={"batch_size": 8, "num_workers": 0}, device="cpu", ignore_dryrun_on_load_strategy=True, **kwargs,
    )  # fmt: skip
    assert status, applied.failure
    return result


def epoch(result):
    losses = []
    for batch in result.dataloader:
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
    return losses


def weights(result):
    return [p.detach().clone() for p in result.model.parameters()]


def test_one_process_follows_the_plain_curve_to_the_bit():
    losses, parameters = follow(["cpu_offload"])
    expected, theirs = plain_losses()
    assert [total / weight for total, weight in losses] == pytest.approx(expected, rel=1e-6)
    for name, value in theirs.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [["cpu_offload"], [("half", "bf16")]])
def test_the_state_of_copies_has_the_names_of_the_parameters(plan):
    """A pipeline takes its part of a state by them."""
    groups = accelerated(plan).context.state_dict()["optimizer"]["param_groups"]
    assert (
        groups[0]["param_names"] == accelerated([]).context.state_dict()["optimizer"]["param_groups"][0]["param_names"]
    )


@pytest.mark.parametrize("other", [OFFLOAD, ["fused_optimizer"]])
def test_a_state_goes_on_with_and_without_offloading(other):
    whole = accelerated(OFFLOAD)
    epoch(whole)
    state = copy.deepcopy(whole.context.state_dict())
    assert not any("master" in entries for entries in state["optimizer"]["state"].values())
    expected, theirs = epoch(whole), weights(whole)
    resumed = accelerated(other)
    resumed.context.load_state_dict(state)
    assert epoch(resumed) == expected
    assert all(map(torch.equal, weights(resumed), theirs))


def test_half_keeps_its_float32_copies_on_the_host():
    plain, offloaded = accelerated([("half", "bf16")]), accelerated([("half", "bf16"), "cpu_offload"])
    assert epoch(plain) == epoch(offloaded) and all(map(torch.equal, weights(plain), weights(offloaded)))


def test_gradients_land_in_buffers_that_stay():
    parameter = nn.Parameter(torch.ones(3))
    master = nn.Parameter(host_copy(parameter, torch.float32, pin_memory=False))
    optimizer = with_master_weights(torch.optim.SGD, {id(parameter): master}, [parameter], {"lr": 0.1})
    buffer = optimizer._buffer(master)
    assert optimizer._buffer(master) is buffer and buffer.shape == master.shape and not buffer.requires_grad
    parameter.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert (
        parameter.grad is None
        and torch.equal(parameter, torch.full((3,), 1 - 0.1 * 2.0))
        and torch.equal(parameter, master)
    )


def test_weights_that_somebody_else_writes_are_trained_on():
    for dtype, precise in ((torch.float32, 1 / 3), (torch.bfloat16, 1 / 3)):
        parameter = nn.Parameter(torch.full((2,), precise).to(dtype))
        master = nn.Parameter(torch.full((2,), precise))
        optimizer = with_master_weights(torch.optim.SGD, {id(parameter): master}, [parameter], {"lr": 0.5})
        with torch.no_grad():
            parameter[0] = 4.0
        parameter.grad = torch.zeros(2, dtype=dtype)
        optimizer.step()
        assert master.tolist() == [4.0, torch.tensor(precise).item()]  # what was not written keeps its precision


def test_the_optimizer_state_is_where_the_copies_are():
    result = accelerated(["cpu_offload"])
    epoch(result)
    own = {id(p) for p in result.model.parameters()}
    held = [p for group in result.optim.param_groups for p in group["params"]]
    assert not any(id(p) in own for p in held) and all(p.device.type == "cpu" for p in held)


def in_float32(output, target):
    """In torch 2.11 the gradient of nn.MSELoss needs one dtype for both."""
    return nn.functional.mse_loss(output.float(), target.float())


def make_trainer(strategy, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return Trainer(model, in_float32, optimizer, callbacks=(), strategy=strategy, seed=1, **kwargs)


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_norm": 0.1}, {"gradient_accumulation_steps": 2}])
def test_the_trainer_clips_and_accumulates_the_gradients_of_copies(settings):
    found = []
    for strategy in (None, ["cpu_offload"]):
        trainer = make_trainer(strategy)
        trainer.train(pairs_data(), num_epochs=2, per_device_batch_size=8, **settings)
        found.append([p.detach().clone() for p in trainer.get_model().parameters()])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_trainer_clips_half_precision_too():
    found = []
    for clip in (None, 1e-9):
        trainer = make_trainer([("half", "bf16")])
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)
        trainer.train(pairs_data(), num_epochs=1, per_device_batch_size=8, gradient_clip_norm=clip)
        found.append(sum((a.float() - b).abs().sum().item() for a, b in zip(trainer.get_model().parameters(), before)))
    assert found[1] < 0.05 * found[0]  # only the rounding to 16 bits is left


def test_float16_gradients_of_copies_are_unscaled():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
    master = nn.Parameter(torch.ones(4))
    optimizer = with_master_weights(torch.optim.SGD, {id(parameter): master}, [parameter], {"lr": 1.0})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for gradient, expected in ((0.25, 0.75), (float("inf"), 0.75), (0.25, 0.5)):
        scaler.scale((parameter.float() * gradient).sum()).backward()
        optimizer.collect_gradients()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert master.tolist() == [expected] * 4 and parameter.tolist() == [expected] * 4


DISTRIBUTED = {
    "ddp": ["parallel_mode", "cpu_offload"],
    "fsdp": ["fsdp", "cpu_offload"],
    "zero2, fused": ["zero2", "cpu_offload", "fused_optimizer"],
}


def test_two_processes_follow_the_plain_curve(world2):
    check_against_plain(world2(follow_all, DISTRIBUTED, timeout=240), DISTRIBUTED)


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ([("cpu_offload", "parms")], MethodConfigError, "'params', 'optimizer' or both"),
        ([("cpu_offload", {"pin_memory": 1})], MethodConfigError, "True or False"),
        ([("cpu_offload", "params")], ConflictError, "needs sharding"),
        (["fsdp", ("cpu_offload", "optimizer")], ConflictError, "together"),
        (["zero1", "cpu_offload"], ConflictError, "zero1"),
        (["compile", "cuda_graphs", "cpu_offload"], ConflictError, "cuda_graphs"),
    ],
)
def test_what_cannot_work_is_refused(plan, error, message):
    with pytest.raises(error, match=message):
        Strategy(plan).validate(make_model(), device="cpu", world_size=2)
