"""Plans on models with unusual parts: buffers, several types of numbers, complex, empty, frozen and shared parameters.

The reference is a hand-written loop on one process over the same global batches, under autocast where the plan has it.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from drivetrain.auto import auto_accelerate
from drivetrain.core.errors import UnsupportedMethodError
from drivetrain.module.wrapping import named_clean_parameters
from drivetrain.optim import SAMOptimizer
from drivetrain.runtime.ranks import clear_data_ranks
from drivetrain.train.trainer import Trainer
from tests.strategy.test_semantics import mean_losses

AMP, HALF = ("amp_native", "bf16"), ("half", "bf16")


class Samples(Dataset):
    def __init__(self, dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(24, 8, generator=generator), torch.randn(24, 8, generator=generator)
        self.x, self.y = self.x.to(dtype), self.y.to(dtype)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


def loss_func(batch, out):
    return (out - batch["y"]).square().mean()


class Odd(nn.Module):
    """Linear layers; a subclass changes what is between them."""

    dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

    def middle(self, h):
        return h

    def forward(self, x, y=None):
        h = self.middle(self.first(x))
        for block in self.blocks:
            h = block(h)
        return self.last(h)


class Buffer(Odd):
    """A float32 buffer and a float32 tensor made by the forward meet parameters that are gathered in 16 bits."""

    def __init__(self):
        super().__init__()
        self.register_buffer("position", torch.randn(8))

    def middle(self, h):
        return h + self.position + torch.linspace(0, 1, 8)


class NormedBuffer(Buffer):
    def __init__(self):
        super().__init__()
        self.norm, self.group = nn.LayerNorm(8), nn.GroupNorm(2, 8)

    def middle(self, h):
        return self.group(self.norm(super().middle(h)) + self.position)


class TwoTypes(Odd):
    """A block in float64 between layers in float32, and a float64 parameter that no module of its own holds."""

    def __init__(self):
        super().__init__()
        self.blocks[1].double()
        self.wide = nn.Linear(8, 8).double()
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x, y=None):
        h = self.blocks[0](self.first(x))
        h = self.blocks[1](self.wide(h.double()) * self.scale)
        return self.last(h.float())


class Complex(Odd):
    """A complex parameter between real layers, directly in the root."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def middle(self, h):
        return torch.fft.irfft(torch.fft.rfft(h.float()) * self.filter, n=8)


class Empty(Odd):
    """Parameters without elements or dimensions, one that is used twice, a frozen one, and a module with no parameters."""

    def __init__(self):
        super().__init__()
        self.nothing, self.scale = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.ones(()))
        self.blocks[1][0].weight.requires_grad_(False)
        self.blocks[1][0].bias.requires_grad_(False)
        self.quiet = nn.Identity()

    def middle(self, h):
        return self.quiet(torch.tanh(self.first(h))) * self.scale + self.nothing.sum()


class Wide(Odd):
    """A whole model in float64."""

    dtype = torch.float64

    def __init__(self):
        super().__init__()
        self.double()


class Tied(Odd):
    """One weight in three layers, of which two are blocks."""

    def __init__(self):
        super().__init__()
        self.blocks[0][0].weight = self.blocks[1][0].weight = self.last.weight


ODD = (Buffer, NormedBuffer, TwoTypes, Complex, Empty, Wide, Tied)


def plain(kind, settings, dtype=None, steps=3):
    torch.manual_seed(0)
    model, data = kind(), Samples(kind.dtype)
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    losses = []
    for start in range(0, steps * 8, 8):
        batch = {"x": data.x[start : start + 8], "y": data.y[start : start + 8]}
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            loss = loss_func(batch, model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


SETTINGS = {"lr": 0.5, "momentum": 0.9}


def follow(kind, plan, settings=SETTINGS, optimizer=torch.optim.SGD):
    clear_data_ranks()
    torch.manual_seed(0)
    status, result, applied = auto_accelerate(
        kind(), optimizer, Samples(kind.dtype), loss_func, None, "unpack_dict", dict(settings), load_strategy=plan,
        dataloader_args={"batch_size": 8, "num_workers": 0}, device="cpu", ignore_dryrun_on_load_strategy=True,
    )  # fmt: skip
    assert status, applied.failure
    losses = []
    for batch in result.dataloader:
        batch = result.prepare_input(batch, "cpu")
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append((loss.item() * result.dataloader.batch_info.size, result.dataloader.batch_info.size))
    served = {id(parameter): copied for parameter, copied in getattr(result.optim.inner, "_served", ())}
    found = {name: served.get(id(p), p) for name, p in named_clean_parameters(result.model)}
    found = {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in found.items()}
    clear_data_ranks()
    return losses, found


def check(results, kind, dtype=None, *, loss=1e-5, parameters=1e-5):
    expected, weights = plain(kind, SETTINGS, dtype)
    assert mean_losses([losses for losses, _ in results]) == pytest.approx(expected, rel=loss)
    for _, found in results:
        for name, value in found.items():
            assert value.dtype == weights[name].dtype, name
            assert list(found) == list(weights)
            torch.testing.assert_close(value, weights[name], rtol=0, atol=parameters, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("precision", [AMP, HALF], ids=["amp", "half"])
@pytest.mark.parametrize("kind", [Buffer, NormedBuffer])
def test_sharded_models_in_sixteen_bits_use_float32_tensors_that_are_not_parameters(world2, kind, precision):
    check(world2(follow, kind, ["fsdp", precision]), kind, torch.bfloat16, loss=1e-2, parameters=2e-2)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "plan", [["fsdp"], ["zero2", "checkpoint"], ["zero1"], ["cpu_offload"], ["parallel_mode"]], ids=str
)
def test_odd_models_train_like_the_plain_model(world2, kind, plan):
    check(world2(follow, kind, plan), kind)


@pytest.mark.parametrize("kind", [TwoTypes, Complex, Wide])
def test_autocast_over_shards_leaves_wide_numbers_alone(world2, kind):
    tolerance = {} if kind is Wide else {"loss": 1e-2, "parameters": 2e-2}
    check(world2(follow, kind, ["fsdp", AMP]), kind, torch.bfloat16, **tolerance)


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        ([], torch.optim.LBFGS),
        ([HALF], torch.optim.LBFGS),
        ([], lambda parameters, lr: torch.optim.LBFGS(parameters, lr)),
    ],
)
def test_optimizers_that_need_a_closure_are_rejected_by_name(plan, optimizer):
    with pytest.raises(UnsupportedMethodError, match="^LBFGS evaluates the loss itself"):
        follow(Odd, plan, {"lr": 0.1}, optimizer)


