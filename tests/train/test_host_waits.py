"""No setting, optimizer, callback or algorithm makes the host wait for the device inside a step. Runs also on tests/cuda_double."""

import pytest
import torch
from torch import nn

from drivetrain.optim import AdamWScheduleFree, ConstantLr, DecoupledAdamW, Lion, Lookahead, MuonHybrid, OptimSet
from drivetrain.train.callbacks import (
    DEFAULT_CALLBACKS,
    LossSpike,
    LRMonitor,
    MemoryMonitor,
    ModelEmaCallback,
    ProgressBarCallback,
    ThroughputMonitor,
    TrainerCallback,
)
from drivetrain.train.trainer import Trainer
from tests.algorithms.test_every_algorithm import EVERY
from tests.train.tasks import Lines, make_data, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WARM_UP = 4  # the first steps allocate, and find what the loss is a mean over


class NoWaiting(TrainerCallback):
    """Makes every wait for the device inside a step an error."""

    def batch_start(self, state, logger):
        if state.clock.batch >= WARM_UP:
            torch.cuda.set_sync_debug_mode("error")

    def batch_end(self, state, logger):
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer, **kwargs):
        torch.cuda.set_sync_debug_mode("default")


def run(model, loss, optimizer, data, callbacks=(), *, algorithms=(), precision=None, loggers=(), **settings):
    trainer = Trainer(
        model,
        loss,
        optimizer,
        callbacks=[*callbacks, NoWaiting()],
        algorithms=algorithms,
        precision=precision,
        loggers=loggers,
        device="cuda",
    )
    settings = {"num_epochs": 2, "per_device_batch_size": 8, **settings}
    try:
        return trainer.train(data, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "micro-batches": {"microbatch_size": 3},
    "clipped by norm": {"gradient_clip_norm": 0.1},
    "clipped by value": {"gradient_clip_value": 0.1},
    "every loss logged": {"log_every": 1},
    "evaluation inside epochs": {"eval_interval": "3ba"},
    "a limit": {"max_num_train_steps": 15},
    "a limit of batches": {"limit_train_batches": 6},
    "bfloat16": {"precision": "bf16"},
    **{f"nonfinite={action}": {"nonfinite": action} for action in ("skip", "stop", "rollback", "ignore")},
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_makes_a_step_wait(name, fused):
    model, data = make_model(dropout=0.1), make_data(80)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    history = run(model, nn.CrossEntropyLoss(), optimizer, data, loggers=[Lines()], eval_dataset=data, **SETTINGS[name])
    assert history.get_latest_metric("train_loss_epoch") > 0


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "fused SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "a rate on the device": lambda model: torch.optim.AdamW(
        model.cuda().parameters(), lr=torch.tensor(0.01, device="cuda"), capturable=True, foreach=True
    ),
    "AdamWScheduleFree": lambda model: AdamWScheduleFree(model.parameters()),
    "DecoupledAdamW": lambda model: DecoupledAdamW(model.parameters()),
    "Lion": lambda model: Lion(model.parameters(), lr=1e-3),
    "Lookahead": lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)),
    "MuonHybrid": lambda model: MuonHybrid(model, adam_match=()),
    "units": lambda model: OptimSet(
        first=ConstantLr("AdamW", {"lr": 0.01, "fused": True}, model, updated_modules="0"),
        last=ConstantLr("AdamW", {"lr": 0.01, "fused": True}, model, updated_modules="3"),
    ),
}


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_makes_a_step_wait(name, settings):
    model = make_model()
    run(model, nn.CrossEntropyLoss(), OPTIMIZERS[name](model), make_data(80), **settings)


CALLBACKS = {
    "default": lambda folder: list(DEFAULT_CALLBACKS),
    "monitors": lambda folder: [ThroughputMonitor(window_size=2), LRMonitor(interval=1), MemoryMonitor(interval=1)],
    "bar": lambda folder: [ProgressBarCallback(plain_interval=1e-6)],
    "spikes": lambda folder: [LossSpike(min_losses=4)],
    "average": lambda folder: [ModelEmaCallback(save_path=folder / "average.pt")],
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_no_callback_makes_a_step_wait(name, capsys, tmp_path):
    model, data = make_model(), make_data(80)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run(model, nn.CrossEntropyLoss(), optimizer, data, CALLBACKS[name](tmp_path), eval_dataset=data)


WAITING = {"TorchCompile": "compiles", "FP8Linear": "converts nothing", "SAM": "its second pass is tested at once"}
"""Algorithms that are not tried here."""


@pytest.mark.parametrize("name", [name for name in EVERY if name not in WAITING])
@pytest.mark.filterwarnings("ignore")
def test_no_algorithm_makes_a_step_wait(name):
    entry = EVERY[name]
    algorithm = entry.make()
    torch.manual_seed(0)
    model = entry.task.model()
    if name == "SelectiveBackprop":
        algorithm.input_key, algorithm.target_key = entry.task.keys
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings = {**dict(entry.settings), "per_device_batch_size": 2, "num_epochs": 3}
    run(
        model,
        entry.task.loss,
        optimizer,
        entry.task.data(),
        algorithms=[algorithm],
        precision=entry.precision,
        **settings,
    )
