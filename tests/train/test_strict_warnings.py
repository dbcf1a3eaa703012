"""`Trainer(strict=True)` and our own warnings, and values that are logged when an epoch ends."""

import warnings

import pytest
import torch

from drivetrain.algorithms import BlurPool
from drivetrain.callbacks import TrainerCallback
from drivetrain.core.errors import DrivetrainWarning, NoEffectWarning, StopTrainingError
from tests.train.tasks import make_data, make_model, make_trainer, train


def test_strict_makes_our_warnings_errors_at_construction_before_and_during_training():
    with pytest.raises(NoEffectWarning):
        make_trainer(algorithms=[BlurPool()], strict=True)

    class WarnsLate(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            warnings.warn("hardly as it was meant", DrivetrainWarning, stacklevel=1)

    with pytest.raises(DrivetrainWarning, match="hardly"):
        train(make_trainer(callbacks=[WarnsLate()], strict=True))
    with pytest.warns(DrivetrainWarning, match="hardly"):
        train(make_trainer(callbacks=[WarnsLate()]))
    x, y = make_data().tensors
    with pytest.raises(DrivetrainWarning, match="the batch has 3 entries"):
        train(make_trainer(strict=True), torch.utils.data.TensorDataset(x, y, y))


def test_strict_leaves_the_warnings_of_others_and_the_filters_alone():
    class Other(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            warnings.warn("of somebody else", UserWarning, stacklevel=1)

    filters = list(warnings.filters)
    with pytest.warns(UserWarning, match="somebody else"):
        train(make_trainer(make_model(), callbacks=[Other()], strict=True))
    assert warnings.filters == filters


def test_values_logged_when_an_epoch_ends_belong_to_that_epoch():
    class Logs(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            trainer.log("step", 1.0)

        def on_train_epoch_end(self, trainer, **kwargs):
            trainer.log("end", float(trainer.run_history.current_epoch))

        def on_eval_epoch_end(self, trainer, **kwargs):
            trainer.log("done", 10.0 * trainer.run_history.current_epoch)

    trainer = make_trainer(callbacks=[Logs()])
    history = train(trainer, num_epochs=3, eval_dataset=make_data(8))
    assert list(history.get_metric_values("train_end_epoch")) == [1.0, 2.0, 3.0]
    assert list(history.get_metric_values("eval_done_epoch")) == [10.0, 20.0, 30.0]
    assert list(history.get_metric_values("train_step_epoch")) == [1.0, 1.0, 1.0]
    assert not any("end" in name for name in history.get_metric_names() if name.startswith("eval"))


def test_waiting_is_allowed_again_after_a_stop_inside_a_step(monkeypatch):
    class Stops(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            modes.append("error")  # as the check of a CUDA device has set it for the step
            if trainer.state.clock.batch == 1:
                raise StopTrainingError("inside a step")

    modes = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    train(make_trainer(callbacks=[Stops()], strict=True))
    assert modes == ["error", "default", "error", "default"]
