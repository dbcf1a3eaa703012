"""The factory that algorithms use when they bring an optimizer of their own: `state.make_optimizer(name, groups, **settings)`.

Algorithms do not import `drivetrain.optim`; the Trainer hands them this function on the state.
"""

from typing import Any

from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError


def make_optimizer(name: str, groups: Any, **settings: Any) -> Optimizer:
    """Return a new optimizer by name, of torch or of ours, over parameters or groups; a wrapper takes an optimizer instead.

    >>> import torch
    >>> make_optimizer("Lion", [torch.nn.Parameter(torch.zeros(1))], lr=1e-3).defaults["lr"]
    0.001
    """
    from drivetrain.optim.building import find_optimizer

    try:
        return find_optimizer(name)(groups, **settings)
    except TypeError as problem:
        raise ConfigError(f"the optimizer {name!r} refused its settings {sorted(settings)}: {problem}") from problem
