"""All values of one metric, at 16 bytes for a number: a run may record one at every step for weeks.

A number is a float64 in an array with the step in another; epochs are kept where they change. Integers, booleans and numbers in tensors are
marked as such with one more byte, so that they come back as what they were, tensors on the CPU. Anything else (a text, a matrix) is kept
as the object that it is, by its position.
"""

import bisect
from array import array
from typing import Any

import torch
from torch import Tensor

FLOAT, INT, BOOL, OBJECT, TENSOR = 0, 1, 2, 3, 16
"""What a value is; a number in a tensor is TENSOR plus the place of its dtype in this list."""
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
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
        """Add a value; a number of numpy becomes one of Python."""
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

    def put(self, position: int, value: Any, dtype: torch.dtype | None = None) -> None:
        """Set a value; with a dtype, to a number that was in a tensor of it."""
        if isinstance(value, Tensor):
            value = value.detach()
            if value.numel() == 1 and value.is_cpu and value.dtype in DTYPES:
                value, dtype = value.item(), value.dtype
            else:
                value = value.clone()
        elif not isinstance(value, int | float | str) and hasattr(value, "dtype") and not getattr(value, "shape", True):
            value = value.item()
        if not isinstance(value, int | float) or (isinstance(value, int) and not -_EXACT <= value <= _EXACT):
            self._mark(position, OBJECT)
            self.objects[position] = value if dtype is None else torch.tensor(value, dtype=dtype)
            return
        self.numbers[position] = value
        if dtype is not None:
            self._mark(position, TENSOR + DTYPES.index(dtype))
        elif not isinstance(value, float):
            self._mark(position, BOOL if isinstance(value, bool) else INT)

    def value(self, position: int) -> Any:
        """Return one value."""
        kind = FLOAT if self.kinds is None else self.kinds[position]
        if kind == OBJECT:
            return self.objects[position]
        number = self.numbers[position]
        if kind >= TENSOR:
            return torch.tensor(number, dtype=DTYPES[kind - TENSOR])
        return number if kind == FLOAT else int(number) if kind == INT else bool(number)

    def values(self) -> list[Any]:
        """Return all values."""
        if self.kinds is None:
            return self.numbers.tolist()
        kind = self.kinds[0] if self.kinds else FLOAT
        if kind >= TENSOR and self.kinds.count(kind) == len(self):
            return list(torch.tensor(self.numbers, dtype=torch.float64).to(DTYPES[kind - TENSOR]).unbind())
        return [self.value(at) for at in range(len(self))]

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
