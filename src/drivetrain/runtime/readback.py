"""Numbers leave the device without making the host wait.

A value is copied to pinned memory behind the kernels that compute it, and an event says when it is there. The host
looks at finished copies only. So that news is at most two pushes old, a third push waits for the first copy: by then
the device has two steps of work in its queue and is never idle for it. On a CPU the number is known at once.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

_MAX_LAG = 2


class AsyncReadback:
    """Scalars on their way from the device to the host, in order.

    >>> readback = AsyncReadback()
    >>> readback.push(torch.tensor(0.5), tag="step 1")
    >>> readback.poll()
    [('step 1', 0.5)]
    """

    def __init__(self, max_lag: int = _MAX_LAG):
        self.max_lag = max_lag
        self._arrived: list[tuple[Any, float]] = []
        self._pending: deque[tuple[Any, Tensor, Any]] = deque()
        self._free: list[tuple[Tensor | None, Any]] = []  # pinned places and events to use again

    def push(self, tensor: Tensor | float, tag: Any = None) -> None:
        """Send a scalar to the host; `tag` comes back with it."""
        if not isinstance(tensor, Tensor):
            self._arrived.append((tag, float(tensor)))
            return
        if tensor.device.type == "cpu":
            self._arrived.append((tag, tensor.item()))
            return
        if len(self._pending) >= self.max_lag:
            self._take(wait=True)
        if not tensor.is_cuda:
            self._pending.append((tag, tensor.detach().clone(), None))  # read when it is old, which costs little
            return
        value = tensor.detach().reshape(1)
        place, event = self._free.pop() if self._free else (None, torch.cuda.Event())
        if place is None or place.dtype != value.dtype:
            place = torch.empty(1, dtype=value.dtype, pin_memory=True)
        place.copy_(value, non_blocking=True)
        event.record()
        self._pending.append((tag, place, event))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._pending

    def poll(self) -> list[tuple[Any, float]]:
        """Return what has arrived since the last call, oldest first, without waiting."""
        while self._pending and self._take(wait=False):
            pass
        arrived, self._arrived = self._arrived, []
        return arrived

    def overdue(self) -> list[tuple[Any, float]]:
        """Return what pushing had to wait for since the last call. Its lag is fixed, so all ranks get the same at the same step."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def drain(self) -> list[tuple[Any, float]]:
        """Wait for everything that was pushed and return it; for the end of an epoch."""
        while self._pending:
            self._take(wait=True)
        return self.poll()

    def _take(self, wait: bool) -> bool:
        tag, place, event = self._pending[0]
        if event is None:
            if not wait:
                return False
        elif wait:
            event.synchronize()
        elif not event.query():
            return False
        self._pending.popleft()
        self._arrived.append((tag, float(place)))
        if event is not None:
            self._free.append((place, event))
        return True
