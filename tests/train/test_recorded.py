"""Models whose compiled code replays recorded CUDA graphs. A stand-in on the CPU writes each result into the memory of the last one."""

from functools import partial

import pytest
import torch
from torch import nn

from drivetrain.module.compilation import compile_loss, compile_module, replays_graphs
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model, train


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, memory):
        return memory.detach().copy_(value)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Recorded(nn.Module):
    """Returns its loss in one place of memory."""

    def __init__(self):
        super().__init__()
        self.inner, self.memory = make_model(), torch.zeros(())

    def get_compiler_config(self):
        return {"triton.cudagraphs": True}

    def forward(self, x, y):
        return {"loss": _Overwriting.apply(nn.functional.cross_entropy(self.inner(x), y), self.memory)}


class KeptLosses(TrainerCallback):
    def __init__(self):
        self.losses, self.numbers = [], []

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        self.losses.append(batch_output["loss"].detach())
        self.numbers.append(batch_output["loss"].item())

    on_eval_step_end = on_train_step_end


def test_losses_of_a_recorded_model_keep_their_values():
    model, kept = Recorded(), KeptLosses()
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[kept])
    train(trainer, make_data(24), eval_dataset=make_data(16))
    assert len(set(kept.numbers)) == 5 and [loss.item() for loss in kept.losses] == kept.numbers


def test_a_loss_function_may_pick_what_a_recorded_model_returns():
    model, kept = Recorded(), KeptLosses()
    model.forward = lambda x: Recorded.forward(model, x, torch.zeros(len(x), dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(Trainer(model, lambda outputs, y: outputs["loss"], optimizer, callbacks=[kept]), make_data(24))
    assert [loss.item() for loss in kept.losses] == kept.numbers


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_the_modes_that_record_are_known(mode):
    records = mode in ("reduce-overhead", "max-autotune")
    assert replays_graphs(torch.compile(make_model(), mode=mode)) is records
    assert replays_graphs(nn.Sequential(compile_module(nn.Linear(2, 2), mode=mode))) is records
    assert replays_graphs(torch.compile(nn.functional.mse_loss, mode=mode)) is records
    loss = partial(nn.functional.mse_loss)
    assert not replays_graphs(loss) and not replays_graphs(compile_loss(loss, mode=mode))  # it copies by itself
