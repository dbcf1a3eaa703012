"""The best pair of thin matrices: by singular values, then fitted to the data by alternating least squares."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair


@dataclass
class LowRankSolution:
    """A factorization and how well it does."""

    Wa: Tensor
    """Shape (inputs, rank); for a convolution (rank, channels, height, width)."""
    Wb: Tensor | None
    """Shape (rank, outputs); for a convolution (outputs, rank, 1, 1)."""
    bias: Tensor | None
    rank: int = -1
    nmse: float = 0.0
    """The mean squared error over the variance of the outputs."""


def split_matrix(W: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best two factors of a rank for a matrix, with its singular values shared between them.

    >>> a, b = split_matrix(torch.ones(3, 4), 1)
    >>> torch.allclose(a @ b, torch.ones(3, 4), atol=1e-6)
    True
    """
    U, s, Vh = torch.linalg.svd(W.float(), full_matrices=False)
    root = s[:rank].sqrt()
    return (U[:, :rank] * root).to(W.dtype), (root[:, None] * Vh[:rank]).to(W.dtype)


@torch.no_grad()
def factorize_matrix(
    X: Tensor,
    Y: Tensor,
    Wa: Tensor,
    Wb: Tensor | None = None,
    bias: Tensor | None = None,
    rank: int | float = 0.25,
    n_iters: int = 3,
) -> LowRankSolution:
    """Return thin matrices with `X @ Wa @ Wb + bias` close to `Y`, starting from a known matrix or pair.

    `rank` below 1 is a fraction of the smaller side. Without a bias to start from, none is fitted.
    """
    W = Wa if Wb is None else Wa @ Wb
    rank = int(rank) if rank >= 1 else max(1, int(rank * min(W.shape)))
    first, second = split_matrix(W, rank)
    X, Y, first, second = X.double(), Y.double(), first.double(), second.double()
    offset = torch.zeros(Y.shape[1], dtype=Y.dtype, device=Y.device) if bias is None else bias.double()
    for _ in range(n_iters):
        # With one factor fixed, the other is a linear regression.
        first = torch.linalg.lstsq(X, (Y - offset) @ torch.linalg.pinv(second), driver=_driver(X)).solution
        second = torch.linalg.lstsq(X @ first, Y - offset, driver=_driver(X)).solution
        if bias is not None:
            offset = (Y - X @ first @ second).mean(dim=0)
    error = (X @ first @ second + offset - Y).square().mean()
    nmse = float(error / Y.var(correction=0).clamp(min=torch.finfo(Y.dtype).tiny))
    dtype = Wa.dtype
    return LowRankSolution(first.to(dtype), second.to(dtype), None if bias is None else offset.to(dtype), rank, nmse)


def _driver(X: Tensor) -> str:
    """Name the solver that copes with dependent columns; an accelerator has only the plain one."""
    return "gelsd" if X.device.type == "cpu" else "gels"


@torch.no_grad()
def factorize_conv2d(
    X: Tensor,
    Wa: Tensor,
    Wb: Tensor | None = None,
    biasA: Tensor | None = None,
    biasB: Tensor | None = None,
    rank: int | float = 0.25,
    n_iters: int = 3,
    **conv2d_kwargs: Any,
) -> LowRankSolution:
    """Return the two kernels of lower rank whose outputs for the images `X` are closest to those of the given ones.

    `Wa` alone is a convolution; with `Wb`, a 1x1 kernel, it is already a pair. `biasA` belongs to the first, `biasB` to the last.
    """
    padding_mode = conv2d_kwargs.pop("padding_mode", "zeros")
    if padding_mode != "zeros":
        high, wide = _pair(conv2d_kwargs.pop("padding", 0))
        X = F.pad(X, (wide, wide, high, high), mode=padding_mode)
    Y = F.conv2d(X, Wa, biasA, **conv2d_kwargs)
    if Wb is not None:
        Y = F.conv2d(Y, Wb, biasB)
    bias = biasA
    if Wb is not None:  # what the first part adds reaches the output through the second
        passed = None if biasA is None else Wb.flatten(1) @ biasA
        bias = passed if biasB is None else biasB if passed is None else biasB + passed
    patches = F.unfold(X, Wa.shape[2:], **conv2d_kwargs)  # (N, channels * area, places)
    rows = patches.transpose(1, 2).flatten(0, 1)
    solution = factorize_matrix(
        rows, Y.flatten(2).transpose(1, 2).flatten(0, 1), Wa.flatten(1).t(),
        None if Wb is None else Wb.flatten(1).t(), bias, rank, n_iters,
    )  # fmt: skip
    assert solution.Wb is not None
    solution.Wa = solution.Wa.t().reshape(solution.rank, *Wa.shape[1:])
    solution.Wb = solution.Wb.t()[:, :, None, None]
    return solution
