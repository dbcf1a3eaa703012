# Written by `make stubs` from the lazy exports of this module.
from drivetrain.core.errors import CallbackMethodNotImplementedError as CallbackMethodNotImplementedError
from drivetrain.core.errors import StopTrainingError as StopTrainingError
from drivetrain.train.callbacks.base import CallbackHandler as CallbackHandler
from drivetrain.train.callbacks.base import TrainerCallback as TrainerCallback
from drivetrain.train.callbacks.control import ConvertSyncBatchNormCallback as ConvertSyncBatchNormCallback
from drivetrain.train.callbacks.control import LimitBatchesCallback as LimitBatchesCallback
from drivetrain.train.callbacks.control import LimitEvalStepsCallback as LimitEvalStepsCallback
from drivetrain.train.callbacks.control import MoveModulesToDeviceCallback as MoveModulesToDeviceCallback
from drivetrain.train.callbacks.control import StepBasedEvaluationCallback as StepBasedEvaluationCallback
from drivetrain.train.callbacks.control import DEFAULT_CALLBACKS as DEFAULT_CALLBACKS
from drivetrain.train.callbacks.control import get_default_callbacks as get_default_callbacks
from drivetrain.train.callbacks.control import with_limit_from_environment as with_limit_from_environment
from drivetrain.train.callbacks.ema import ModelEmaCallback as ModelEmaCallback
from drivetrain.train.callbacks.monitors import LRMonitor as LRMonitor
from drivetrain.train.callbacks.monitors import LearningRateMonitor as LearningRateMonitor
from drivetrain.train.callbacks.monitors import MemoryMonitor as MemoryMonitor
from drivetrain.train.callbacks.monitors import SpeedMonitor as SpeedMonitor
from drivetrain.train.callbacks.monitors import ThroughputMonitor as ThroughputMonitor
from drivetrain.train.callbacks.progress import LogMetricsCallback as LogMetricsCallback
from drivetrain.train.callbacks.progress import PrintProgressCallback as PrintProgressCallback
from drivetrain.train.callbacks.progress import ProgressBarCallback as ProgressBarCallback
from drivetrain.train.callbacks.saving import SaveBestModelCallback as SaveBestModelCallback
from drivetrain.train.callbacks.saving import SaveTrainingStateCallback as SaveTrainingStateCallback
from drivetrain.train.callbacks.saving import WSDCheckpointCallback as WSDCheckpointCallback
from drivetrain.train.callbacks.stopping import EarlyStoppingCallback as EarlyStoppingCallback
from drivetrain.train.callbacks.stopping import LossSpike as LossSpike
from drivetrain.train.callbacks.stopping import TerminateOnNaNCallback as TerminateOnNaNCallback

__all__ = [
    "CallbackMethodNotImplementedError",
    "StopTrainingError",
    "CallbackHandler",
    "TrainerCallback",
    "ConvertSyncBatchNormCallback",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "MoveModulesToDeviceCallback",
    "StepBasedEvaluationCallback",
    "DEFAULT_CALLBACKS",
    "get_default_callbacks",
    "with_limit_from_environment",
    "ModelEmaCallback",
    "LRMonitor",
    "LearningRateMonitor",
    "MemoryMonitor",
    "SpeedMonitor",
    "ThroughputMonitor",
    "LogMetricsCallback",
    "PrintProgressCallback",
    "ProgressBarCallback",
    "SaveBestModelCallback",
    "SaveTrainingStateCallback",
    "WSDCheckpointCallback",
    "EarlyStoppingCallback",
    "LossSpike",
    "TerminateOnNaNCallback",
]