@pytest.mark.parametrize("plan", [[], [HALF]])
@pytest.mark.parametrize("interval", [1, 3])
def test_optimizers_that_repeat_an_update_are_rejected_before_the_first_step(plan, interval):
    def make(parameters, lr):
        return SAMOptimizer(torch.optim.SGD(parameters, lr), interval=interval)

    with pytest.raises(
        UnsupportedMethodError, match=r"^SAMOptimizer evaluates the loss itself.*algorithms=\[SAM\(\)\]"
    ):
        follow(Odd, plan, {"lr": 0.1}, make)


class HandlesBatches(Trainer):
    """With a hook of its own no plan is tried first."""

    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch)


def train_by_lbfgs(plan, kind=HandlesBatches):
    torch.manual_seed(0)
    model, data = nn.Linear(8, 8), Samples()
    trainer = kind(
        model, nn.MSELoss(), torch.optim.LBFGS(model.parameters(), 0.5, 3), callbacks=(), strategy=plan, seed=1
    )
    try:
        trainer.train(TensorDataset(data.x, data.y), num_epochs=1, global_batch_size=8)
    except UnsupportedMethodError as error:
        return str(error)
    finally:
        clear_data_ranks()
    return model.weight.detach()


def test_the_trainer_rejects_plans_with_shards_or_copies_for_optimizers_that_need_a_closure(world2):
    for plan in (["fsdp"], ["zero1"], ["cpu_offload"]):
        assert all("LBFGS evaluates the loss itself" in found for found in world2(train_by_lbfgs, plan))
    expected = train_by_lbfgs(None)
    for found in world2(train_by_lbfgs, ["parallel_mode"]):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert "LBFGS evaluates the loss itself" in train_by_lbfgs(["fused_optimizer"], Trainer)


@pytest.mark.parametrize("plan", [[HALF], [HALF, "cpu_offload"]], ids=str)
def test_the_copies_of_float64_parameters_are_float64(plan):
    check([follow(Wide, plan)], Wide, loss=1e-2, parameters=2e-2)


def test_shards_of_float64_parameters_are_gathered_in_sixteen_bits_on_request(world2):
    check(world2(follow, Wide, ["fsdp", HALF]), Wide, loss=1e-2, parameters=2e-2)


def started(plan):
    torch.manual_seed(0)
    status, result, applied = auto_accelerate(
        Odd(), torch.optim.AdamW, Samples(), loss_func, None, "unpack_dict", {"lr": 0.01}, load_strategy=plan,
        dataloader_args={"batch_size": 8, "num_workers": 0}, device="cpu", ignore_dryrun_on_load_strategy=True,
    )  # fmt: skip
    assert status, applied.failure
    return result


@pytest.mark.parametrize("plan", [[HALF], [HALF, "cpu_offload"]], ids=str)
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_copies_start_from_the_float32_values_of_a_checkpoint(plan, with_optimizer):
    saved = started([])
    with torch.no_grad():
        for parameter in saved.model.parameters():
            parameter.add_(torch.rand_like(parameter))
    state = copy.deepcopy(saved.context.state_dict())
    if not with_optimizer:
        state = {"model": state["model"]}
    result = started(plan)
    result.context.load_state_dict(state, strict=with_optimizer)
    for _ in range(2):
        for (parameter, master), expected in zip(result.optim.inner._served, saved.model.parameters()):
            assert torch.equal(master, expected) and torch.equal(parameter, expected.bfloat16())
        result.optim.step()  # without gradients nothing moves
    own = copy.deepcopy(result.context.state_dict())
    other = started(plan)
    other.context.load_state_dict(own)
    for (_, master), (_, expected) in zip(other.optim.inner._served, result.optim.inner._served):
        assert torch.equal(master, expected)
