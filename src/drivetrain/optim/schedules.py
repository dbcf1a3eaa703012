"""Every learning-rate formula of the library, once, as a pure function of a position.

The OptimSchedulers, Composer's schedulers and the Trainer's own all call these. A factor multiplies the configured
learning rate; positions `u` and `v` run from 0 to 1. Nothing here knows about optimizers.

Papers: noam and inverse square root, Vaswani et al. 2017; cosine and restarts, Loshchilov and Hutter 2016; k-decay, Zhang
and Li 2020; one cycle, Smith and Topin 2017; warm-up, stable, decay, Hu et al. 2024; its square-root decay, Hägele et al. 2024.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

__all__ = [
    "between",
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

WARMUP_SHAPES = ("linear", "cosine", "constant")
DECAY_SHAPES = ("linear", "sqrt", "cosine", "inverse")
ANNEAL_SHAPES = ("cos", "linear")


def linear(u: float) -> float:
    """Fall from 1 to 0 in a straight line."""
    return 1.0 - u


def cosine(u: float, k: float = 1.0) -> float:
    """Fall from 1 to 0 along half a cosine; k above 1 keeps the rate high for longer."""
    return (1.0 + math.cos(math.pi * (u if k == 1.0 else u**k))) / 2.0


def polynomial(u: float, power: float = 1.0) -> float:
    """Fall from 1 to 0 as a power of what is left."""
    return (1.0 - u) ** power


def exponential(position: float, gamma: float) -> float:
    """Multiply by gamma once per unit of position, which may be a fraction."""
    return float(gamma**position)


def step_decay(position: float, size: float, gamma: float = 0.1) -> float:
    """Multiply by gamma after every `size` of position."""
    return float(gamma ** math.floor(position / size))


def multistep(position: float, milestones: Sequence[float], gamma: float = 0.1) -> float:
    """Multiply by gamma at every milestone that has been reached; milestones are in ascending order."""
    return float(gamma ** bisect_right(milestones, position))


def cosine_restarts(position: float, first_cycle: float, cycle_mult: float = 1.0) -> float:
    """Fall along a cosine within each cycle; cycle i lasts first_cycle * cycle_mult**i."""
    start, length = 0.0, float(first_cycle)
    if cycle_mult == 1.0:
        start = position // length * length
    else:
        while position >= start + length:
            start, length = start + length, length * cycle_mult
    return cosine((position - start) / length)


def noam(step: float, warmup_steps: float) -> float:
    """Rise linearly to warmup_steps**-0.5, then fall with the inverse square root of the step."""
    return float(min(step**-0.5, step * warmup_steps**-1.5))


def inverse_sqrt(step: float, warmup_steps: float) -> float:
    """Fall with the inverse square root of the step, from 1 at `warmup_steps`."""
    return math.sqrt(warmup_steps / max(step, warmup_steps))


def decay(v: float, shape: str = "linear", floor: float = 0.0) -> float:
    """Fall from 1 to `floor` in the last phase of a warm-up, stable, decay schedule."""
    if shape == "inverse":  # the reciprocal of the rate grows linearly, so the floor is part of the formula
        return 1.0 / (v / floor + 1.0 - v)
    falls = {"linear": linear(v), "sqrt": 1.0 - math.sqrt(v), "cosine": cosine(v)}
    return with_floor(falls[shape], floor)


def one_cycle(
    position: float, peak: float, end: float, start_factor: float, end_factor: float, anneal: str = "cos"
) -> float:
    """Rise from `start_factor` to 1 at `peak`, then fall to `end_factor` at `end`, and stay."""
    fall = cosine if anneal == "cos" else linear
    if position < peak:
        return between(start_factor, 1.0, fall(position / peak))
    return between(1.0, end_factor, fall(min(1.0, (position - peak) / (end - peak)) if end > peak else 0.0))


def warm_up(fraction: float, start: float = 0.0, shape: str = "linear") -> float:
    """Rise from `start` to 1 while `fraction` goes from 0 to 1; the shape "constant" stays at `start`."""
    if shape == "constant":
        return start
    return between(1.0, start, fraction if shape == "linear" else 1.0 - cosine(fraction))


def with_floor(factor: float, floor: float) -> float:
    """Lift a factor that falls to 0 so that it falls to `floor`."""
    return between(1.0, floor, factor)


def between(start: float, end: float, factor: float) -> float:
    """Return `start` for a factor of 1, `end` for 0, and what lies between them otherwise."""
    return end + (start - end) * factor


def body_position(step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """Return u for a 1-based step: 0 on the last warm-up step, 1 one step after the end.

    With no warm-up the values are those of torch's closed forms: the first step has the full rate.
    """
    peak = max(warmup_steps, 1)
    return min(1.0, max(0.0, (step - peak) / (total_steps - peak + 1)))
