"""Names that users write and the Trainer does not have, and hooks that it could not call."""

import inspect
import re
import signal
import traceback
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Trainer
from drivetrain.callbacks import TrainerCallback
from drivetrain.compat.trainer_arguments import INSTEAD, INSTEAD_OF_METHOD
from drivetrain.core.errors import ConfigTypeError, DrivetrainWarning

DATA = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))


def make(kind=Trainer, **kwargs):
    model = nn.Linear(4, 2)
    return kind(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), **kwargs)


@pytest.mark.parametrize("name", ["__init__", "train", "evaluate", "predict"])
def test_checkers_and_help_see_the_arguments_and_no_catch_all(name):
    parameters = inspect.signature(getattr(Trainer, name)).parameters.values()
    assert len(parameters) > 5 and not any(p.kind is p.VAR_KEYWORD for p in parameters)
    assert inspect.signature(Trainer).parameters["model"].annotation is object


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_unknown_keyword_of_an_evaluation_names_arguments_of_that_method(method):
    with pytest.raises(TypeError, match=rf"Write instead: {method}\(per_device_batch_size=...\)\.$"):
        getattr(make(), method)(DATA, batch_size=4)
    with pytest.raises(TypeError, match="Did you mean 'collate_fn'"):
        getattr(make(), method)(DATA, collate=4)


def test_a_forgotten_call_of_the_constructor_is_named():
    class Forgetful(Trainer):
        def __init__(self, model):
            self.extra = model

    class Late(Trainer):
        def __init__(self, model):
            self.model = model
            super().__init__(model)

    with pytest.raises(AttributeError, match=r"Trainer.__init__ has not run. Call super\(\).__init__"):
        Forgetful(nn.Linear(2, 2)).train(DATA, num_epochs=1)
    with pytest.raises(AttributeError, match="first in Late.__init__"):
        Late(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["run", "state", "engine", "logbook"])
def test_an_attribute_or_method_in_place_of_a_part_of_the_trainer_is_named(name):
    trainer = make()
    setattr(trainer, name, {"project": "mine"})
    with pytest.raises(ConfigTypeError, match=rf"Trainer.{name} replaces a part .* such as my_{name}"):
        trainer.train(DATA, num_epochs=1)
    with pytest.raises(ConfigTypeError, match=rf"Own.{name} replaces a part of the Trainer"):
        make(type("Own", (Trainer,), {name: lambda self: self.train(DATA, num_epochs=1)})).evaluate(DATA)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("run_histroy", "Did you mean 'run_history'"),
        ("validate", r"evaluate\(dataset\)"),
        ("global_step", "state.timestamp.step"),
    ],
)
def test_a_missing_attribute_names_what_to_write_instead(name, hint):
    with pytest.raises(AttributeError, match=rf"'Trainer' object has no attribute '{name}'.*{hint}"):
        getattr(make(), name)
    assert not hasattr(make(), name)


def test_a_property_of_a_subclass_keeps_its_own_error():
    class Broken(Trainer):
        @property
        def size(self):
            return self.model.no_such_layer

    with pytest.raises(AttributeError, match="no attribute 'no_such_layer'"):
        make(Broken).size


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda self, batch, batch_idx: None, "calculate_train_batch_loss(batch, batch_idx) does not fit its call"),
        (lambda self: None, "self.calculate_train_batch_loss(batch): too many positional arguments"),
    ],
)
def test_a_hook_with_other_arguments_is_rejected_before_the_first_step(hook, message):
    kind = type("Mine", (Trainer,), {"calculate_train_batch_loss": hook})
    with pytest.raises(ConfigTypeError, match=re.escape(message)):
        make(kind).train(DATA, num_epochs=1)


async def later(self, *args):
    """Never runs."""


def in_parts(self, *args):
    yield


@pytest.mark.parametrize("hook", [later, in_parts])
def test_hooks_and_callbacks_that_a_call_would_only_begin_are_rejected(hook):
    with pytest.raises(ConfigTypeError, match="Mine.train_epoch_end.*has yield or async"):
        make(type("Mine", (Trainer,), {"train_epoch_end": hook})).train(DATA, num_epochs=1)
    for name in ("on_train_epoch_end", "batch_end"):
        with pytest.raises(ConfigTypeError, match=f"Mine.{name} has yield or async"):
            Trainer(nn.Linear(4, 2), callbacks=[type("Mine", (TrainerCallback,), {name: hook})()])


