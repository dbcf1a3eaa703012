"""Learning-rate schedules that the Trainer steps after every update."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".scheduler_base": ["SchedulerBase", "StatefulSchedulerBase"],
        ".cosine_scheduler": ["CosineLrScheduler"],
        ".wsd_scheduler": ["WSDLrScheduler", "estimate_checkpoint_steps"],
    },
)
