"""A trainer that runs where its own `accelerate.Accelerator` says."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.compat.accelerate_runtime import AccelerateRuntime
from drivetrain.core.errors import ConfigError
from drivetrain.train.accelerator import TrainerRuntime, as_runtime
from drivetrain.train.loop import choose_calls
from drivetrain.train.trainer import Trainer
from tests.train.tasks import make_data, make_trainer, train, weights


class Accelerator(SimpleNamespace):
    """As much of accelerate's as a runtime asks for."""

    __module__ = "accelerate.accelerator"

    def __init__(self, **changes):
        super().__init__(
            device=torch.device("cpu"), mixed_precision="no", scaler=None, distributed_type="NO",
            gradient_accumulation_steps=1, ddp_handler=None, sync_gradients=True, tracked=[],
        )  # fmt: skip
        self.__dict__.update(changes)

    def log(self, values):
        self.tracked.append(values)


def trainer_with(accelerator, **kwargs):
    class Mine(Trainer):
        def _create_accelerator(self):
            return accelerator

    return make_trainer(cls=Mine, **kwargs)


def test_a_trainer_runs_on_an_accelerator_of_the_users_own():
    accelerator = Accelerator()
    trainer, plain = trainer_with(accelerator), make_trainer()
    train(trainer, eval_dataset=make_data(8))
    train(plain, eval_dataset=make_data(8))
    assert all(map(torch.equal, weights(trainer.model), weights(plain.model)))
    calls = choose_calls(trainer)
    assert (calls.backward, calls.step) == (torch.Tensor.backward, trainer.run.stepper.step)  # and the loop is as short
    trainer._accelerator.log({"loss": 1.0})
    assert accelerator.tracked == [{"loss": 1.0}] and trainer._accelerator.sync_gradients
    assert trainer.runtime is trainer._accelerator and isinstance(trainer.runtime, TrainerRuntime)


def test_precision_comes_from_the_accelerator_unless_the_trainer_has_one():
    accelerator = Accelerator(mixed_precision="bf16")
    assert trainer_with(accelerator)._accelerator.precision.name == "bf16"
    assert trainer_with(accelerator, precision="no")._accelerator.precision.name == "no"


def test_settings_of_ddp_come_from_the_accelerator(monkeypatch):
    asked = {}
    monkeypatch.setattr(TrainerRuntime, "prepare_model", lambda self, model, **kwargs: asked.update(kwargs))
    handler = SimpleNamespace(to_kwargs=lambda: {"find_unused_parameters": True, "static_graph": True})
    AccelerateRuntime(Accelerator(ddp_handler=handler)).prepare_model(None, static_graph=False)
    assert asked == {"find_unused_parameters": True, "static_graph": False}


def test_settings_that_would_have_no_effect_are_refused():
    with pytest.raises(ConfigError, match="FSDP.*strategy"):
        as_runtime(Accelerator(distributed_type="FSDP"))
    with pytest.raises(ConfigError, match=r"train\(gradient_accumulation_steps=4\)"):
        as_runtime(Accelerator(gradient_accumulation_steps=4))


def test_an_accelerator_made_while_preparing_is_taken_over():
    class Mine(Trainer):
        def _prepare_model_optimizer_and_dataloaders(self):
            super()._prepare_model_optimizer_and_dataloaders()
            self._accelerator = Accelerator()

    trainer = make_trainer(cls=Mine)
    train(trainer)
    assert isinstance(trainer._accelerator, AccelerateRuntime) and trainer.runtime is trainer._accelerator


def test_a_real_accelerator_works():
    accelerate = pytest.importorskip("accelerate")
    trainer = trainer_with(accelerate.Accelerator(cpu=True))
    train(trainer, eval_dataset=make_data(8))
    plain = make_trainer()
    train(plain, eval_dataset=make_data(8))
    assert all(map(torch.equal, weights(trainer.model), weights(plain.model)))


@pytest.mark.parametrize("data", [make_data(8), DataLoader(make_data(8), batch_size=4)])
def test_loaders_say_on_which_device_they_deliver(data):
    trainer = make_trainer()
    train(trainer, eval_dataset=data, limit_eval_batches=1)
    assert trainer._eval_dataloader.device == trainer._train_dataloader.device == torch.device(trainer.device)
    assert TrainerRuntime("cpu").prepare(DataLoader(make_data(8))).device == torch.device("cpu")
