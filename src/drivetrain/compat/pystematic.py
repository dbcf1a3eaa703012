"""The names of pystematic: `drivetrain.experiment.core` and `.parametric`, and `drivetrain.torch` with those of pystematic-torch.

`torch` is an object, not a module of that name, so that nothing can shadow the real one.
"""

import contextlib
import importlib

from drivetrain.core.errors import DrivetrainError as Error
from drivetrain.core.errors import ExperimentError
from drivetrain.core.errors import ParameterError as ValidationError
from drivetrain.experiment.experiments import Experiment, ExperimentGroup
from drivetrain.experiment.parameters import Parameter, ParameterGroup
from drivetrain.experiment.plugins import app

__all__ = [
    "Error",
    "Experiment",
    "ExperimentError",
    "ExperimentGroup",
    "Parameter",
    "ParameterGroup",
    "ValidationError",
    "app",
]


_HOMES = {
    "drivetrain.context.context": ("Context", "TorchContext=Context"),
    "drivetrain.context.moving": ("move_to_device",),
    "drivetrain.data.loader": ("SmartDataLoader",),
    "drivetrain.record.recorder": ("Recorder",),
    "drivetrain.checkpoint.store": ("save_checkpoint", "load_checkpoint"),
    "drivetrain.runtime.ranks": ("is_distributed", "is_master", "get_num_processes", "get_rank", "get_local_rank"),
    "drivetrain.compat.pystematic": ("broadcast_from_master",),
    "drivetrain.runtime.collectives": ("distributed_barrier",),
    "drivetrain.runtime.group": ("init_distributed",),
    "drivetrain.runtime.seeds": ("derive_seed",),
    "drivetrain.context.state": ("State",),
    "drivetrain.checkpoint.checkpointer": ("Checkpointer",),
    "drivetrain.experiment.sweeps.sweeping": ("run_parameter_sweep",),
}


def broadcast_from_master(value: object) -> object:
    """Return rank 0's value, numbers and lists of them as a tensor, as pystematic-torch does.

    `drivetrain.broadcast_from_master` returns the kind it was given.
    """
    import torch

    from drivetrain.runtime import collectives

    if not isinstance(value, torch.Tensor):
        with contextlib.suppress(
            TypeError, ValueError, RuntimeError
        ):  # text, dicts: pystematic could not send them at all
            value = torch.tensor(value)
    return collectives.broadcast_from_master(value)


class TorchNames:
    """Finds each helper in its home on first use."""

    def __getattr__(self, name: str) -> object:
        for module, entries in _HOMES.items():
            for entry in entries:
                public, _, private = entry.partition("=")
                if public == name:
                    return getattr(importlib.import_module(module), private or public)
        from drivetrain.core.errors import did_you_mean

        raise AttributeError(f"drivetrain.torch has no attribute {name!r}.{did_you_mean(name, dir(self))}")

    def __dir__(self) -> list[str]:
        return sorted(entry.partition("=")[0] for entries in _HOMES.values() for entry in entries)


torch = TorchNames()
