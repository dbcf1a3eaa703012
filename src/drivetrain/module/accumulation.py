"""The one accumulation rule: the gradient of a window is the mean over all its items, on all ranks.

A window is a run of micro-batches that form one update. Micro-batch i has the mean loss l_i over n_i items (samples, or
tokens). What must be stepped with is the gradient of sum(n_i l_i) / sum(n_i), the sums running over the window and over
all P ranks. Each backward gets l_i * n_i / (r * A), with A the window's length and r a reference count, so its size is that of an
ordinary loss; ranks average; and when the window closes the gradients are multiplied once by c = P * r * A / N, with N the
items of the window on all ranks. Equal full windows have c = 1, which is not applied; a short last window, a smaller last
batch and unequal token counts all come out right. Losses that are sums add up instead: no weights, and c = P undoes the average over ranks.
"""

from collections.abc import Iterable
from typing import overload

import torch
from torch import Tensor

from drivetrain.module.distributed_tensors import local_part
from drivetrain.runtime.device import wide_dtype

Count = int | float | Tensor
_LEAST = 1e-20  # in place of no items at all, where gradients are zero: nothing is divided by zero


class AccumulationWindow:
    """Counts the micro-batches of an update and computes the factors that make their gradients a mean.

    >>> window = AccumulationWindow(length=2)
    >>> window.begin(last=False); window.opens, window.closes
    (True, False)
    >>> window.begin(last=True); window.opens, window.closes
    (False, True)
    """

    def __init__(self, length: int = 1, world: int = 1, reference: Count | None = None):
        self.length, self.world = length, world
        self.reference = reference
        """r: the first count of the run, the same on all ranks; 1 where weights are given instead of counts."""
        self.is_plain = length == 1 and world == 1 and reference is None
        """Whether every window is one batch on one process: losses and gradients pass untouched."""
        self.is_sum = False  # losses are sums, not means
        self.opens = self.closes = False
        self.reset()

    def reset(self) -> None:
        """Clear the counts. The next micro-batch opens a window."""
        self.count = 0
        self.items: Count = 0  # n summed over this rank's micro-batches
        self.everywhere: Count | None = 0  # n summed over all ranks, or None when only a reduction knows

    def begin(self, last: bool) -> None:
        """Add the next micro-batch to the window. `last` closes a window that is not full."""
        self.opens = self.count == 0
        self.count += 1
        self.closes = last or self.count >= self.length

    def weigh(self, loss: Tensor, items: Count, items_everywhere: Count | None) -> Tensor:
        """Count a micro-batch that is a mean over `items`, and return the loss to back-propagate for it."""
        if self.is_plain:
            return loss
        if not self.is_sum:
            if self.reference is None:
                self.reference = items
            self.add(items, items_everywhere)
        return self.scaled(loss, items)

    def scaled(self, loss: Tensor, items: Count) -> Tensor:
        """Return the loss to back-propagate for a micro-batch of this many items. The given loss is not changed."""
        is_number = not isinstance(items, Tensor)
        if self.is_sum:
            return loss if is_number and items == 1 else loss * items  # a rank without samples counts 0
        assert self.reference is not None
        if items is self.reference or (is_number and items == self.reference):
            return loss if self.length == 1 else loss / self.length
        if is_number and not isinstance(self.reference, Tensor):
            return loss * (items / (self.reference * self.length))
        return loss * as_factor(widened(items) / (self.reference * self.length), loss)

    def add(self, items: Count, items_everywhere: Count | None) -> None:
        """Count the items of a micro-batch, on this rank and on all ranks; None if only a reduction can give the total."""
        self.items = items if not isinstance(self.items, Tensor) and self.items == 0 else self.items + items
        if self.everywhere is not None:
            self.everywhere = None if items_everywhere is None else self.everywhere + items_everywhere

    def correction(self, total: Count | None = None) -> Count | None:
        """Return c for the closing window, or None if it is exactly one. `total` is N if a reduction computed it."""
        if self.is_sum:
            return self.world if self.world > 1 else None
        total = total if total is not None else self.everywhere if self.everywhere is not None else self.items
        if self.reference is None:
            return None
        expected = self.world * self.reference * self.length
        if isinstance(total, Tensor) or isinstance(expected, Tensor):
            return expected / (widened(total).clamp(min=_LEAST) if isinstance(total, Tensor) else total)
        if total == 0 or total == expected:
            return None
        return expected / total

    def state_dict(self) -> dict[str, Count | None]:
        """Return the counts of a window in progress."""
        return {"count": self.count, "items": self.items, "everywhere": self.everywhere, "reference": self.reference}

    def load_state_dict(self, state: dict[str, Count | None]) -> None:
        """Continue a window that a checkpoint interrupted."""
        for name in ("count", "items", "everywhere", "reference"):
            setattr(self, name, state[name])


def share_of(items: Count, total: Count, world: int = 1) -> Count:
    """Return `items` over the items of all ranks, times the number of ranks that average gradients; zero if there are no items."""
    if isinstance(total, Tensor):
        return widened(items) * world / widened(total).clamp(min=_LEAST)
    return widened(items) * world / total if total else 0.0


@overload
def widened(count: Tensor) -> Tensor: ...
@overload
def widened(count: Count) -> Count: ...
def widened(count: Count) -> Count:
    """Return a count whose quotients are exact enough for any loss: torch divides integers in float32."""
    if not isinstance(count, Tensor):
        return count
    return count.to(wide_dtype(count.device))


def as_factor(factor: Count, loss: Tensor) -> Count:
    """Return a factor in the type of the loss, so that the product has this type too."""
    return factor.to(loss.dtype) if isinstance(factor, Tensor) else factor


def scale_gradients(parameters: Iterable[Tensor], factor: Count) -> None:
    """Multiply this rank's part of all gradients by one factor. A tensor factor does not synchronize the host."""
    # Whole and sharded gradients may be mixed.
    grads = [local_part(p.grad) for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


def copy_gradients(parameters: Iterable[Tensor]) -> None:
    """Move all gradients to separate memory, where later ones are added in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
