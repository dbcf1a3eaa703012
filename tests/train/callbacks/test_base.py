"""The callback to derive from and the list a Trainer holds."""

import copy
import inspect
import pickle

import pytest

from drivetrain.core.event import OCCASIONAL_HOOKS, SPELLINGS
from drivetrain.train.callbacks import (
    CallbackHandler,
    EarlyStoppingCallback,
    ModelEmaCallback,
    PrintProgressCallback,
    TrainerCallback,
)
from tests.train.tasks import make_trainer, train


class Recorder(TrainerCallback):
    def __init__(self, log=None):
        self.log = [] if log is None else log

    def on_train_epoch_start(self, trainer, **kwargs):
        self.log.append(("epoch", sorted(kwargs)))

    def on_custom(self, trainer, value):
        self.log.append(("custom", value))


class Other(Recorder):
    pass


def test_a_class_becomes_an_instance():
    (callback,) = CallbackHandler([PrintProgressCallback])
    assert isinstance(callback, PrintProgressCallback)


def test_callbacks_keep_the_users_order():
    handler = CallbackHandler([Other(), Recorder()])
    handler.add_callback(PrintProgressCallback)
    assert handler.callback_list == ["Other", "Recorder", "PrintProgressCallback"]
    assert [type(one).__name__ for one in handler] == handler.callback_list


def test_a_second_callback_of_a_class_is_refused_and_the_list_stays_as_it_was():
    handler = CallbackHandler([Recorder()])
    with pytest.raises(ValueError, match=r"two callbacks of the class Recorder \(present: Recorder, Other\)"):
        handler.add_callbacks([Other(), Recorder()])
    assert handler.callback_list == ["Recorder"]


def test_a_class_may_allow_several_of_itself():
    class Several(Recorder):
        allow_multiple = True

    assert len(CallbackHandler([Several(), Several()])) == 2


def test_changes_are_announced_with_the_callbacks_in_force():
    seen = []
    handler = CallbackHandler([Recorder()], on_change=seen.append)
    handler.add_callback(Other())
    handler._enabled = False
    handler._enabled = True
    handler.callbacks = [Other()]
    handler.clear_callbacks()
    assert [[type(one).__name__ for one in callbacks] for callbacks in seen] == [
        ["Recorder"], ["Recorder", "Other"], [], ["Recorder", "Other"], ["Other"], [],
    ]  # fmt: skip


def test_call_event_skips_callbacks_without_the_method():
    recorder = Recorder()
    CallbackHandler([PrintProgressCallback(), recorder]).call_event("on_custom", None, value=3)
    assert recorder.log == [("custom", 3)]


def test_a_method_without_kwargs_receives_only_the_arguments_it_names():
    recorder = Recorder()
    CallbackHandler([recorder]).call_event("on_custom", None, value=3, unasked=4)
    assert recorder.log == [("custom", 3)]


def test_a_disabled_handler_calls_nobody():
    recorder = Recorder()
    handler = CallbackHandler([recorder])
    handler._enabled = False
    handler.call_event("on_custom", None, value=3)
    assert recorder.log == []
    assert handler.callbacks == (recorder,)


def test_older_spellings_of_an_event_are_called_by_its_present_name():
    log = []

    class Old(TrainerCallback):
        def on_train_run_begin(self, trainer, **kwargs):
            log.append("begin")

    CallbackHandler([Old()]).call_event("on_training_run_start", None)
    assert log == ["begin"]


def test_a_misspelt_attribute_in_a_callback_is_an_attribute_error_in_the_users_line():
    class Broken(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            self.mispelt.append(1)

    callback = Broken()
    assert not hasattr(callback, "x")
    with pytest.raises(AttributeError, match="mispelt") as caught:
        train(make_trainer(callbacks=[callback]))
    assert "self.mispelt.append(1)" in str(caught.traceback[-1].statement)


def test_every_event_of_a_trainer_callback_is_documented_on_the_base():
    names = {spelling.names[0] for spelling in SPELLINGS.values()} | OCCASIONAL_HOOKS
    for name in names:
        method = getattr(TrainerCallback, name)
        assert inspect.getdoc(method), name
        assert method.is_placeholder, name


def test_methods_that_do_nothing_cost_nothing():
    from drivetrain.core.event import Event

    class Quiet(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            pass

    engine = make_trainer(callbacks=[Quiet()]).engine
    assert [event for event in Event if engine.listens(event)] == [Event.EPOCH_END]


def test_callbacks_can_be_added_and_removed_between_runs():
    recorder = Recorder()
    trainer = make_trainer()
    trainer.callback_handler.add_callback(recorder)
    train(trainer)
    trainer.callback_handler.clear_callbacks()
    train(trainer)
    assert [name for name, _ in recorder.log] == ["epoch"]


def test_the_default_callbacks_only_do_what_they_declare():
    from drivetrain.train.callbacks import DEFAULT_CALLBACKS
    from tests.train.tasks import make_data

    train(make_trainer(callbacks=DEFAULT_CALLBACKS, strict=True), eval_dataset=make_data(8))


def test_a_copy_of_a_handler_is_independent_of_the_trainer():
    trainer = make_trainer(callbacks=[EarlyStoppingCallback(), ModelEmaCallback()])
    copied = copy.deepcopy(trainer.callback_handler)
    copied.clear_callbacks()
    assert len(trainer.callback_handler) == len(list(trainer.state.callbacks)) == 2
    assert pickle.loads(pickle.dumps(trainer.callback_handler)).callback_list == trainer.callback_handler.callback_list
