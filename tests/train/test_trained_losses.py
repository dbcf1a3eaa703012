"""Parameters that are trained and not in the model: of the loss, of an algorithm, of a module that only a function refers to."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.optim import ConstantLr, OptimSet
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_model

DOUBLE = torch.float64


class Proxies(nn.Module):
    """A loss with a weight for each class, which every rank begins with its own values."""

    def __init__(self, rank=0):
        super().__init__()
        self.proxies = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=DOUBLE) + rank)
        self.register_buffer("shift", torch.full((3,), 0.1 + rank, dtype=DOUBLE))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs * self.proxies + self.shift * self.proxies**2, targets)


class Interrupted(Exception):
    pass


class Interrupts(TrainerCallback):
    def __init__(self, after):
        self._last = after

    def on_train_step_start(self, trainer, **kwargs):
        if trainer.state.clock.batch == self._last:
            raise Interrupted


def get_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def as_module(model, rank):
    loss = Proxies(rank)
    return loss, loss, torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)


def as_closure(model, rank):
    inner = Proxies(rank)
    inner.shift -= rank  # nothing shows the buffers of what a function refers to
    return (
        lambda outputs, targets: inner(outputs, targets),
        inner,
        torch.optim.SGD(
            [{"params": list(model.parameters())}, {"params": list(inner.parameters()), "lr": 0.02}], lr=0.1
        ),
    )


def as_units(model, rank):
    loss = Proxies(rank)
    conf = {"lr": 0.1}
    units = OptimSet(model=ConstantLr("SGD", conf, model), loss=ConstantLr("SGD", conf, loss))
    return loss, loss, units


def run(form, accumulation=1, micro=None, clip=None, rows=35, **kwargs):
    model = make_model(dtype=DOUBLE)
    loss, proxies, optimizer = form(model, get_rank())
    trainer = Trainer(model, loss, optimizer, callbacks=kwargs.pop("callbacks", ()), seed=3)
    with contextlib.suppress(Interrupted):
        trainer.train(
            make_data(rows, dtype=DOUBLE),
            num_epochs=2,
            global_batch_size=8,
            gradient_accumulation_steps=accumulation,
            microbatch_size=micro,
            gradient_clip_norm=clip,
            **kwargs,
        )
    return [p.detach().clone() for p in (*model.parameters(), *proxies.parameters())]


CASES = [(1, None, None), (3, None, None), (2, 2, 0.05)]


@pytest.mark.parametrize("form", [as_module, as_closure, as_units])
@pytest.mark.parametrize(("accumulation", "micro", "clip"), CASES)
def test_weights_outside_of_the_model_are_trained_as_on_one_process(world2, form, accumulation, micro, clip):
    expected = run(form, accumulation, micro, clip)
    assert not torch.allclose(expected[-1], torch.linspace(0.5, 1.5, 3, dtype=DOUBLE), atol=1e-3)
    for weights in world2(run, form, accumulation, micro, clip):
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def interrupt_and_resume(folder, form, after):
    kept = {"checkpoint_dir": folder, "checkpoint_every": "1ba", "accumulation": 3, "async_checkpoint": False}
    run(form, callbacks=[Interrupts(after)], **kept)
    return run(form, resume_from="auto", **kept)


def test_a_run_resumes_inside_a_window_with_the_gradients_of_weights_outside_of_the_model(tmp_path, world2):
    for form in (as_module, as_closure, as_units):
        expected = run(form, accumulation=3)
        for ours, theirs in zip(interrupt_and_resume(tmp_path / form.__name__, form, 4), expected, strict=True):
            assert torch.equal(ours, theirs)
    expected = world2(run, as_module, 3)
    for ours, theirs in zip(world2(interrupt_and_resume, tmp_path / "two", as_module, 4), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def run_planned(strategy):
    model = make_model(dtype=DOUBLE)
    loss, _, optimizer = as_module(model, get_rank())
    Trainer(model, loss, optimizer, callbacks=(), strategy=strategy).train(make_data(16, dtype=DOUBLE), num_epochs=1)


def test_a_plan_for_weights_outside_of_the_model_is_rejected_before_the_first_step():
    with pytest.raises(ConfigError, match="holds 1 parameters that are not in the model"):
        run_planned([("parallel_mode", {})])


def test_units_of_two_modules_with_one_loss_get_each_gradient_once():
    model = make_model(dtype=DOUBLE)
    loss = Proxies()
    conf = {"lr": 0.1}
    units = OptimSet(
        model=ConstantLr("SGD", conf, model, grad_clip=None), loss=ConstantLr("SGD", conf, loss, grad_clip=None)
    )
    x, y = make_data(dtype=DOUBLE).tensors
    value = loss(model(x), y)
    parameters = [*model.parameters(), *loss.parameters()]
    expected = torch.autograd.grad(value, parameters, retain_graph=True)
    units.backward(value)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters, expected, strict=True))
