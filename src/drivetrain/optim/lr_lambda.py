"""The same schedules for a plain torch optimizer, as a function for torch's LambdaLR."""

from collections.abc import Callable
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.optim.config import resolve_type

NAMES = {
    "constant": "ConstantLr",
    "linear": "LinearLr",
    "cosine": "CosineLr",
    "cosine_restarts": "CosineRestartsLr",
    "polynomial": "PolynomialLr",
    "step": "StepLr",
    "multistep": "MultiStepLr",
    "wsd": "WSDLr",
    "inverse_sqrt": "InverseSqrtLr",
    "one_cycle": "OneCycleLr",
    "noam": "NoamLr",
}


def as_lr_lambda(name: str, **sche_conf: Any) -> Callable[[int], float]:
    """Return the factor of the base rate as a function of the updates made so far, for `torch.optim.lr_scheduler.LambdaLR`.

    >>> fall = as_lr_lambda("linear", total_steps=4)
    >>> [fall(n) for n in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if name not in NAMES:
        raise ConfigError(unknown_name("curve", name, NAMES, where="as_lr_lambda"))
    if sche_conf.get("min_lr") is not None:
        raise ConfigError("as_lr_lambda knows no rates, only factors: give min_lr_ratio instead of min_lr.")
    # A unit with the rate 1 is the curve itself, checks included; its one parameter is never trained.
    unit = resolve_type(NAMES[name])("SGD", {"lr": 1.0}, nn.Linear(1, 1, bias=False), **sche_conf)
    unit.lr_at(1)  # complain about the length now, not in the middle of a run
    return lambda updates: unit.lr_at(updates + 1)
