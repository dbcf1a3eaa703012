"""A unit's accumulation window: the library's one accumulation rule, with weights that count from one.

The gradient of a window is sum(w_i g_i) / sum(w_i). Each backward gets its loss times w_i / n, with n the window's full
length; when it closes, gradients are multiplied once by n / sum(w), and only if that is not one. So a full window of equal
weights costs a division of each loss and nothing else, and a short window, a skipped batch or unequal weights come out right.
"""

from typing import Any

from torch import Tensor

from drivetrain.module.accumulation import AccumulationWindow, as_factor

Weight = float | Tensor | None
"""What a batch counts for; None means one, on every rank."""


class UnitWindow(AccumulationWindow):
    """The batches that make up one update of a unit.

    >>> window = UnitWindow(length=4)
    >>> window.add(None); window.add(None); window.correction()
    2.0
    """

    __slots__ = ()

    def __init__(self, length: int = 1, world: int = 1):
        super().__init__(length, world)
        self.reference = 1.0
        self.is_plain = False  # even a single batch may come in weighted parts

    def scaled(self, loss: Tensor, weight: Weight) -> Tensor:
        """Return the loss to back-propagate; the given one is never changed."""
        if self.is_sum:
            return loss if weight is None else loss * weight
        if weight is None or (not isinstance(weight, Tensor) and weight == 1.0):
            return loss if self.length == 1 else loss / self.length
        return loss * as_factor(weight / self.length, loss)

    def add(self, weight: Weight) -> None:
        """Count a batch that was back-propagated."""
        self.count += 1
        if weight is None:
            self.items = self.items + 1
            if self.everywhere is not None:
                self.everywhere = self.everywhere + self.world
            return
        self.items = self.items + weight
        if self.world > 1:
            self.everywhere = None  # only a reduction can tell what the other ranks had
        elif self.everywhere is not None:
            self.everywhere = self.everywhere + weight

    @property
    def needs_total(self) -> bool:
        """Say whether the sum of weights has to be reduced over ranks."""
        return self.everywhere is None and not self.is_sum

    def saved(self) -> dict[str, Any]:
        """Return the counts of a window in progress."""
        return {"batches": self.count, "weight": self.items, "weight_everywhere": self.everywhere}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on with a window that a checkpoint interrupted."""
        self.count = int(saved["batches"])
        self.items = saved["weight"]
        self.everywhere = saved["weight_everywhere"]
