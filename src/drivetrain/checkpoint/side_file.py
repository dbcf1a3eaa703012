"""A file next to the checkpoints for what only grows, such as the history of a run: a checkpoint refers to it instead of holding it.

A Context has at most one item of this kind, as `_side_file`. While a checkpoint is taken, its `state_dict` returns a reference that rank 0
prepared; what the reference covers is written and flushed before the checkpoint becomes valid.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from drivetrain.checkpoint.exchange import Exchange
from drivetrain.checkpoint.writer import WriteFailedError


class SideFile(Protocol):
    """An item whose values are in a file of the checkpoints' folder."""

    def prepare_side_file(self, folder: Path) -> tuple[Any, Callable[[], None]]:
        """Return the reference to all values up to now, and what writes and flushes them."""

    def referring_to(self, reference: Any) -> AbstractContextManager[None]:
        """Let `state_dict` return this reference."""

    def reading_from(self, folder: Path) -> AbstractContextManager[None]:
        """Let `load_state_dict` look up references in a folder."""


@contextmanager
def referring(source: Any, folder: Path | None, exchange: Exchange) -> Iterator[Callable[[], None] | None]:
    """Take a state with a reference to the side file, if there is one; gives what writes that file on rank 0."""
    item: SideFile | None = getattr(source, "_side_file", None)
    if item is None or folder is None:
        yield None
        return
    write: Callable[[], None] | None = None

    def prepare() -> Any:
        nonlocal write
        if exchange.rank:
            return None
        reference, write = item.prepare_side_file(folder)
        return reference

    outcome = exchange.attempt(prepare)
    if outcome.problems:
        raise WriteFailedError(f"no checkpoint was saved in {folder}: {outcome.explain()}.") from outcome.own
    with item.referring_to(outcome.results[0]):
        yield write


def reading_from(source: Any, folder: Path) -> AbstractContextManager[None]:
    """Load a state whose side file is in this folder."""
    item: SideFile | None = getattr(source, "_side_file", None)
    return nullcontext() if item is None else item.reading_from(folder)
