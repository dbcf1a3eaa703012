"""What this package provides to the folders below it: implementations of their slots, names they offer, and second paths of modules.

Everything is text, so that reading the tables loads nothing.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def open_doorway(public: str, home: str) -> None:
    """Make `public` mean the module `home`, and `public.x` each submodule `home.x`: patching either reaches the code that runs.

    Submodules are bound here too: imported through the public name they would otherwise be loaded a second time.
    """
    import pkgutil

    sys.modules[public] = module = importlib.import_module(home)
    for entry in pkgutil.iter_modules(getattr(module, "__path__", ())):
        sys.modules[f"{public}.{entry.name}"] = importlib.import_module(f"{home}.{entry.name}")


class DoorwayFinder:
    """Opens a doorway for each path of a table that has no file of its own.

    It derives from nothing: `importlib.abc` would double the time of `import drivetrain`.
    """

    def __init__(self, homes: Mapping[str, str]):
        self.homes = homes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the paths of the table only."""
        return ModuleSpec(fullname, self) if fullname in self.homes else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new module by its home, which Python then returns."""
        open_doorway(module.__name__, self.homes[module.__name__])


SLOTS = {
    "strategy.legacy_plan": "drivetrain.compat.atorch_plans:read_legacy_pickle",
    "train.accelerator": "drivetrain.compat.accelerate:wrap_accelerator",
    "train.foreign_state": "drivetrain.compat.accelerate",
    "train.foreign_arguments": "drivetrain.compat.trainer_arguments:INSTEAD",
    "train.foreign_methods": "drivetrain.compat.trainer_arguments:INSTEAD_OF_METHOD",
}

EXPORTS = {
    "drivetrain.core": {
        "drivetrain.context.state": ["State"],
        "drivetrain.compat.composer_types": (
            "Batch DataSpec Evaluator JSON MemoryFormat Precision Serializable TrainerMode ensure_data_spec ensure_evaluator "
            "get_precision_context"
        ).split(),
    },
    "drivetrain.experiment": {"drivetrain.compat.pystematic": ["torch"]},
    "drivetrain.optim": {
        "drivetrain.compat.composer_schedulers": (
            "ComposerScheduler ConstantScheduler ConstantWithWarmupScheduler CosineAnnealingScheduler "
            "CosineAnnealingWarmRestartsScheduler CosineAnnealingWithWarmupScheduler ExponentialScheduler InverseSqrtScheduler "
            "LinearScheduler LinearWithWarmupScheduler MultiStepScheduler MultiStepWithWarmupScheduler OneCycleScheduler "
            "PolynomialScheduler PolynomialWithWarmupScheduler StepScheduler WSDScheduler compile_composer_scheduler"
        ).split()
    },
}

_SCHEDULE_FILES = (
    "noam exp constant linear cosine polynomial step multistep wsd inverse_sqrt one_cycle function".split()
)
"""SpeeChain has a file for each schedule, and `type: noam.NoamLr` of a configuration names one."""

MODULES = {
    "drivetrain.algorithms.alibi.attention_surgery_functions": "drivetrain.algorithms.alibi.algorithm",
    "drivetrain.algorithms.alibi.gpt2_alibi": "drivetrain.compat.composer_types",
    "drivetrain.algorithms.warnings": "drivetrain.core.errors",
    "drivetrain.context.codec": "drivetrain.runtime.codec",
    "drivetrain.context.params": "drivetrain.module.params",
    "drivetrain.context.surgery": "drivetrain.module.surgery",
    "drivetrain.core.passes": "drivetrain.compat.composer_types",
    "drivetrain.experiment.core": "drivetrain.compat.pystematic",
    "drivetrain.experiment.parametric": "drivetrain.compat.pystematic",
    "drivetrain.optim.composer_schedulers": "drivetrain.compat.composer_schedulers",
    "drivetrain.optim.curves": "drivetrain.optim.schedules",
    "drivetrain.train.utils": "drivetrain.compat.pytorch_accelerated_utils",
    **dict.fromkeys((f"drivetrain.optim.{name}" for name in _SCHEDULE_FILES), "drivetrain.optim.units"),
}
"""Second paths of modules: importing the first gives the second, the same object."""

sys.meta_path.append(DoorwayFinder(MODULES))  # last, so that it is asked only for what no file answers
