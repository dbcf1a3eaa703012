# Written by `make stubs` from the lazy exports of this module.
from drivetrain.runtime.collectives import agree_any as agree_any
from drivetrain.runtime.collectives import all_gather_values as all_gather_values
from drivetrain.runtime.collectives import broadcast_from_master as broadcast_from_master
from drivetrain.runtime.collectives import control_group as control_group
from drivetrain.runtime.collectives import distributed_barrier as distributed_barrier
from drivetrain.runtime.collectives import gather_rows as gather_rows
from drivetrain.runtime.collectives import start_agree_any as start_agree_any
from drivetrain.runtime.device import choose_device as choose_device
from drivetrain.runtime.device import device_memory as device_memory
from drivetrain.runtime.device import usable_cpus as usable_cpus
from drivetrain.runtime.environment import LaunchedWorld as LaunchedWorld
from drivetrain.runtime.environment import in_launched_process as in_launched_process
from drivetrain.runtime.environment import launched_world as launched_world
from drivetrain.runtime.group import destroy_group as destroy_group
from drivetrain.runtime.group import init_distributed as init_distributed
from drivetrain.runtime.launch import WorkerFailed as WorkerFailed
from drivetrain.runtime.launch import notebook_launcher as notebook_launcher
from drivetrain.runtime.ranks import clear_data_ranks as clear_data_ranks
from drivetrain.runtime.ranks import data_group as data_group
from drivetrain.runtime.ranks import data_rank as data_rank
from drivetrain.runtime.ranks import get_local_rank as get_local_rank
from drivetrain.runtime.ranks import get_num_processes as get_num_processes
from drivetrain.runtime.ranks import get_rank as get_rank
from drivetrain.runtime.ranks import is_distributed as is_distributed
from drivetrain.runtime.ranks import is_master as is_master
from drivetrain.runtime.ranks import num_data_ranks as num_data_ranks
from drivetrain.runtime.ranks import set_data_ranks as set_data_ranks
from drivetrain.runtime.run import ExperimentRun as ExperimentRun
from drivetrain.runtime.run import Run as Run
from drivetrain.runtime.run import current_run as current_run
from drivetrain.runtime.run import set_current_run as set_current_run
from drivetrain.runtime.seeds import capture_rng as capture_rng
from drivetrain.runtime.seeds import derive_seed as derive_seed
from drivetrain.runtime.seeds import reseed_rank as reseed_rank
from drivetrain.runtime.seeds import restore_rng as restore_rng
from drivetrain.runtime.seeds import seed_worker as seed_worker
from drivetrain.runtime.seeds import set_deterministic as set_deterministic
from drivetrain.runtime.seeds import set_seed as set_seed
from drivetrain.runtime.signals import StopSignals as StopSignals

__all__ = [
    "agree_any",
    "all_gather_values",
    "broadcast_from_master",
    "control_group",
    "distributed_barrier",
    "gather_rows",
    "start_agree_any",
    "choose_device",
    "device_memory",
    "usable_cpus",
    "LaunchedWorld",
    "in_launched_process",
    "launched_world",
    "destroy_group",
    "init_distributed",
    "WorkerFailed",
    "notebook_launcher",
    "clear_data_ranks",
    "data_group",
    "data_rank",
    "get_local_rank",
    "get_num_processes",
    "get_rank",
    "is_distributed",
    "is_master",
    "num_data_ranks",
    "set_data_ranks",
    "ExperimentRun",
    "Run",
    "current_run",
    "set_current_run",
    "capture_rng",
    "derive_seed",
    "reseed_rank",
    "restore_rng",
    "seed_worker",
    "set_deterministic",
    "set_seed",
    "StopSignals",
]
