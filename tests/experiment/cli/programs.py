"""Programs with experiments that the command runs in tests."""

SMALL = '''
"""A small experiment with everything a run can keep."""
import torch
import drivetrain as dt
from drivetrain.experiment import experiment
from drivetrain.record.recorder import Recorder


@experiment
def small(epochs: int = 2, lr: float = 0.1, fail: bool = False, drifting: bool = False):
    """Train a linear model."""
    ctx = dt.Context(epoch=0)
    ctx.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    ctx.optimizer = torch.optim.AdamW(ctx.model.parameters(), lr=lr)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    ctx.loader = dt.SmartDataLoader(data, batch_size=8, shuffle=True, loading_bar=False)
    ctx.recorder = Recorder(tensorboard=False)
    ctx.autotransform()
    keeper, forgotten = dt.Checkpointer(ctx, every="1ep"), 0.0
    with keeper:
        while ctx.epoch < epochs:
            for a, b in ctx.loader:
                forgotten += 1.0
                loss = (ctx.model(a) - b).square().mean() * (forgotten if drifting else 1.0)
                ctx.optimizer.zero_grad()
                loss.backward()
                ctx.optimizer.step()
                ctx.recorder.scalar("train/loss", loss)
                ctx.recorder.step()
                keeper.step()
            ctx.epoch += 1
            if fail and ctx.epoch == 2:
                raise RuntimeError("it broke")
    return {"loss": ctx.recorder.last("train/loss")}
'''

SEVERAL = '''
from drivetrain.experiment import experiment, group


@experiment
def first(x: int = 1):
    return x


@experiment
def my_second(x: int = 2):
    return x


@group
def family():
    """A group."""


@family.experiment
def member(y: int = 3):
    print("member runs with", y)
    return y
'''

FACTORY = """
import torch
import drivetrain as dt


def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
    data = torch.utils.data.TensorDataset(torch.zeros(32, 4), torch.zeros(32, dtype=torch.long))
    optimizer = torch.optim.AdamW(model.parameters())
    return dt.Trainer(model, torch.nn.CrossEntropyLoss(), optimizer, callbacks=()), data, {"per_device_batch_size": 4}


def wrong():
    return 3
"""

QUICK = '''
"""An experiment that only prints and returns a number."""
from drivetrain.experiment import experiment


@experiment
def quick(x: float = 1.0, fail: bool = False):
    print("a trial speaks:", x, flush=True)
    if fail:
        raise ValueError("asked to fail")
    return (x - 0.25) ** 2
'''

STOPPABLE = '''
"""An experiment that is interrupted at its second value, as by Ctrl-C, until a file exists."""
from pathlib import Path

from drivetrain.experiment import experiment


@experiment
def stoppable(x: float = 1.0, api_key: str = "", marker: str = ""):
    if x == 2.0 and not Path(marker).exists():
        raise KeyboardInterrupt
    return {"accuracy": x}
'''

TWINS = """
from drivetrain.experiment import group, parameter


@group
def one():
    pass


@group
def other():
    pass


@parameter("data", required=True)
@one.experiment(name="train")
def train_first(params):
    print("the first one has", params["data"])


@parameter("data", required=True)
@other.experiment(name="train")
def train_second(params):
    print("the second one has", params["data"])
    raise RuntimeError("stopped")
"""