def test_a_hook_at_the_end_of_the_run_is_checked_before_it_begins():
    class Outputs(Trainer):
        def eval_epoch_end(self, outputs):
            raise AssertionError

    trainer = make(Outputs)
    with pytest.raises(ConfigTypeError, match="missing a required argument: 'outputs'"):
        trainer.train(DATA, num_epochs=1, eval_dataset=DATA)
    assert trainer.state.timestamp.batch == 0


def test_the_loss_hook_of_transformers_is_recognised():
    class FromTransformers(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            raise AssertionError

    with pytest.raises(ConfigTypeError, match="it gets outputs and targets. Write instead: calculate_train_batch_loss"):
        make(FromTransformers).train(DATA, num_epochs=1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("training_step", "calculate_train_batch_loss"),
        ("calculate_train_batch_los", "Did you mean"),
        ("on_train_epoch_end", "train_epoch_end"),
    ],
)
def test_a_method_that_looks_like_a_hook_and_is_never_called_warns(name, hint):
    kind = type("Mine", (Trainer,), {name: lambda self, *args: None})
    with pytest.warns(DrivetrainWarning, match=f"Mine.{name} is not a method that the Trainer calls.*{hint}"):
        make(kind).train(DATA, num_epochs=1)


def test_methods_that_the_subclass_calls_itself_do_not_warn():
    class Own(Trainer):
        def calculate_train_batch_loss(self, batch):
            return self.training_step(batch)

        def training_step(self, batch):
            return super().calculate_train_batch_loss(batch)

        def train_epoch(self):
            """A name of the user's own, not so close to a hook."""

        def create_scheduler(self, optimizer=None):
            return super().create_scheduler()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(Own).train(DATA, num_epochs=1)


def test_the_tables_name_nothing_that_the_trainer_has():
    """Their text is shown only for unknown names, but for hooks that have the name of another library's."""
    trainer = make()
    assert [name for name in INSTEAD_OF_METHOD if hasattr(trainer, name)] == ["compute_loss"]
    assert not INSTEAD.keys() & inspect.signature(Trainer.train).parameters.keys() - {
        "train_dataset",
        "eval_dataset",
        "max_grad_norm",
    }


def test_an_argument_of_the_other_call_is_answered_with_that_call():
    with pytest.raises(TypeError, match=r"Write instead: train\(fast_dev_run=...\)\."):
        make(fast_dev_run=True)
    with pytest.raises(TypeError, match=r"Write instead: Trainer\(precision=...\)\."):
        make().train(DATA, num_epochs=1, precision="bf16")


def modules_shown(error):
    """Return the modules in the traceback of an error, from the call in this file on."""
    return [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]


def test_a_traceback_shows_the_users_call_and_the_users_code_and_no_frame_between(monkeypatch):
    def loss(outputs, targets):
        return 1 / 0

    model = nn.Linear(4, 2)
    trainer = Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.train(DATA, num_epochs=1)
    assert modules_shown(caught.value) == [__name__, "drivetrain.train.signatures", __name__]
    monkeypatch.setenv("DRIVETRAIN_FULL_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.train(DATA, num_epochs=1)
    assert "drivetrain.train.loop" in modules_shown(caught.value)


def test_an_error_that_is_not_explained_keeps_its_whole_traceback(monkeypatch):
    monkeypatch.setattr("drivetrain.train.setup.prepare_run", torch.broadcast_tensors)
    with pytest.raises(TypeError) as caught:
        make().train(DATA, num_epochs=1)
    assert "drivetrain.train.trainer" in modules_shown(caught.value)


def test_ctrl_c_says_what_was_saved_and_shows_no_frames_of_the_loop(tmp_path):
    class Interrupt(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            signal.raise_signal(signal.SIGINT)

    model = nn.Linear(4, 2)
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Interrupt()]
    )
    with pytest.raises(
        KeyboardInterrupt, match=r"checkpoint is .*checkpoint-ep\d-ba\d; resume_from='auto' continues"
    ) as caught:
        trainer.train(DATA, num_epochs=2, checkpoint_dir=tmp_path)
    assert modules_shown(caught.value) == [__name__, "drivetrain.train.signatures", "drivetrain.train.resuming"]
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train(DATA, num_epochs=2, resume_from=tmp_path)
    assert not caught.value.args
