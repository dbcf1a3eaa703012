"""Batches on their way to the device, a few ahead of the one in use, and the progress bar of a hand-written loop.

The copy of the next batch runs on a side stream from page-locked memory, while the device works on this one. Before a batch is handed
out, the consumer's stream waits for its copy; before a copy begins, the side stream waits for what the consumer has queued so far, so
that memory of batches that are no longer in use is not written too early. (Recording every tensor on the consumer's stream would do the
same at three times the cost.) The host waits for neither. On the CPU nothing of this exists: the loader does not come here.
"""

import sys
import time
from collections import deque
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from drivetrain.context.moving import move_to_device
from drivetrain.core.containers import leaves
from drivetrain.core.types import Batch
from drivetrain.data.order import BatchInfo, Pairs
from drivetrain.runtime.ranks import is_master


def to_device(pairs: Pairs, device: torch.device, depth: int) -> Pairs:
    """Yield the batches on `device`, with `depth` more of them already on their way."""
    if device.type == "cpu":
        return ((info, move_to_device(device, batch)) for info, batch in pairs)
    module = torch.get_device_module(device)
    if depth == 0 or not all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        return ((info, move_to_device(device, pin(batch), non_blocking=True)) for info, batch in pairs)
    return _ahead(pairs, _SideStream(module, device), depth)


def _ahead(pairs: Pairs, side: "_SideStream", depth: int) -> Pairs:
    under_way: deque[tuple[BatchInfo, Batch, torch.Event]] = deque()
    for info, batch in pairs:
        under_way.append((info, *side.send(batch)))
        if len(under_way) > depth:
            ready, moved, sent = under_way.popleft()
            yield ready, side.receive(moved, sent)
    while under_way:
        ready, moved, sent = under_way.popleft()
        yield ready, side.receive(moved, sent)


class _SideStream:
    """Copies on a stream of their own, ordered with the consumer's stream by events."""

    def __init__(self, module: ModuleType, device: torch.device):
        # Streams and events of one family: a generic torch.Stream ignores the events of a backend.
        self.module, self.device = module, device
        self.stream = module.Stream(device)
        self.new_event = module.Event
        self.queued = module.Event()
        self.spare: list[torch.Event] = []

    def send(self, batch: Batch) -> tuple[Batch, torch.Event]:
        """Start the copy of a batch; return it with the event that says when it has arrived."""
        pinned = pin(batch)
        sent = self.spare.pop() if self.spare else self.new_event()
        self.queued.record(self.module.current_stream(self.device))
        self.stream.wait_event(self.queued)
        with self.module.stream(self.stream):
            moved = move_to_device(self.device, pinned, non_blocking=True)
        sent.record(self.stream)
        return moved, sent

    def receive(self, moved: Batch, sent: torch.Event) -> Batch:
        """Let the consumer's stream wait for the copy, and hand the batch out."""
        self.module.current_stream(self.device).wait_event(sent)
        self.spare.append(sent)  # the wait refers to this recording; the event may be recorded again
        return moved


def pin(batch: Batch) -> Batch:
    """Return the batch in page-locked memory; one that is there, or on a device already, is returned as it is."""
    tensors = list(leaves(batch, Tensor))
    if all(tensor.is_pinned() for tensor in tensors) or any(tensor.device.type != "cpu" for tensor in tensors):
        return batch
    return pin_memory(batch)


# ---------------------------------------------------------------------- a progress bar for hand-written loops
#
# On rank 0 and on a terminal. It counts batches, refreshes by time and reads no tensor. `rich` is imported when a bar is first shown.

REFRESH_SECONDS = 0.1

_shown = False  # a terminal has room for one live display; a loop inside a loop goes without


def with_bar(batches: Iterator[object], start: int, total: int | None, text: str) -> Iterator[Batch]:
    """Yield the batches, and show how many of `total` are done; `start` of them were done before."""
    global _shown
    if _shown or not bar_is_wanted():
        yield from batches
        return
    from rich import progress

    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    columns = ("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn(), *times)
    _shown = True
    try:
        with progress.Progress(*columns, auto_refresh=False) as bar:
            task = bar.add_task(text, total=total, completed=start)
            done, shown_at = start, 0.0
            for batch in batches:
                now = time.perf_counter()
                if now - shown_at > REFRESH_SECONDS:
                    bar.update(task, completed=done, refresh=True)
                    shown_at = now
                yield batch
                done += 1
            bar.update(task, completed=done, refresh=True)
    finally:
        _shown = False


def bar_is_wanted() -> bool:
    """Whether anybody would see a bar: this is rank 0, and the output is a terminal."""
    return is_master() and sys.stdout is not None and sys.stdout.isatty()
