"""Models that train, sleep, die, overflow and lie, for trials in other processes: everything here can be imported there."""

import os
import signal
import time

import torch
from torch import nn

from drivetrain.strategy.method import Method, Stage
from drivetrain.strategy.task import CallModel, TrainingTask


class Net(nn.Module):
    """A small network; `hurts` is called in each training forward with the number of the call."""

    def __init__(self, hurts=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 1)
        self.hurts, self.calls = hurts, 0

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        if self.hurts is not None and self.training:
            self.calls += 1
            y = self.hurts(self.calls, y)
        return y


class _OnlyInTraining(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_training):
        ctx.is_training = is_training
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not ctx.is_training:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        return grad, None


class Recurrent(nn.Module):
    """Has no gradients in evaluation mode, as recurrent layers of cuDNN; in training it has dropout and statistics of the batch."""

    def __init__(self, noise=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
        self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.head, self.noise = nn.Linear(8, 1), noise

    def forward(self, batch):
        x = _OnlyInTraining.apply(self.layers(batch["x"]), self.training)
        x = self.recurrent(x[:, None])[0][:, 0]
        return self.head(x + self.noise * torch.randn_like(x) if self.noise else x)


def rank():
    return int(os.environ.get("RANK", "0"))


def sleeps(call, y):
    time.sleep(60)
    return y


def sleeps_on_rank_1(call, y):
    if rank() == 1:
        time.sleep(60)
    return y


def dawdles_on_rank_1(call, y):
    """Take longer on rank 1, and with micro-batches of two samples end there."""
    if rank() == 1:
        if len(y) == 2:
            os._exit(7)
        time.sleep(0.1)
    return y


def exits(call, y):
    os._exit(7)


def exits_on_rank_1(call, y):
    if rank() == 1:
        os._exit(7)
    return y


def is_killed(call, y):
    os.kill(os.getpid(), signal.SIGKILL)


def overflows(call, y):
    return y * float("nan")


def raises(call, y):
    raise ValueError("the model has a bad day")


def runs_out(call, y):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")


def runs_out_on_rank_1(call, y):
    if rank() == 1:
        runs_out(call, y)
    return y


def hoards(call, y):
    """Ask the device for 16 TiB."""
    torch.empty(1 << 44, dtype=torch.uint8, device=y.device)
    return y


def build():
    return Net()


def build_randomly():
    """A model that is another one each time, unless somebody seeds."""
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 1))
    return Wrapped(model)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return self.inner(batch["x"])


def loss_func(batch, output):
    return nn.functional.mse_loss(output, batch["y"])


def samples(count=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True)}


def make_task(hurts=None, **changes):
    values = {
        "model": Net(hurts), "call": CallModel(), "loss_func": loss_func, "optim_func": torch.optim.AdamW,
        "optim_args": {"lr": 0.1}, "samples": samples(), "global_batch_size": 16,
    }  # fmt: skip
    return TrainingTask(**{**values, **changes})


class Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


class Liar(Method):
    """A method that computes something else."""

    name, group, stage = "liar", "test", Stage.MODULE

    def apply(self, ctx, config):
        ctx.model.head = Doubled(ctx.model.head)
