"""The formulas of `drivetrain.optim.schedules` under their second name."""

from drivetrain.optim.schedules import (
    body_position,
    cosine,
    cosine_restarts,
    decay,
    exponential,
    inverse_sqrt,
    linear,
    multistep,
    noam,
    one_cycle,
    polynomial,
    step_decay,
    warm_up,
    with_floor,
)

__all__ = [
    "body_position",
    "cosine",
    "cosine_restarts",
    "decay",
    "exponential",
    "inverse_sqrt",
    "linear",
    "multistep",
    "noam",
    "one_cycle",
    "polynomial",
    "step_decay",
    "warm_up",
    "with_floor",
]
