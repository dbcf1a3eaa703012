"""Drivetrain trains plain PyTorch models.

Give it a model, data and a loss; it finds a fast and correct way to run them on the hardware at hand, runs a loop that anyone can read,
and records the run so that nothing is lost and nothing is hidden. Importing this package loads no torch: every name below loads on first
use, in the order in which one meets them.
"""

from drivetrain.core.lazy import lazy_exports, use_provider

__version__ = "0.1.0"

use_provider("drivetrain.compat.registry")

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        # Train a model, or have a plan found for it.
        ".train.trainer": ["Trainer"],
        ".train.auto": ["auto_accelerate", "AutoAccelerateResult"],
        # What goes into a run, and what comes out of it.
        ".data.loader": ["SmartDataLoader"],
        ".optim.scheduler": ["OptimScheduler"],
        ".optim.optim_set": ["OptimSet"],
        ".record.recorder": ["Recorder"],
        ".checkpoint.checkpointer": ["Checkpointer"],
        ".checkpoint.store": ["save_checkpoint", "load_checkpoint"],
        ".train.verification": ["verify_resume"],
        # Write algorithms and callbacks.
        ".core.plugin": ["Algorithm", "Callback"],
        ".core.event": ["Event"],
        ".core.time": ["Time"],
        ".core.one_of": ["OneOf"],
        ".context.state": ["State"],
        # A loop of one's own.
        ".context.context": ["Context"],
        ".context.moving": ["move_to_device"],
        ".runtime.seeds": ["set_seed", "derive_seed"],
        ".runtime.group": ["init_distributed"],
        ".runtime.ranks": ["is_distributed", "is_master", "get_rank", "get_local_rank", "get_num_processes"],
        ".runtime.collectives": ["broadcast_from_master", "distributed_barrier"],
        ".runtime.launch": ["notebook_launcher"],
        # Plans.
        ".strategy": ["Strategy", "DeviceSpec", "register_method", "register_replace_pair", "register_tp_plan"],
        ".module.blocks": ["find_blocks"],
        # Experiments; `drivetrain.experiment` is the decorator and the package.
        ".experiment.experiments": ["parameter", "param_group", "group"],
        ".experiment.running": ["new_seed"],
        ".experiment.sweeps.sweeping": ["sweep"],
        ".experiment.sweeps.space": ["param_matrix"],
        # What is raised and warned.
        ".core.errors": ["DrivetrainError", "ConfigError", "StopTrainingError", "DrivetrainWarning"],
    },
    modules=[
        *"algorithms checkpoint compat context core data experiment module optim record runtime strategy train".split(),
        *"auto callbacks finetuning functional run_config schedulers surgery tracking trainer utils".split(),
    ],
    unlisted={
        ".core.errors": ["Error=DrivetrainError", "ConfigurationError"],
        ".core.plugin": ["Plugin"],
        ".core.engine": ["Engine", "Trace", "Traces"],
        ".core.time": ["TimeUnit", "Timestamp", "ensure_time"],
        ".context.context": ["TorchContext=Context"],
        ".optim.units": ["NoamLr"],
        ".train.trainer": ["TrainerPlaceholderValues", "TrainerWithTimmScheduler"],
        ".experiment.sweeps.sweeping": ["run_parameter_sweep"],
        ".compat.pystematic": ["torch"],
    },
)
__all__.remove("torch")  # `import *` must not hide the real one
