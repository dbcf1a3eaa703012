# Written by `make stubs` from the lazy exports of this module.
from drivetrain.experiment.experiments import experiment as experiment
from drivetrain.experiment.experiments import group as group
from drivetrain.experiment.experiments import parameter as parameter
from drivetrain.experiment.experiments import param_group as param_group
from drivetrain.experiment.experiments import Experiment as Experiment
from drivetrain.experiment.experiments import ExperimentGroup as ExperimentGroup
from drivetrain.experiment.parameters import Parameter as Parameter
from drivetrain.experiment.parameters import ParameterGroup as ParameterGroup
from drivetrain.experiment.signature import Param as Param
from drivetrain.core.secret import Secret as Secret
from drivetrain.experiment.proxies import current_experiment as current_experiment
from drivetrain.experiment.proxies import params as params
from drivetrain.experiment.proxies import output_dir as output_dir
from drivetrain.experiment.proxies import params_file as params_file
from drivetrain.experiment.proxies import random_gen as random_gen
from drivetrain.experiment.proxies import subprocess_counter as subprocess_counter
from drivetrain.experiment.running import new_seed as new_seed
from drivetrain.experiment.running import launch_subprocess as launch_subprocess
from drivetrain.experiment.running import is_subprocess as is_subprocess
from drivetrain.experiment.running import local_rank as local_rank
from drivetrain.experiment.records import RunRecord as RunRecord
from drivetrain.experiment.records import read_run as read_run
from drivetrain.experiment.records import find_runs as find_runs
from drivetrain.experiment.run_folder import add_to_manifest as add_to_manifest
from drivetrain.experiment.sweeps.space import Choice as Choice
from drivetrain.experiment.sweeps.space import Uniform as Uniform
from drivetrain.experiment.sweeps.space import LogUniform as LogUniform
from drivetrain.experiment.sweeps.space import IntRange as IntRange
from drivetrain.experiment.sweeps.space import param_matrix as param_matrix
from drivetrain.experiment.sweeps.sweeping import sweep as sweep
from drivetrain.experiment.sweeps.sweeping import run_parameter_sweep as run_parameter_sweep
from drivetrain.experiment.sweeps.trial import report as report
from drivetrain.experiment.sweeps.trial import Trial as Trial
from drivetrain.experiment.sweeps.trial import TrialPruned as TrialPruned
from drivetrain.experiment.sweeps.result import SweepResult as SweepResult
from drivetrain.experiment.sweeps.result import read_sweep as read_sweep
from drivetrain.experiment.sweeps.samplers import Sampler as Sampler
from drivetrain.experiment.sweeps.samplers import GridSampler as GridSampler
from drivetrain.experiment.sweeps.samplers import RandomSampler as RandomSampler
from drivetrain.experiment.sweeps.samplers import OptunaConfig as OptunaConfig
from drivetrain.experiment.sweeps.samplers import OptunaSampler as OptunaSampler
from drivetrain.experiment.sweeps.executors import Executor as Executor
from drivetrain.experiment.sweeps.executors import InlineExecutor as InlineExecutor
from drivetrain.experiment.sweeps.pool import PoolExecutor as PoolExecutor
from drivetrain.experiment.sweeps.cluster import RayConfig as RayConfig
from drivetrain.experiment.sweeps.cluster import RayExecutor as RayExecutor
from drivetrain.experiment.sweeps.cluster import SubmititConfig as SubmititConfig
from drivetrain.experiment.sweeps.cluster import SubmititExecutor as SubmititExecutor
from drivetrain.compat.pystematic import torch as torch
from drivetrain.compat import pystematic as core
from drivetrain.compat import pystematic as parametric

__all__ = [
    "experiment",
    "group",
    "parameter",
    "param_group",
    "Experiment",
    "ExperimentGroup",
    "Parameter",
    "ParameterGroup",
    "Param",
    "Secret",
    "current_experiment",
    "params",
    "output_dir",
    "params_file",
    "random_gen",
    "subprocess_counter",
    "new_seed",
    "launch_subprocess",
    "is_subprocess",
    "local_rank",
    "RunRecord",
    "read_run",
    "find_runs",
    "add_to_manifest",
    "Choice",
    "Uniform",
    "LogUniform",
    "IntRange",
    "param_matrix",
    "sweep",
    "run_parameter_sweep",
    "report",
    "Trial",
    "TrialPruned",
    "SweepResult",
    "read_sweep",
    "Sampler",
    "GridSampler",
    "RandomSampler",
    "OptunaConfig",
    "OptunaSampler",
    "Executor",
    "InlineExecutor",
    "PoolExecutor",
    "RayConfig",
    "RayExecutor",
    "SubmititConfig",
    "SubmititExecutor",
]
