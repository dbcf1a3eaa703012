"""What a Context can do with an item: the base of all kinds.

A Context holds modules, optimizers, numbers, containers, anything. Each kind of item has one handler, and a handler
answers five questions: is this item mine, how does it move, how is it wrapped, what is its state, and does a saved
state fit. The base does nothing and has no state, so a handler defines only what its kind has. `loading.py` lists the
handlers.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from drivetrain.core.types import Item, Saved

if TYPE_CHECKING:
    import torch

    from drivetrain.context.context import DataParallel, Move, Shard
    from drivetrain.context.loading import Loading, Saving

Restore = Callable[[], Any]
"""Restores a saved state and returns the item; called only when everything fits."""


class Kind:
    """One kind of item."""

    name = "object"
    is_container = False
    saves_itself = False
    """Whether `save` is asked; otherwise the codec packs the item."""

    def holds(self, item: object) -> bool:
        """Return whether an item is of this kind."""
        raise NotImplementedError

    def children(self, item: Item) -> Iterable[tuple[object, object]]:
        """Return names and values of what a container holds."""
        return ()

    def rebuild(self, item: Item, change: Callable[[Any], object]) -> Item:
        """Change every child of a container and return it: the same object where it can be changed in place."""
        raise NotImplementedError

    def has_state(self, item: Item) -> bool:
        """Return whether the item holds state of its own, which must not be dropped or invented."""
        return False

    def move(self, item: Item, job: "Move") -> Item:
        """Return the item on the job's device."""
        return item

    def ddp(self, item: Item, job: "DataParallel") -> Item:
        """Return the item made ready for several processes."""
        return item

    def fsdp(self, item: Item, job: "Shard") -> Item:
        """Return the item with its parameters split over the processes."""
        return item

    def save(self, item: Item, saving: "Saving", path: str) -> Saved:
        """Return the item's state as plain data and tensors."""
        raise NotImplementedError

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        """Compare a saved state with the item, note what is wrong, and return what restores it; changes nothing."""
        raise NotImplementedError

    def describe(self, item: Item) -> str:
        """Name the item for `explain`."""
        return type(item).__name__

    def wrapper(self, item: Item) -> str | None:
        """Name what the item is wrapped in, or None."""
        return None

    def saved_as(self, item: Item) -> str:
        """Return whether and how the item is saved, for `explain`."""
        return "entry by entry" if self.is_container else "value"

    def device(self, item: Item) -> "torch.device | None":
        """Return where the item is, or None when that has no meaning."""
        return None


def keep(item: object) -> Restore:
    """Return a restore that leaves the item as it is."""
    return lambda: item


class ItemHolder:
    """What the kinds and the walks need of a `Context`, the one class that is this."""

    _device: "torch.device | None" = None
    _warned: frozenset[str] = frozenset()
    """Paths that a warning has named already."""

    def _items(self) -> dict[str, Item]:
        """Return the registered items by name."""
        raise NotImplementedError

    def _saved_items(self) -> dict[str, Item]:
        """Return those items that are part of the state."""
        raise NotImplementedError

    def _own_kind(self, name: str, item: object) -> Kind | None:
        """Return the way a subclass has of saving and restoring the item of that name, or None for the item's own kind."""
        return None
