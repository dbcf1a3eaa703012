"""Finding a plan for a model and the hardware at hand; loaded when asked for."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "drivetrain.train.auto": ["auto_accelerate", "AutoAccelerateResult"],
        "drivetrain.strategy": "Strategy DeviceSpec register_method register_replace_pair register_tp_plan".split(),
        "drivetrain.module.blocks": ["find_blocks"],
    },
)
