"""A progress bar for hand-written loops: on rank 0, on a terminal, and never in the way.

The bar counts batches, refreshes by time, and reads no tensor. It is drawn by `rich`, which is imported when a bar is first shown.
"""

import sys
import time
from collections.abc import Iterator

from drivetrain.core.types import Batch
from drivetrain.runtime.ranks import is_master

REFRESH_SECONDS = 0.1

_shown = False  # a terminal has room for one live display; a loop inside a loop goes without


def with_bar(batches: Iterator[object], start: int, total: int | None, text: str) -> Iterator[Batch]:
    """Yield the batches, and show how many of `total` are done; `start` of them were done before."""
    global _shown
    if _shown or not bar_is_wanted():
        yield from batches
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    _shown = True
    try:
        with Progress(*columns, auto_refresh=False) as bar:
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
