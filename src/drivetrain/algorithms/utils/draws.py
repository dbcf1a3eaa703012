"""Random numbers of algorithms: drawn on the host from a given generator, so that no step waits for the device.

Every function takes torch's global generator when it is given None. A generator of another device works too, at the price of a
wait; the State's generators are the host's.
"""

import torch
from torch import Tensor

Generator = torch.Generator | None


def draw_uniform(low: float, high: float, generator: Generator = None) -> float:
    """Return a number between `low` and `high`."""
    return low + (high - low) * float(
        torch.rand((), dtype=torch.float64, generator=generator, device=_place(generator))
    )


def draw_integer(low: int, high: int, generator: Generator = None) -> int:
    """Return a whole number from `low` to `high - 1`."""
    return int(torch.randint(low, high, (), generator=generator, device=_place(generator)))


def draw_coin(generator: Generator = None) -> bool:
    """Return True half of the time."""
    return draw_uniform(0.0, 1.0, generator) > 0.5


def draw_beta(alpha: float, generator: Generator = None) -> float:
    """Return a sample of Beta(alpha, alpha)."""
    return draw_weights(2, alpha, generator)[0]


def draw_weights(count: int, alpha: float, generator: Generator = None) -> list[float]:
    """Return `count` weights that sum to one, a sample of the symmetric Dirichlet distribution."""
    concentration = torch.full((count,), alpha, dtype=torch.float64, device=_place(generator))
    return torch._sample_dirichlet(concentration, generator).tolist()


def draw_permutation(count: int, device: torch.device | str, generator: Generator = None) -> Tensor:
    """Return the numbers 0..count-1 in random order, on `device`."""
    return torch.randperm(count, generator=generator, device=_place(generator)).to(device, non_blocking=True)


def draw_subset(count: int, keep: int, device: torch.device | str, generator: Generator = None) -> Tensor:
    """Return `keep` of the numbers 0..count-1 in ascending order, on `device`."""
    chosen = torch.randperm(count, generator=generator, device=_place(generator))[:keep].sort().values
    return chosen.to(device, non_blocking=True)


def _place(generator: Generator) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


Box = tuple[int, int, int, int]
"""First row, first column, and the row and column after the last."""


def draw_box(image: tuple[int, int], box: tuple[int, int], uniform: bool, generator: Generator = None) -> Box:
    """Return a box of the given height and width around a random place, clipped to the image.

    With `uniform` the centre may lie outside, so that every pixel is covered equally often.
    """
    (top, bottom), (left, right) = (_span(side, length, uniform, generator) for side, length in zip(image, box))
    return top, left, bottom, right


def _span(side: int, length: int, uniform: bool, generator: Generator) -> tuple[int, int]:
    low, high = (-length // 2, side + length // 2) if uniform else (0, side)
    centre = draw_integer(low, high, generator)
    return _clip(centre - length // 2, side), _clip(centre + length // 2, side)


def _clip(value: int, side: int) -> int:
    return min(max(value, 0), side)
