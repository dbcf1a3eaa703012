"""Drivetrain trains plain PyTorch models.

Give it a model, data and a loss; it finds a fast and correct way to run them on the hardware at hand, turns a loop anyone can
read, and keeps the run so that nothing is lost and nothing is hidden. Importing this package loads no torch and changes no
state: every name below loads on first use.
"""

from drivetrain.core import foreign
from drivetrain.core.lazy import lazy_exports

__version__ = "0.1.0"

foreign.set_provider("drivetrain.compat.registry")

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".core.errors": [
            "Error=DrivetrainError",
            "DrivetrainError",
            "ConfigError",
            "ConfigurationError",
            "StopTrainingError",
            "DrivetrainWarning",
        ],
        ".core.event": ["Event"],
        ".core.plugin": ["Plugin", "Algorithm", "Callback"],
        ".core.engine": ["Engine", "Trace", "Traces"],
        ".core.one_of": ["OneOf"],
        ".core.time": ["Time", "TimeUnit", "Timestamp", "ensure_time"],
        ".runtime.seeds": ["derive_seed", "set_seed"],
        ".runtime.ranks": ["is_distributed", "is_master", "get_rank", "get_local_rank", "get_num_processes"],
        ".runtime.collectives": ["broadcast_from_master", "distributed_barrier"],
        ".runtime.group": ["init_distributed"],
        ".runtime.launch": ["notebook_launcher"],
        ".module.blocks": ["find_blocks"],
        ".context.context": ["Context", "TorchContext=Context"],
        ".context.state": ["State"],
        ".context.moving": ["move_to_device"],
        ".data.loader": ["SmartDataLoader"],
        ".checkpoint.checkpointer": ["Checkpointer"],
        ".checkpoint.store": ["save_checkpoint", "load_checkpoint"],
        ".record.recorder": ["Recorder"],
        ".optim.scheduler": ["OptimScheduler"],
        ".optim.optim_set": ["OptimSet"],
        ".optim.units": ["NoamLr"],
        ".train.trainer": ["Trainer", "TrainerPlaceholderValues", "TrainerWithTimmScheduler"],
        ".train.verification": ["verify_resume"],
        ".train.auto": ["AutoAccelerateResult", "auto_accelerate"],
        ".strategy": ["DeviceSpec", "Strategy", "register_method", "register_replace_pair", "register_tp_plan"],
        ".experiment.declare": ["group", "parameter", "param_group"],
        ".experiment.running": ["new_seed"],
        ".experiment.sweeps.space": ["param_matrix"],
        ".experiment.sweeps.sweeping": ["sweep", "run_parameter_sweep"],
        ".compat.pystematic_torch": ["torch"],
    },
    modules=[
        *(
            "algorithms",
            "checkpoint",
            "compat",
            "context",
            "core",
            "data",
            "experiment",
            "module",
            "optim",
            "record",
            "runtime",
            "strategy",
            "train",
        ),
        *(
            "auto",
            "callbacks",
            "finetuning",
            "functional",
            "run_config",
            "schedulers",
            "surgery",
            "tracking",
            "trainer",
            "utils",
        ),
    ],
)
__all__.remove("torch")  # `import *` must not hide the real one
