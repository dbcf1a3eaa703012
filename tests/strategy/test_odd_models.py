"""Plans on models with unusual parts: buffers, several types of numbers, complex, empty, frozen and shared parameters.

The reference is a hand-written loop on one process over the same global batches, under autocast where the plan has it.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from drivetrain.auto import auto_accelerate
from drivetrain.module.wrapping import named_clean_parameters
from drivetrain.runtime.ranks import clear_data_ranks
from tests.strategy.test_semantics import TENSOR, mean_losses  # noqa: F401

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


def follow(kind, plan, settings=SETTINGS):
    clear_data_ranks()
    torch.manual_seed(0)
    status, result, applied = auto_accelerate(
        kind(), torch.optim.SGD, Samples(kind.dtype), loss_func, None, "unpack_dict", dict(settings), load_strategy=plan,
        dataloader_args={"batch_size": 8, "num_workers": 0}, device="cpu", ignore_dryrun_on_load_strategy=True,
    )  # fmt: skip
    assert status, applied.failure
    losses = []
    for batch in result.dataloader:
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
            torch.testing.assert_close(value, weights[name], rtol=0, atol=parameters, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("precision", [AMP, HALF], ids=["amp", "half"])
def test_sharded_models_in_sixteen_bits_use_float32_tensors_that_are_not_parameters(world2, precision):
    check(world2(follow, Buffer, ["fsdp", precision]), Buffer, torch.bfloat16, loss=5e-3, parameters=1e-2)
