# Written by `make stubs` from the lazy exports of this module.
from drivetrain.train.auto import auto_accelerate as auto_accelerate
from drivetrain.train.auto import AutoAccelerateResult as AutoAccelerateResult
from drivetrain.strategy import Strategy as Strategy
from drivetrain.strategy import DeviceSpec as DeviceSpec
from drivetrain.strategy import register_method as register_method
from drivetrain.strategy import register_replace_pair as register_replace_pair
from drivetrain.strategy import register_tp_plan as register_tp_plan
from drivetrain.module.blocks import find_blocks as find_blocks

__all__ = [
    "auto_accelerate",
    "AutoAccelerateResult",
    "Strategy",
    "DeviceSpec",
    "register_method",
    "register_replace_pair",
    "register_tp_plan",
    "find_blocks",
]
