"""Experiments: turn a function into runs with parameters, a seed, and a folder that records what happened.

    from drivetrain.experiment import experiment

    @experiment
    def digits(epochs: int = 10, lr: float = 0.1): ...

    digits.run(lr=0.05)         # from Python
    digits.cli()                # python digits.py --lr 0.05 --resume auto

The package itself can be called, so `@drivetrain.experiment` is the decorator too.
"""

import sys
import types
from typing import Any

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".experiments": ["experiment", "group", "parameter", "param_group", "Experiment", "ExperimentGroup"],
        ".parameters": ["Parameter", "ParameterGroup"],
        ".signature": ["Param"],
        "drivetrain.core.secret": ["Secret"],
        ".proxies": ["current_experiment", "params", "output_dir", "params_file", "random_gen", "subprocess_counter"],
        ".running": ["new_seed", "launch_subprocess", "is_subprocess", "local_rank"],
        ".records": ["RunRecord", "read_run", "find_runs"],
        ".run_folder": ["add_to_manifest"],
        ".sweeps.space": ["Choice", "Uniform", "LogUniform", "IntRange", "param_matrix"],
        ".sweeps.sweeping": ["sweep", "run_parameter_sweep"],
        ".sweeps.trial": ["report", "Trial", "TrialPruned"],
        ".sweeps.result": ["SweepResult", "read_sweep"],
        ".sweeps.samplers": ["Sampler", "GridSampler", "RandomSampler", "OptunaConfig", "OptunaSampler"],
        ".sweeps.executors": ["Executor", "InlineExecutor"],
        ".sweeps.pool": ["PoolExecutor"],
        ".sweeps.cluster": ["RayConfig", "RayExecutor", "SubmititConfig", "SubmititExecutor"],
    },
)
__all__.remove("torch")  # `import *` must not hide the real one


class _CallablePackage(types.ModuleType):
    """A package that is its own decorator."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.experiment(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
