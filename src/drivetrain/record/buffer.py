"""Values on their way from a device to the host: copied aside at once, read many at a time; and histograms, counted there.

A recorded value is copied into the next place of a page on its own device, behind the kernel that computes it, so the host does not wait
and later changes in place do not alter it. One transfer to pinned memory carries a whole page, and an event says when it has arrived. A
place has eight bytes and is seen through the dtype of its value. Histograms keep limits and counts as tensors, since `torch.histc` and
`bincount` would read them on the host, and work through large tensors in pieces.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.core.arguments import check_count
from drivetrain.core.errors import ConfigError
from drivetrain.runtime.device import wide_dtype

PLACES = 1024
_WIDTH = 8
_PLAIN = frozenset(
    getattr(torch, name)
    for name in "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()
)

Number = bool | int | float
Key = tuple[torch.device, int | None]
"""A device, and the identity of its stream where it has streams."""


class _Page:
    """Places for values of one device, in the order of one stream."""

    def __init__(self, key: Key, device: torch.device, stream: torch.cuda.Stream | None):
        self.key, self.stream, self.used = key, stream, 0
        with torch.inference_mode(False):  # else the page could not be written outside of it
            self.memory = torch.empty(PLACES * _WIDTH, dtype=torch.uint8, device=device)
            self.host = torch.empty(PLACES * _WIDTH, dtype=torch.uint8, device="cpu", pin_memory=stream is not None)
        self._places: dict[torch.dtype, tuple[Tensor, ...]] = {}
        self._values: dict[torch.dtype, list[Number]] = {}

    def put(self, value: Tensor) -> "BufferSlot":
        places = self._places.get(value.dtype)
        if places is None:
            with torch.inference_mode(False):
                places = _seen_as(self.memory, value.dtype).unbind()
            self._places[value.dtype] = places
        places[self.used].copy_(value)
        self.used += 1
        return BufferSlot(self, self.used - 1, value.dtype)

    def send(self) -> torch.cuda.Event | None:
        """Start the transfer of what has been put; return the event that says when it has arrived, or None."""
        self._values.clear()
        size = self.used * _WIDTH
        if self.stream is None:
            return None
        with torch.cuda.stream(self.stream):
            self.host[:size].copy_(self.memory[:size], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def read(self, index: int, dtype: torch.dtype) -> Number:
        values = self._values.get(dtype)
        if values is None:
            if self.stream is None and not self._values:  # no events here: this waits for the device
                self.host.copy_(self.memory)
            values = self._values[dtype] = _seen_as(self.host, dtype).tolist()
        return values[index]


def _seen_as(memory: Tensor, dtype: torch.dtype) -> Tensor:
    return memory.view(dtype)[:: _WIDTH // dtype.itemsize]


class BufferSlot(NamedTuple):
    """A number that is on its way; `read()` it when its arrival is ready."""

    page: _Page
    place: int
    dtype: torch.dtype

    def read(self) -> Number:
        """Return the number."""
        return self.page.read(self.place, self.dtype)


class Arrival:
    """What was put into a buffer up to one moment."""

    def __init__(self, buffer: "DeviceBuffer", pages: list[_Page], events: list[torch.cuda.Event]):
        self._buffer, self._pages, self._events = buffer, pages, events

    def is_ready(self) -> bool:
        """Return whether everything can be read, without waiting."""
        while self._events and self._events[-1].query():
            self._events.pop()
        return not self._events

    def wait(self) -> None:
        """Wait for the transfers; here the host waits for the device."""
        for event in self._events:
            event.synchronize()
        self._events.clear()

    def release(self) -> None:
        """Give the pages back; slots of this arrival are then void."""
        self._buffer._reuse(self._pages)
        self._pages = []


class DeviceBuffer:
    """Keeps copies of device values until they are read together.

    >>> buffer = DeviceBuffer()
    >>> value = torch.tensor(0.5)
    >>> slot = buffer.put(value)
    >>> arrival = buffer.send(); arrival.wait()
    >>> slot.read()
    0.5
    """

    def __init__(self) -> None:
        self._open: dict[Key, _Page] = {}
        self._full: list[_Page] = []
        self._free: dict[Key, list[_Page]] = {}
        self._events: list[torch.cuda.Event] = []

    def put(self, value: Tensor) -> BufferSlot:
        """Copy a tensor of one element aside; its device is not waited for."""
        value = value.detach()
        if value.dim():
            value = value.reshape(())
        if value.dtype not in _PLAIN:
            value = value.float()
        stream = torch.cuda.current_stream(value.device) if value.is_cuda else None
        # Cheaper to compare than the stream itself.
        key = value.device, None if stream is None else stream.cuda_stream
        page = self._open.get(key)
        if page is None:
            free = self._free.get(key)
            page = self._open[key] = free.pop() if free else _Page(key, value.device, stream)
        slot = page.put(value)
        if page.used == PLACES:
            self._send(self._open.pop(key))
        return slot

    def keep(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor of any size that can be read when the next `send` has arrived."""
        value = value.detach()
        if not value.is_cuda:
            return value.clone() if value.device.type == "cpu" else value.cpu()
        host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        host.copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(value.device))
        self._events.append(event)
        return host

    def send(self) -> Arrival:
        """Start the transfer of everything put or kept since the last call."""
        for page in self._open.values():
            self._send(page)
        self._open.clear()
        arrival = Arrival(self, self._full, self._events)
        self._full, self._events = [], []
        return arrival

    def _send(self, page: _Page) -> None:
        event = page.send()
        self._full.append(page)
        if event is not None:
            self._events.append(event)

    def _reuse(self, pages: list[_Page]) -> None:
        for page in pages:
            page.used = 0
            self._free.setdefault(page.key, []).append(page)


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
    check_count("bins", bins)
    if values.is_complex():
        raise ConfigError("cannot make a histogram of complex values; record their real part or their size (abs).")
    flat = values.detach().to_dense().reshape(-1)
    kind = wide_dtype(flat.device)
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
