"""Batches on their way to the device, a few ahead of the one in use, and the progress bar of a hand-written loop.

The copy of the next batch runs on a side stream from page-locked memory, while the device works on this one. Before a batch is yielded,
the consumer's stream waits for its copy; before a copy begins, the side stream waits for what the consumer has queued so far, so
that memory of batches that are no longer in use is not written too early. (Recording every tensor on the consumer's stream would do the
same at three times the cost.) The host waits for neither. On the CPU nothing of this exists: the loader does not come here.
"""

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from drivetrain.context.moving import move_to_device
from drivetrain.core.containers import leaves
from drivetrain.core.types import Batch
from drivetrain.data.order import BatchInfo, Pairs
from drivetrain.runtime.device import PINNED
from drivetrain.runtime.ranks import is_master


def to_device(pairs: Pairs, device: torch.device, depth: int) -> Pairs:
    """Yield the batches on `device`, with `depth` more of them already on their way."""
    if device.type not in PINNED:
        return ((info, move_to_device(device, batch)) for info, batch in pairs)
    if depth == 0:
        return ((info, move_to_device(device, pin(batch), non_blocking=True)) for info, batch in pairs)
    return _ahead(pairs, device, depth)


def _ahead(pairs: Pairs, device: torch.device, depth: int) -> Pairs:
    """Copy on a stream of its own, ordered with the consumer's stream by events."""
    # Streams and events of one family: a generic torch.Stream ignores the events of a backend.
    module = torch.get_device_module(device)
    side, queued = module.Stream(device), module.Event()
    spare: list[torch.Event] = []
    under_way: deque[tuple[BatchInfo, Batch, torch.Event]] = deque()
    for pair in itertools.chain(pairs, itertools.repeat(None, depth)):
        if pair is not None:
            pinned = pin(pair[1])
            sent = spare.pop() if spare else module.Event()
            queued.record(module.current_stream(device))
            side.wait_event(queued)
            with module.stream(side):
                moved = move_to_device(device, pinned, non_blocking=True)
            sent.record(side)
            under_way.append((pair[0], moved, sent))
        if under_way and (pair is None or len(under_way) > depth):
            info, moved, sent = under_way.popleft()
            module.current_stream(device).wait_event(sent)
            spare.append(sent)  # the wait refers to this recording; the event may be recorded again
            yield info, moved


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
    """Return whether a bar would be seen: this is rank 0, and the output is a terminal."""
    return is_master() and sys.stdout is not None and sys.stdout.isatty()
