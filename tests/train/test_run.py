"""What a Trainer holds, and what its run holds instead."""

import gc
import inspect
import weakref
from dataclasses import fields

import pytest

from drivetrain.core.errors import StopTrainingError
from drivetrain.train.callbacks import TrainerCallback
from drivetrain.train.run import Run
from drivetrain.train.settings import TrainSettings
from drivetrain.train.trainer import DEFAULT_CALLBACKS, Trainer
from tests.train.tasks import make_data, make_trainer, train

RESOLVED = {"eval_interval", "nonfinite"}
"""Their defaults come from the Trainer, or are given as a word."""


def test_a_trainer_keeps_its_arguments_its_hooks_and_its_run():
    trainer = make_trainer()
    train(trainer, make_data(16), eval_dataset=make_data(8))
    trainer.evaluate(make_data(8))
    assert len(vars(trainer)) <= 30, sorted(vars(trainer))
    assert isinstance(trainer.run, Run) and trainer.run.settings.num_epochs == trainer.run_config.num_epochs


def test_every_setting_is_an_argument_of_train_with_the_same_default():
    arguments = inspect.signature(Trainer.train).parameters
    for setting in fields(TrainSettings):
        assert setting.name in arguments
        if setting.name not in RESOLVED:
            assert arguments[setting.name].default == setting.default, setting.name


def test_names_of_pytorch_accelerated_read_and_write_the_run():
    trainer = make_trainer()
    train(trainer, make_data(16), eval_dataset=make_data(8))
    run = trainer.run
    assert trainer._train_dataloader is run.data.train and trainer._eval_dataloader is run.data.evaluation
    trainer._eval_dataloader, trainer._loss_tracker = [], "mine"
    assert run.data.evaluation == [] and run.measures.tracker == "mine"
    trainer._accelerator = runtime = object()
    assert trainer.runtime is runtime


def test_a_loss_tracker_of_the_users_own_is_used_by_all_runs():
    trainer = make_trainer()
    own = trainer._loss_tracker = type(trainer._loss_tracker)()
    train(trainer, make_data(16))
    assert trainer._loss_tracker is own and own.running_count == 16


def test_a_run_starts_without_the_stop_of_the_run_before():
    class Stop(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            raise StopTrainingError("enough")

    trainer = make_trainer(callbacks=[Stop()])
    train(trainer, make_data(16), num_epochs=3)
    first = trainer.run
    assert first.agreement.stop is not None and trainer.state.clock.epoch == 1
    trainer.callback_handler.clear_callbacks()
    train(trainer, make_data(16), num_epochs=3)
    assert trainer.run is not first and trainer.run.agreement.stop is None and trainer.state.clock.epoch == 3


@pytest.mark.parametrize("name", ["forward", "optimizer_step", "_clip_gradients"])
def test_a_method_is_overridden_by_a_subclass_or_on_the_instance(name):
    class Mine(Trainer):
        pass

    setattr(Mine, name, lambda self, *args, **kwargs: None)
    assert make_trainer(cls=Mine).overrides(name) and not make_trainer().overrides(name)
    trainer = make_trainer()
    setattr(trainer, name, lambda *args, **kwargs: None)
    assert trainer.overrides(name)


@pytest.mark.parametrize("callbacks", [(), DEFAULT_CALLBACKS])
def test_a_run_that_has_ended_keeps_no_loader_alive_through_a_cycle(callbacks):
    def run():
        trainer = make_trainer(callbacks=callbacks)
        train(trainer, make_data(16), eval_dataset=make_data(8))
        trainer.evaluate(make_data(8))
        return [
            weakref.ref(part) for part in (trainer, trainer.run, trainer.run.data.train, trainer.run.data.evaluation)
        ]

    run()  # what the first run of a process imports may leave tracebacks behind
    gc.collect()
    gc.disable()
    try:
        assert [part() for part in run()] == [None] * 4
    finally:
        gc.enable()
