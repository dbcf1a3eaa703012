"""The names of pystematic: `drivetrain.experiment.core` and `.parametric`, and `drivetrain.torch` with those of pystematic-torch.

`torch` is an object, not a module of that name, so that nothing can shadow the real one.
"""

import contextlib
import importlib

from drivetrain.core.errors import DrivetrainError as Error
from drivetrain.core.errors import ExperimentError, did_you_mean
from drivetrain.core.errors import ParameterError as ValidationError
from drivetrain.experiment.experiments import Experiment, ExperimentGroup
from drivetrain.experiment.parameters import Parameter, ParameterGroup
from drivetrain.experiment.plugins import app

__all__ = [
    "Error", "Experiment", "ExperimentError", "ExperimentGroup", "Parameter", "ParameterGroup", "ValidationError", "app",
]  # fmt: skip

_HOMES = {
    "drivetrain.context.context": "Context TorchContext=Context",
    "drivetrain.context.moving": "move_to_device",
    "drivetrain.data.loader": "SmartDataLoader",
    "drivetrain.record.recorder": "Recorder",
    "drivetrain.checkpoint.store": "save_checkpoint load_checkpoint",
    "drivetrain.runtime.ranks": "is_distributed is_master get_num_processes get_rank get_local_rank",
    "drivetrain.compat.pystematic": "broadcast_from_master",
    "drivetrain.runtime.collectives": "distributed_barrier",
    "drivetrain.runtime.group": "init_distributed",
    "drivetrain.runtime.seeds": "derive_seed",
    "drivetrain.context.state": "State",
    "drivetrain.checkpoint.checkpointer": "Checkpointer",
    "drivetrain.experiment.sweeps.sweeping": "run_parameter_sweep",
}
_NAMES = {
    public: (module, private or public)
    for module, text in _HOMES.items()
    for public, _, private in (entry.partition("=") for entry in text.split())
}


def broadcast_from_master(value: object) -> object:
    """Return rank 0's value, numbers and lists of them as a tensor, as pystematic-torch does.

    `drivetrain.broadcast_from_master` returns the kind it was given.
    """
    import torch

    from drivetrain.runtime import collectives

    if not isinstance(value, torch.Tensor):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # text, dicts: pystematic could not send them
            value = torch.tensor(value)
    return collectives.broadcast_from_master(value)


class TorchNames:
    """Finds each helper in its home on first use."""

    def __getattr__(self, name: str) -> object:
        if name not in _NAMES:
            raise AttributeError(f"drivetrain.torch has no attribute {name!r}.{did_you_mean(name, _NAMES)}")
        module, private = _NAMES[name]
        return getattr(importlib.import_module(module), private)

    def __dir__(self) -> list[str]:
        return sorted(_NAMES)


torch = TorchNames()
