"""A point in time that long work looks at: between its parts, and inside those that cannot be foreseen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTime(Exception):
    """Work was stopped in its middle, because its time was up."""

    def __init__(self, seconds: float):
        super().__init__(f"stopped after {seconds:.1f} s")
        self.seconds = seconds


class Deadline:
    """A number of seconds from now; None never ends."""

    def __init__(self, seconds: float | None):
        self._begin = time.monotonic()
        self._end = None if seconds is None else self._begin + seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether a part that takes so long would end in time."""
        return self._end is None or time.monotonic() + seconds < self._end

    def left(self) -> float | None:
        """Return the seconds left, at least 0; None where it never ends."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """Raise `OutOfTime` where the time is up."""
        if not self.allows():
            raise OutOfTime(time.monotonic() - self._begin)

    @contextmanager
    def at_least(self, seconds: float) -> Iterator[None]:
        """Move the end for a while, to so many seconds from the beginning, if it is earlier."""
        end = self._end
        if end is not None:
            self._end = max(end, self._begin + seconds)
        try:
            yield
        finally:
            self._end = end
