"""Another way to `drivetrain.module.surgery`, where the functions live."""

from drivetrain.module.surgery import (
    ReplacementFunction,
    count_module_instances,
    replace_module_classes,
    update_params_in_optimizer,
)

__all__ = ["ReplacementFunction", "count_module_instances", "replace_module_classes", "update_params_in_optimizer"]
