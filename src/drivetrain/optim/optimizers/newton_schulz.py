"""Orthogonalisation by Newton-Schulz iteration, for one matrix or a stack of them (Jordan et al., 2024).

The quintic iteration drives all singular values towards one, roughly: its coefficients rise steeply at zero and do not converge.
It runs in bfloat16 and only multiplies matrices. Small matrices of one shape are stacked, because many small products cost more
to start than to compute.
"""

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
_STACK_ELEMENTS = 1 << 24  # the largest stack made at once: 32 MiB in bfloat16
_CPU_ELEMENTS = 1 << 12  # on a CPU a product of larger matrices outweighs its start, and stacked products are slower

ADJUSTMENTS = ("original", "match_rms_adamw")


def orthogonalise(matrices: list[Tensor], steps: int = 5) -> list[Tensor]:
    """Return for each matrix one with the same row and column spaces and singular values near one, in bfloat16.

    >>> values = torch.linalg.svdvals(orthogonalise([torch.diag(torch.tensor([3.0, 1.0]))])[0].float())
    >>> bool((values > 0.6).all() and (values < 1.3).all())
    True
    """
    done: dict[int, Tensor] = {}
    for places in _stacks(matrices):
        # Wide matrices have the smaller Gram matrix, so tall ones are turned.
        wide = [matrices[place] if _is_wide(matrices[place]) else matrices[place].mT for place in places]
        if len(wide) == 1:
            results = [_iterate(wide[0].bfloat16(), steps)]
        else:
            results = list(_iterate_stack(torch.stack([matrix.bfloat16() for matrix in wide]), steps))
        for place, result in zip(places, results):
            done[place] = result if _is_wide(matrices[place]) else result.mT
    return [done[place] for place in range(len(matrices))]


def adjusted_rate(lr: float | Tensor, shape: tuple[int, int], adjust_lr: str) -> float | Tensor:
    """Return the rate that gives updates of any shape the same effect: by aspect ratio, or with the size of AdamW's steps."""
    rows, columns = shape
    if adjust_lr == "match_rms_adamw":  # Liu et al., 2025, arXiv 2502.16982
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def _stacks(matrices: list[Tensor]) -> list[list[int]]:
    """Group the places of matrices that have one shape once wide, in stacks of limited size."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        shape = matrix.shape if _is_wide(matrix) else matrix.shape[::-1]
        groups.setdefault(tuple(shape), []).append(place)
    stacks = []
    for (rows, columns), places in groups.items():
        is_large = matrices[places[0]].device.type == "cpu" and rows * columns > _CPU_ELEMENTS
        size = 1 if is_large else max(1, _STACK_ELEMENTS // (rows * columns))
        stacks += [places[start : start + size] for start in range(0, len(places), size)]
    return stacks


def _iterate(x: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _iterate_stack(x: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
