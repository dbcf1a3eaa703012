"""What this package provides to the folders below it: implementations of their slots, names they offer, and second paths of modules.

Everything is text, so that reading the tables loads nothing.
"""

import sys

from drivetrain.compat.doorway import DoorwayFinder

SLOTS = {
    "strategy.legacy_plan": "drivetrain.compat.atorch_plans:read_legacy_pickle",
    "train.accelerator": "drivetrain.compat.accelerate_runtime:wrap_accelerator",
    "train.foreign_state": "drivetrain.compat.accelerate_state",
    "train.foreign_arguments": "drivetrain.compat.trainer_arguments:INSTEAD",
}

EXPORTS = {
    "drivetrain.core": {
        "drivetrain.context.state": ["State"],
        "drivetrain.compat.composer_types": [
            "Batch",
            "DataSpec",
            "Evaluator",
            "JSON",
            "MemoryFormat",
            "Precision",
            "Serializable",
            "TrainerMode",
            "ensure_data_spec",
            "ensure_evaluator",
            "get_precision_context",
        ],
    },
    "drivetrain.experiment": {"drivetrain.compat.pystematic_torch": ["torch"]},
    "drivetrain.optim": {
        "drivetrain.compat.composer_schedulers": [
            "ComposerScheduler",
            "ConstantScheduler",
            "ConstantWithWarmupScheduler",
            "CosineAnnealingScheduler",
            "CosineAnnealingWarmRestartsScheduler",
            "CosineAnnealingWithWarmupScheduler",
            "ExponentialScheduler",
            "InverseSqrtScheduler",
            "LinearScheduler",
            "LinearWithWarmupScheduler",
            "MultiStepScheduler",
            "MultiStepWithWarmupScheduler",
            "OneCycleScheduler",
            "PolynomialScheduler",
            "PolynomialWithWarmupScheduler",
            "StepScheduler",
            "WSDScheduler",
            "compile_composer_scheduler",
        ],
    },
}

_SCHEDULE_FILES = (
    *("noam", "exp", "constant", "linear", "cosine", "polynomial"),
    *("step", "multistep", "wsd", "inverse_sqrt", "one_cycle", "function"),
)
"""SpeeChain has a file for each schedule, and `type: noam.NoamLr` of a configuration names one."""

MODULES = {
    "drivetrain.algorithms.alibi.attention_surgery_functions": "drivetrain.algorithms.alibi.algorithm",
    "drivetrain.algorithms.alibi.gpt2_alibi": "drivetrain.compat.composer_gpt2_alibi",
    "drivetrain.algorithms.warnings": "drivetrain.core.errors",
    "drivetrain.context.params": "drivetrain.module.params",
    "drivetrain.context.surgery": "drivetrain.module.surgery",
    "drivetrain.core.passes": "drivetrain.compat.composer_passes",
    "drivetrain.experiment.core": "drivetrain.compat.pystematic_core",
    "drivetrain.experiment.parametric": "drivetrain.compat.pystematic_core",
    "drivetrain.optim.composer_schedulers": "drivetrain.compat.composer_schedulers",
    "drivetrain.optim.curves": "drivetrain.optim.schedules",
    "drivetrain.train.utils": "drivetrain.compat.pytorch_accelerated_utils",
    **dict.fromkeys((f"drivetrain.optim.{name}" for name in _SCHEDULE_FILES), "drivetrain.optim.units"),
}
"""Second paths of modules: importing the first gives the second, the same object."""

sys.meta_path.append(DoorwayFinder(MODULES))  # last, so that it is asked only for what no file answers
