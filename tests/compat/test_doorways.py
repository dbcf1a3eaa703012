"""Public modules and their homes are one object under two names."""

import importlib
import subprocess
import sys
from unittest import mock

import pytest

HOMES = {
    "drivetrain.callbacks": "drivetrain.train.callbacks",
    "drivetrain.finetuning": "drivetrain.train.finetuning",
    "drivetrain.run_config": "drivetrain.train.settings",
    "drivetrain.schedulers": "drivetrain.train.schedulers",
    "drivetrain.surgery": "drivetrain.module.surgery",
    "drivetrain.tracking": "drivetrain.train.tracking",
    "drivetrain.trainer": "drivetrain.train.trainer",
    "drivetrain.utils": "drivetrain.compat.pytorch_accelerated_utils",
    "drivetrain.schedulers.cosine_scheduler": "drivetrain.train.schedulers.cosine_scheduler",
    "drivetrain.schedulers.scheduler_base": "drivetrain.train.schedulers.scheduler_base",
    "drivetrain.schedulers.wsd_scheduler": "drivetrain.train.schedulers.wsd_scheduler",
    "drivetrain.callbacks.base": "drivetrain.train.callbacks.base",
}


@pytest.mark.parametrize("public", HOMES)
def test_a_public_module_is_its_home(public):
    assert importlib.import_module(public) is importlib.import_module(HOMES[public])


def test_the_order_of_imports_does_not_matter():
    program = """
import sys
import drivetrain.schedulers.cosine_scheduler as public
import drivetrain.train.schedulers.cosine_scheduler as home
assert public is home
import drivetrain.train.tracking as home
from drivetrain import tracking as public
assert public is home
import drivetrain.utils
import drivetrain.train.utils as home
assert drivetrain.utils is home is sys.modules["drivetrain.compat.pytorch_accelerated_utils"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})


def test_a_patch_through_the_public_name_reaches_the_code_that_runs():
    from drivetrain.train.tracking import LossTracker

    tracker = LossTracker()
    tracker.update(1.0)
    with (
        mock.patch("drivetrain.tracking.reduce_means", side_effect=ValueError("patched")),
        pytest.raises(ValueError, match="patched"),
    ):
        tracker.average_over_ranks()


def test_a_patched_loader_is_the_one_the_trainer_uses():
    from tests.train.tasks import make_data, make_trainer, train

    loader = [(*make_data(8).tensors,)]
    with mock.patch("drivetrain.trainer.DataLoader", return_value=loader) as patched:
        trainer = make_trainer()
        train(trainer)
    assert patched.call_count == 1
    assert trainer.state.clock.batch == 1


def test_the_public_callbacks_are_all_there():
    from drivetrain import callbacks

    names = [
        "StopTrainingError", "CallbackMethodNotImplementedError", "TrainerCallback", "CallbackHandler",
        "LogMetricsCallback", "PrintProgressCallback", "MoveModulesToDeviceCallback", "ConvertSyncBatchNormCallback",
        "ProgressBarCallback", "TerminateOnNaNCallback", "SaveBestModelCallback", "EarlyStoppingCallback",
        "LimitBatchesCallback", "ModelEmaCallback", "StepBasedEvaluationCallback", "LimitEvalStepsCallback",
        "SaveTrainingStateCallback", "WSDCheckpointCallback", "ThroughputMonitor", "SpeedMonitor", "MemoryMonitor",
        "LRMonitor", "LearningRateMonitor", "get_default_callbacks",
    ]  # fmt: skip
    assert not [name for name in names if not hasattr(callbacks, name)]


def test_the_default_callbacks_come_with_or_without_the_bar():
    from drivetrain.callbacks import ProgressBarCallback, get_default_callbacks

    assert [cls.__name__ for cls in get_default_callbacks()] == [
        "MoveModulesToDeviceCallback", "TerminateOnNaNCallback", "PrintProgressCallback", "ProgressBarCallback",
        "LogMetricsCallback",
    ]  # fmt: skip
    assert ProgressBarCallback not in get_default_callbacks(progress_bar=False)
