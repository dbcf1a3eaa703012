# Written by `make stubs` from the lazy exports of this module.
from drivetrain.core.event import Event as Event
from drivetrain.core.plugin import Plugin as Plugin
from drivetrain.core.plugin import Algorithm as Algorithm
from drivetrain.core.plugin import Callback as Callback
from drivetrain.core.plugin import Logger as Logger
from drivetrain.core.plugin import NullLogger as NullLogger
from drivetrain.core.engine import AlgorithmPass as AlgorithmPass
from drivetrain.core.engine import Engine as Engine
from drivetrain.core.engine import Trace as Trace
from drivetrain.core.engine import Traces as Traces
from drivetrain.core.one_of import OneOf as OneOf
from drivetrain.core.time import Time as Time
from drivetrain.core.time import TimeUnit as TimeUnit
from drivetrain.core.time import Timestamp as Timestamp
from drivetrain.core.time import Clock as Clock
from drivetrain.core.time import ensure_time as ensure_time
from drivetrain.core.yaml import load_yaml as load_yaml
from drivetrain.core.errors import DrivetrainError as DrivetrainError
from drivetrain.core.errors import ConfigError as ConfigError
from drivetrain.core.errors import ConfigurationError as ConfigurationError
from drivetrain.core.errors import ConfigTypeError as ConfigTypeError
from drivetrain.core.errors import ParameterError as ParameterError
from drivetrain.core.errors import PluginConflictError as PluginConflictError
from drivetrain.core.errors import PluginOrderError as PluginOrderError
from drivetrain.core.errors import EngineError as EngineError
from drivetrain.core.errors import TimeUnitError as TimeUnitError
from drivetrain.core.errors import StateError as StateError
from drivetrain.core.errors import BatchOutputError as BatchOutputError
from drivetrain.core.errors import CheckpointError as CheckpointError
from drivetrain.core.errors import ResumeError as ResumeError
from drivetrain.core.errors import DeviceError as DeviceError
from drivetrain.core.errors import DistributedError as DistributedError
from drivetrain.core.errors import StopTrainingError as StopTrainingError
from drivetrain.core.errors import TrainingStopped as TrainingStopped
from drivetrain.core.errors import NonFiniteError as NonFiniteError
from drivetrain.core.errors import NonFiniteLossError as NonFiniteLossError
from drivetrain.core.errors import NonFiniteStateError as NonFiniteStateError
from drivetrain.core.errors import MissingExtra as MissingExtra
from drivetrain.core.errors import DrivetrainWarning as DrivetrainWarning
from drivetrain.core.errors import DrivetrainDeprecationWarning as DrivetrainDeprecationWarning
from drivetrain.context.state import State as State
from drivetrain.compat.composer_types import Batch as Batch
from drivetrain.compat.composer_types import DataSpec as DataSpec
from drivetrain.compat.composer_types import Evaluator as Evaluator
from drivetrain.compat.composer_types import JSON as JSON
from drivetrain.compat.composer_types import MemoryFormat as MemoryFormat
from drivetrain.compat.composer_types import Precision as Precision
from drivetrain.compat.composer_types import Serializable as Serializable
from drivetrain.compat.composer_types import TrainerMode as TrainerMode
from drivetrain.compat.composer_types import ensure_data_spec as ensure_data_spec
from drivetrain.compat.composer_types import ensure_evaluator as ensure_evaluator
from drivetrain.compat.composer_types import get_precision_context as get_precision_context

__all__ = [
    "Event",
    "Plugin",
    "Algorithm",
    "Callback",
    "Logger",
    "NullLogger",
    "AlgorithmPass",
    "Engine",
    "Trace",
    "Traces",
    "OneOf",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Clock",
    "ensure_time",
    "load_yaml",
    "DrivetrainError",
    "ConfigError",
    "ConfigurationError",
    "ConfigTypeError",
    "ParameterError",
    "PluginConflictError",
    "PluginOrderError",
    "EngineError",
    "TimeUnitError",
    "StateError",
    "BatchOutputError",
    "CheckpointError",
    "ResumeError",
    "DeviceError",
    "DistributedError",
    "StopTrainingError",
    "TrainingStopped",
    "NonFiniteError",
    "NonFiniteLossError",
    "NonFiniteStateError",
    "MissingExtra",
    "DrivetrainWarning",
    "DrivetrainDeprecationWarning",
]
