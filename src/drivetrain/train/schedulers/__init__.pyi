# Written by `make stubs` from the lazy exports of this module.
from drivetrain.train.schedulers.scheduler_base import SchedulerBase as SchedulerBase
from drivetrain.train.schedulers.scheduler_base import StatefulSchedulerBase as StatefulSchedulerBase
from drivetrain.train.schedulers.cosine_scheduler import CosineLrScheduler as CosineLrScheduler
from drivetrain.train.schedulers.wsd_scheduler import WSDLrScheduler as WSDLrScheduler
from drivetrain.train.schedulers.wsd_scheduler import estimate_checkpoint_steps as estimate_checkpoint_steps

__all__ = [
    "SchedulerBase",
    "StatefulSchedulerBase",
    "CosineLrScheduler",
    "WSDLrScheduler",
    "estimate_checkpoint_steps",
]
