# Written by `make stubs` from the lazy exports of this module.
from drivetrain.train.trainer import Trainer as Trainer
from drivetrain.train.auto import auto_accelerate as auto_accelerate
from drivetrain.train.auto import AutoAccelerateResult as AutoAccelerateResult
from drivetrain.data.loader import SmartDataLoader as SmartDataLoader
from drivetrain.optim.scheduler import OptimScheduler as OptimScheduler
from drivetrain.optim.optim_set import OptimSet as OptimSet
from drivetrain.record.recorder import Recorder as Recorder
from drivetrain.checkpoint.checkpointer import Checkpointer as Checkpointer
from drivetrain.checkpoint.store import save_checkpoint as save_checkpoint
from drivetrain.checkpoint.store import load_checkpoint as load_checkpoint
from drivetrain.train.verification import verify_resume as verify_resume
from drivetrain.core.plugin import Algorithm as Algorithm
from drivetrain.core.plugin import Callback as Callback
from drivetrain.core.event import Event as Event
from drivetrain.core.time import Time as Time
from drivetrain.core.one_of import OneOf as OneOf
from drivetrain.context.state import State as State
from drivetrain.context.context import Context as Context
from drivetrain.context.moving import move_to_device as move_to_device
from drivetrain.runtime.seeds import set_seed as set_seed
from drivetrain.runtime.seeds import derive_seed as derive_seed
from drivetrain.runtime.group import init_distributed as init_distributed
from drivetrain.runtime.ranks import is_distributed as is_distributed
from drivetrain.runtime.ranks import is_master as is_master
from drivetrain.runtime.ranks import get_rank as get_rank
from drivetrain.runtime.ranks import get_local_rank as get_local_rank
from drivetrain.runtime.ranks import get_num_processes as get_num_processes
from drivetrain.runtime.collectives import broadcast_from_master as broadcast_from_master
from drivetrain.runtime.collectives import distributed_barrier as distributed_barrier
from drivetrain.runtime.launch import notebook_launcher as notebook_launcher
from drivetrain.strategy import Strategy as Strategy
from drivetrain.strategy import DeviceSpec as DeviceSpec
from drivetrain.strategy import register_method as register_method
from drivetrain.strategy import register_replace_pair as register_replace_pair
from drivetrain.strategy import register_tp_plan as register_tp_plan
from drivetrain.module.blocks import find_blocks as find_blocks
from drivetrain.experiment.experiments import parameter as parameter
from drivetrain.experiment.experiments import param_group as param_group
from drivetrain.experiment.experiments import group as group
from drivetrain.experiment.running import new_seed as new_seed
from drivetrain.experiment.sweeps.sweeping import sweep as sweep
from drivetrain.experiment.sweeps.space import param_matrix as param_matrix
from drivetrain.core.errors import DrivetrainError as DrivetrainError
from drivetrain.core.errors import ConfigError as ConfigError
from drivetrain.core.errors import StopTrainingError as StopTrainingError
from drivetrain.core.errors import DrivetrainWarning as DrivetrainWarning
from drivetrain.core.errors import DrivetrainError as Error
from drivetrain.core.errors import ConfigurationError as ConfigurationError
from drivetrain.core.plugin import Plugin as Plugin
from drivetrain.core.engine import Engine as Engine
from drivetrain.core.engine import Trace as Trace
from drivetrain.core.engine import Traces as Traces
from drivetrain.core.time import TimeUnit as TimeUnit
from drivetrain.core.time import Timestamp as Timestamp
from drivetrain.core.time import ensure_time as ensure_time
from drivetrain.context.context import Context as TorchContext
from drivetrain.optim.units import NoamLr as NoamLr
from drivetrain.train.trainer import TrainerPlaceholderValues as TrainerPlaceholderValues
from drivetrain.train.trainer import TrainerWithTimmScheduler as TrainerWithTimmScheduler
from drivetrain.experiment.sweeps.sweeping import run_parameter_sweep as run_parameter_sweep
from drivetrain.compat.pystematic import torch as torch
from drivetrain import algorithms as algorithms
from drivetrain import auto as auto
from drivetrain import callbacks as callbacks
from drivetrain import checkpoint as checkpoint
from drivetrain import compat as compat
from drivetrain import context as context
from drivetrain import core as core
from drivetrain import data as data
from drivetrain.experiment.experiments import experiment as experiment
from drivetrain import finetuning as finetuning
from drivetrain import functional as functional
from drivetrain import module as module
from drivetrain import optim as optim
from drivetrain import record as record
from drivetrain import run_config as run_config
from drivetrain import runtime as runtime
from drivetrain import schedulers as schedulers
from drivetrain import strategy as strategy
from drivetrain import surgery as surgery
from drivetrain import tracking as tracking
from drivetrain import train as train
from drivetrain import trainer as trainer
from drivetrain import utils as utils

__version__: str

__all__ = [
    "Trainer",
    "auto_accelerate",
    "AutoAccelerateResult",
    "SmartDataLoader",
    "OptimScheduler",
    "OptimSet",
    "Recorder",
    "Checkpointer",
    "save_checkpoint",
    "load_checkpoint",
    "verify_resume",
    "Algorithm",
    "Callback",
    "Event",
    "Time",
    "OneOf",
    "State",
    "Context",
    "move_to_device",
    "set_seed",
    "derive_seed",
    "init_distributed",
    "is_distributed",
    "is_master",
    "get_rank",
    "get_local_rank",
    "get_num_processes",
    "broadcast_from_master",
    "distributed_barrier",
    "notebook_launcher",
    "Strategy",
    "DeviceSpec",
    "register_method",
    "register_replace_pair",
    "register_tp_plan",
    "find_blocks",
    "parameter",
    "param_group",
    "group",
    "new_seed",
    "sweep",
    "param_matrix",
    "DrivetrainError",
    "ConfigError",
    "StopTrainingError",
    "DrivetrainWarning",
    "Error",
    "ConfigurationError",
    "Plugin",
    "Engine",
    "Trace",
    "Traces",
    "TimeUnit",
    "Timestamp",
    "ensure_time",
    "TorchContext",
    "NoamLr",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "run_parameter_sweep",
]
