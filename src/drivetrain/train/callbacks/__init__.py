"""Callbacks: plugins that observe the loop, and a few that act on it."""

from drivetrain.core.errors import CallbackMethodNotImplementedError, StopTrainingError
from drivetrain.train.callbacks.base import CallbackHandler, TrainerCallback
from drivetrain.train.callbacks.control import (
    ConvertSyncBatchNormCallback,
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    MoveModulesToDeviceCallback,
    StepBasedEvaluationCallback,
    with_limit_from_environment,
)
from drivetrain.train.callbacks.ema import ModelEmaCallback
from drivetrain.train.callbacks.monitors import (
    LearningRateMonitor,
    LRMonitor,
    MemoryMonitor,
    SpeedMonitor,
    ThroughputMonitor,
)
from drivetrain.train.callbacks.progress import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from drivetrain.train.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback, WSDCheckpointCallback
from drivetrain.train.callbacks.stopping import EarlyStoppingCallback, LossSpike, TerminateOnNaNCallback

__all__ = [
    "DEFAULT_CALLBACKS",
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "ConvertSyncBatchNormCallback",
    "EarlyStoppingCallback",
    "LRMonitor",
    "LearningRateMonitor",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "LogMetricsCallback",
    "LossSpike",
    "MemoryMonitor",
    "ModelEmaCallback",
    "MoveModulesToDeviceCallback",
    "PrintProgressCallback",
    "ProgressBarCallback",
    "SaveBestModelCallback",
    "SaveTrainingStateCallback",
    "SpeedMonitor",
    "StepBasedEvaluationCallback",
    "StopTrainingError",
    "TerminateOnNaNCallback",
    "ThroughputMonitor",
    "TrainerCallback",
    "WSDCheckpointCallback",
    "get_default_callbacks",
    "with_limit_from_environment",
]


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """Return the default callbacks of a Trainer, with or without the progress bar."""
    bar = (ProgressBarCallback,) if progress_bar else ()
    return (MoveModulesToDeviceCallback, TerminateOnNaNCallback, PrintProgressCallback, *bar, LogMetricsCallback)


DEFAULT_CALLBACKS = get_default_callbacks()
