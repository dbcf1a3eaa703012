"""All values of one metric, at 16 bytes for a number: a run may record one at every step for weeks.

A number is a float64 in an array with the step in another; epochs are kept where they change. Integers and booleans are marked as such,
so that they come back as what they were. Anything else (a text, a matrix) is kept as the object that it is, by its position.
"""

import bisect
from array import array
from typing import Any

from torch import Tensor

FLOAT, INT, BOOL, OBJECT = range(4)
_EXACT = 2**53  # every integer up to here is a float64


class Series:
    """Values of one metric, oldest first, and when each was recorded.

    >>> series = Series()
    >>> for step, value in enumerate([0.5, 3, True, "text"]):
    ...     series.append(value, epoch=1, step=step)
    >>> series.values(), series.moments()[-1], len(series)
    ([0.5, 3, True, 'text'], (1, 3), 4)
    """

    def __init__(self) -> None:
        self.numbers, self.steps = array("d"), array("q")
        self.kinds: bytearray | None = None
        """What each value is; None while all are floats."""
        self.objects: dict[int, Any] = {}
        """Values that are not numbers, by position."""
        self.epochs: list[tuple[int, int]] = []
        """The position from which on values belong to an epoch, and the epoch."""

    def __len__(self) -> int:
        return len(self.numbers)

    def append(self, value: Any, epoch: int, step: int) -> None:
        """Add a value; a number in a tensor on the CPU or in an array becomes a Python number."""
        if type(value) is float:
            self.numbers.append(value)
            if self.kinds is not None:
                self.kinds.append(FLOAT)
        else:
            self.numbers.append(0.0)
            if self.kinds is not None:
                self.kinds.append(FLOAT)
            self.put(len(self.numbers) - 1, value)
        self.steps.append(step)
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((len(self.numbers) - 1, epoch))

    def put(self, position: int, value: Any) -> None:
        """Set a value."""
        value = as_number(value)
        if isinstance(value, bool):
            self._mark(position, BOOL)
        elif isinstance(value, float):
            pass
        elif isinstance(value, int) and -_EXACT <= value <= _EXACT:
            self._mark(position, INT)
        else:
            self._mark(position, OBJECT)
            self.objects[position] = value
            return
        self.numbers[position] = value

    def value(self, position: int) -> Any:
        """Return one value."""
        kind = FLOAT if self.kinds is None else self.kinds[position]
        if kind == OBJECT:
            return self.objects[position]
        number = self.numbers[position]
        return number if kind == FLOAT else int(number) if kind == INT else bool(number)

    def values(self) -> list[Any]:
        """Return all values."""
        return self.numbers.tolist() if self.kinds is None else [self.value(at) for at in range(len(self))]

    def moments(self) -> list[tuple[int, int]]:
        """Return the epoch and the step of each value."""
        ends = [start for start, _ in self.epochs[1:]] + [len(self)]
        return [(epoch, step) for (start, epoch), end in zip(self.epochs, ends) for step in self.steps[start:end]]

    def epochs_from(self, position: int) -> list[tuple[int, int]]:
        """Return where epochs begin in the part from a position on, counted from there."""
        first = bisect.bisect_right(self.epochs, position, key=lambda run: run[0]) - 1
        return [(max(start - position, 0), epoch) for start, epoch in self.epochs[max(first, 0) :]]

    def copy(self) -> "Series":
        """Return a copy that can grow on its own."""
        copied = Series()
        copied.numbers, copied.steps = self.numbers[:], self.steps[:]
        copied.kinds = None if self.kinds is None else self.kinds[:]
        copied.objects, copied.epochs = dict(self.objects), list(self.epochs)
        return copied

    def _mark(self, position: int, kind: int) -> None:
        if self.kinds is None:
            self.kinds = bytearray(len(self.numbers))
        self.kinds[position] = kind


def as_number(value: Any) -> Any:
    """Return the number in a one-element tensor on the CPU or in a numpy scalar; other values are returned, tensors as a copy."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.numel() != 1 or not value.is_cpu or value.is_complex():
            return value.clone()
        return value.item()
    if not isinstance(value, (int, float, str)) and hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        return value.item()
    return float(value) if isinstance(value, float) else value
