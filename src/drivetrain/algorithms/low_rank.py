"""The best pair of thin matrices: by singular values, then fitted to the data by alternating least squares."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair

from drivetrain.core.errors import ConfigError


class MissingKernelError(ConfigError, RuntimeError):
    """A bias was given for a kernel that was not."""


@dataclass
class LowRankSolution:
    """A factorization and how well it does; where two factors would save nothing, one matrix."""

    Wa: Tensor | None = None
    """Shape (inputs, rank), or the whole matrix; for a convolution (rank, channels, height, width)."""
    Wb: Tensor | None = None
    """Shape (rank, outputs); for a convolution (outputs, rank, 1, 1). None where `Wa` is the whole matrix."""
    bias: Tensor | None = None
    rank: int = -1
    """The rank, or -1 where nothing was factorized."""
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

    `rank` below 1 is a fraction of the inputs, at most the present rank. A rank as large as either side saves nothing: the answer is
    then the one best matrix. A rank as large as that of the given pair returns the pair. Both have `rank=-1`. Without a bias to start
    from, none is fitted.
    """
    rank = int(rank) if rank >= 1 else max(1, min(int(rank * X.shape[1]), Wa.shape[1]))
    dtype, X, Y = Wa.dtype, X.double(), Y.double()
    offset = torch.zeros(Y.shape[1], dtype=Y.dtype, device=Y.device) if bias is None else bias.double()
    if rank >= min(X.shape[1], Y.shape[1]):
        whole = torch.linalg.lstsq(X, Y - offset, driver=_driver(X)).solution
        return LowRankSolution(whole.to(dtype), None, bias, nmse=_nmse(X @ whole + offset, Y))
    if rank >= Wa.shape[1]:
        assert Wb is not None  # a whole matrix has the outputs as columns, of which there are more
        return LowRankSolution(Wa, Wb, bias, nmse=_nmse(X @ Wa.double() @ Wb.double() + offset, Y))
    first, second = (factor.double() for factor in split_matrix(Wa if Wb is None else Wa @ Wb, rank))
    for _ in range(n_iters):
        # With one factor fixed, the other is a linear regression.
        first = torch.linalg.lstsq(X, (Y - offset) @ torch.linalg.pinv(second), driver=_driver(X)).solution
        second = torch.linalg.lstsq(X @ first, Y - offset, driver=_driver(X)).solution
        if bias is not None:
            offset = (Y - X @ first @ second).mean(dim=0)
    nmse = _nmse(X @ first @ second + offset, Y)
    return LowRankSolution(first.to(dtype), second.to(dtype), None if bias is None else offset.to(dtype), rank, nmse)


def _nmse(found: Tensor, Y: Tensor) -> float:
    return float((found - Y).square().mean() / Y.var(correction=0).clamp(min=torch.finfo(Y.dtype).tiny))


def _driver(X: Tensor) -> str:
    """Name the solver that copes with dependent columns; an accelerator has only the plain one."""
    return "gelsd" if X.device.type == "cpu" else "gels"


@torch.no_grad()
def factorize_conv2d(
    X: Tensor,
    Wa: Tensor,
    Wb: Tensor | None = None,
    rank: int | float = 0.25,
    biasA: Tensor | None = None,
    biasB: Tensor | None = None,
    n_iters: int = 3,
    **conv2d_kwargs: Any,
) -> LowRankSolution:
    """Return the two kernels of lower rank whose outputs for the images `X` are closest to those of the given ones.

    `Wa` alone is a convolution; with `Wb`, a 1x1 kernel, it is already a pair. `biasA` belongs to the first, `biasB` to the last. As
    `factorize_matrix` does, it returns one kernel where two would save nothing.
    """
    if Wb is None and biasB is not None:
        raise MissingKernelError(
            "factorize_conv2d: biasB belongs to the second kernel Wb, which is not given. Use biasA."
        )
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
    assert solution.Wa is not None
    solution.Wa = solution.Wa.t().reshape(-1, *Wa.shape[1:])
    solution.Wb = None if solution.Wb is None else solution.Wb.t()[:, :, None, None]
    return solution
