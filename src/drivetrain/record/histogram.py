"""Histograms counted on the device: nothing of this waits for it.

`torch.histc` and `bincount` read their limits on the host; here limits, places and counts stay tensors. Large tensors are worked
through in pieces, so that a histogram of all weights needs little additional memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError

_PIECE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of values in equal bins between `low` and `high`, both included."""

    low: float
    high: float
    counts: list[int]
    total: float
    """The sum of the finite values."""
    total_of_squares: float
    nonfinite: int
    """Number of NaN or infinite values; no bin counts them."""

    @property
    def edges(self) -> list[float]:
        """Return the limits of the bins, one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + width * place for place in range(len(self.counts))] + [self.high]


def count_values(values: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Return (low, high, sum, sum of squares) and (counts of the bins..., number of non-finite values).

    As in numpy, equal values get a bin range of one around them.
    """
    if values.numel() == 0:
        raise ConfigError("cannot make a histogram of no values; expected a tensor with at least one element.")
    if type(bins) is not int or bins < 1:
        raise ConfigError(f"bins={bins!r} is not valid; expected a whole number of at least 1.")
    if values.is_complex():
        raise ConfigError("cannot make a histogram of complex values; record their real part or their size (abs).")
    flat = values.detach().reshape(-1)
    kind = torch.float32 if flat.device.type == "mps" else torch.float64
    low = torch.full((), torch.inf, dtype=kind, device=flat.device)
    high, total, squares = -low, torch.zeros_like(low), torch.zeros_like(low)
    for piece in flat.split(_PIECE):
        piece = piece.to(kind)
        finite = piece.isfinite()
        low = torch.minimum(low, torch.where(finite, piece, torch.inf).amin())
        high = torch.maximum(high, torch.where(finite, piece, -torch.inf).amax())
        piece = torch.where(finite, piece, 0.0)
        total, squares = total + piece.sum(), squares + piece.square().sum()
    none = low > high
    low, high = torch.where(none, 0.0, low), torch.where(none, 0.0, high)
    half = torch.where(low == high, 0.5, 0.0)
    low, high = low - half, high + half
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=flat.device)
    for piece in flat.split(_PIECE):
        piece = piece.to(kind)
        finite = piece.isfinite()
        place = ((torch.where(finite, piece, low) - low) / (high - low) * bins).long().clamp_(0, bins - 1)
        place = torch.where(finite, place, bins)
        counts.scatter_add_(0, place, torch.ones_like(place))
    return torch.stack([low, high, total, squares]), counts


def read_histogram(limits: Tensor, counts: Tensor) -> Histogram:
    """Return the histogram of tensors that have reached the host."""
    low, high, total, squares = limits.tolist()
    *inside, nonfinite = counts.tolist()
    return Histogram(low=low, high=high, counts=inside, total=total, total_of_squares=squares, nonfinite=nonfinite)
