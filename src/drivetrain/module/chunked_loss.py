"""Cross entropy over a final linear layer without ever holding all of its outputs.

With a large vocabulary the logits are the largest tensor of a step. Here rows are taken in chunks: each chunk's logits give its loss and,
at once, its part of the gradients of hidden states and weight; then they are dropped (as in the Liger Kernel, Hsu et al., 2024, arXiv
2410.10989; "Cut Your Losses", Wijmans et al., 2024, arXiv 2411.09009, goes further with its own kernel).

The gradients are those of the *sum* of the losses; the mean, a loss scale and the weight of an accumulation window come in through the
gradient of the sum. Entries of a softmax lie between zero and one, so float16 cannot overflow, but among a hundred thousand words most are
smaller than float16 holds exactly: there they are multiplied by a power of two before they are rounded, and products with them are divided
by it in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
_CHUNK_BYTES = 512 * 2**20
"""What the float32 logits of one chunk may take; large enough for products to run at full speed."""
_FLOAT16_SCALE = 2.0**12
"""Gradients of logits are at most this in float16: far from its largest number, and exact down to 2e-8 before."""

SoftmaxStep = Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


def rows_in_chunk(rows: int, classes: int) -> int:
    """Return the number of rows of one chunk: at most half a GiB of float32 logits, in a number of parts that divides most batches.

    >>> rows_in_chunk(65536, 50304), rows_in_chunk(100, 10)
    (2048, 100)
    """
    most = max(1, _CHUNK_BYTES // (4 * classes))
    parts = 1
    while rows > parts * most:
        parts *= 2
    return max(1, -(-rows // parts))


def loss_and_logit_gradients(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of some rows and its gradient by their logits, in their type (times 4096 in float16)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    kept = target != ignore_index
    index = torch.where(kept, target, 0).unsqueeze(1)
    log_sum = torch.logsumexp(wide, dim=1, keepdim=True)
    loss = (1 - label_smoothing) * (log_sum - wide.gather(1, index)).squeeze(1)
    if label_smoothing:
        loss = loss + label_smoothing * (log_sum - wide.mean(dim=1, keepdim=True)).squeeze(1)
    classes = torch.arange(wide.shape[1], device=wide.device)
    # A comparison instead of a scatter: the compiler then makes one kernel of it, without a copy of the logits.
    is_target = (classes == index).to(wide.dtype)
    gradient = torch.exp(wide - log_sum) - label_smoothing / wide.shape[1] - (1 - label_smoothing) * is_target
    gradient = torch.where(kept.unsqueeze(1), gradient, 0.0)
    if logits.dtype == torch.float16:
        gradient = gradient * _FLOAT16_SCALE
    return torch.where(kept, loss, 0.0).sum(), gradient.to(logits.dtype)


class _SummedCrossEntropy(torch.autograd.Function):
    """The sum of the losses of all rows; gradients are computed on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
        chunk: int,
        dtype: torch.dtype,
        step: SoftmaxStep,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows, matrix = hidden.to(dtype), weight.to(dtype)
        offset = None if bias is None else bias.to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = _FLOAT16_SCALE if dtype == torch.float16 else 1.0
        total = torch.zeros((), dtype=wide, device=hidden.device)
        # Rounded to float16 only when the loss scale is in it.
        grad_hidden = torch.empty_like(rows, dtype=dtype if scale == 1.0 else wide) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs_bias else None
        for first in range(0, len(rows), chunk):
            part = rows[first : first + chunk]
            logits = F.linear(part, matrix, offset)
            loss, gradient = step(logits, target[first : first + chunk], ignore_index, label_smoothing)
            del logits
            total = total + loss  # in place, torch 2.11 would compile it without gradients (pytorch/pytorch#180642)
            if grad_hidden is not None and scale == 1.0:
                torch.mm(gradient, matrix, out=grad_hidden[first : first + chunk])
            elif grad_hidden is not None:
                torch.mul(_product(gradient, matrix, wide), 1 / scale, out=grad_hidden[first : first + chunk])
            if grad_weight is not None and dtype == wide:
                grad_weight.addmm_(gradient.t(), part)
            elif grad_weight is not None:
                grad_weight += _product(gradient.t(), part, wide)
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=wide)
        if scale != 1.0:
            for gradients in (grad_weight, grad_bias):
                if gradients is not None:
                    gradients /= scale
        ctx.kinds = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In the wide type before it is rounded: the factor holds the mean and the loss scale.
        pairs = zip(ctx.saved_tensors, ctx.kinds)
        found = [None if gradient is None else (gradient * grad).to(kind) for gradient, kind in pairs]
        return (*found, None, None, None, None, None, None)


def _product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """Return `left @ right` in a wider type: 16-bit factors are multiplied as such and summed in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide)
    return torch.mm(left.to(wide), right.to(wide))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
    step: SoftmaxStep = loss_and_logit_gradients,
) -> Tensor:
    """Return `F.cross_entropy(F.linear(hidden, weight, bias), target)` of `rows x features` hidden states, chunk by chunk.

    Products are computed in autocast's type where it is on, the softmax in float32 or wider. `step` computes loss and gradient of one
    chunk's logits; a compiled one makes a single kernel of it.

    >>> hidden, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([1, 2, -100, 3, 0, 8])
    >>> loss = linear_cross_entropy(hidden, weight, target, chunk=2)
    >>> torch.allclose(loss, F.cross_entropy(hidden @ weight.t(), target))
    True
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction={reduction!r}: expected 'mean' or 'sum'; losses of single rows need own gradients."
        )
    device = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    size = rows_in_chunk(len(hidden), weight.shape[0]) if chunk is None else chunk
    with torch.autocast(device, enabled=False):
        total: Tensor = _SummedCrossEntropy.apply(
            hidden, weight, bias, target, ignore_index, label_smoothing, size, dtype, step
        )
        return total if reduction == "sum" else mean_of_kept(total, target != ignore_index)


def mean_of_kept(total: Tensor, kept: Tensor) -> Tensor:
    """Return the mean over the rows that are kept, given their sum. Without rows it is NaN, as in torch, with zero gradients."""
    count = kept.sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
