"""What a Context can do with an item: the base of all kinds, and the kinds that fields of a State need.

Each kind of item has one handler, which answers five questions: is this item mine, how does it move, how is it wrapped, what is its state,
and does a saved state fit. The base does nothing and has no state, so a handler defines only what its kind has. `loading.py` lists them.

A run may be continued with other plugins: what is new or missing is named in a warning, except an algorithm without which the saved model
cannot be loaded. A list in a Context grows to its saved length; a tuple of optimizers does not, since a file holds no optimizer.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.containers import join_path
from drivetrain.core.errors import warn
from drivetrain.core.types import Item, Saved, StateDict

if TYPE_CHECKING:
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

    def device(self, item: Item) -> torch.device | None:
        """Return where the item is, or None when that has no meaning."""
        return None


def keep(item: object) -> Restore:
    """Return a restore that leaves the item as it is."""
    return lambda: item


class ItemHolder:
    """What the kinds and the walks need of a `Context`, the one class that is this."""

    _device: torch.device | None = None
    _warned: frozenset[str] = frozenset()
    """Paths that a warning has named already."""

    def _items(self) -> dict[str, Item]:
        """Return the registered items by name."""
        raise NotImplementedError

    def _saved_items(self) -> dict[str, Item]:
        """Return those items that are part of the state."""
        raise NotImplementedError

    def _needs_no_warning(self, path: str) -> None:
        """Take an item as named already."""
        self._warned |= {path}

    def _own_kind(self, name: str, item: object) -> Kind | None:
        """Return the way a subclass has of saving and restoring the item of that name, or None for the item's own kind."""
        return None


class PluginsKind(Kind):
    """A list or tuple of plugins, matched by class name and order of appearance."""

    name = "plugins"
    saves_itself = True

    def save(self, item: Item, saving: "Saving", path: str) -> list[StateDict]:
        return [
            {
                "name": type(plugin).__name__,
                "config": saving.pack(plugin.config() if hasattr(plugin, "config") else {}, join_path(path, name)),
                "state": saving.pack(_state(plugin), join_path(path, name)),
                "required": bool(getattr(plugin, "required_on_load", lambda: False)()),
            }
            for name, plugin in _numbered(item).items()
        ]

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        entries, live = _numbered(saved, [entry["name"] for entry in saved]), _numbered(item)
        for name, plugin in live.items():
            where = join_path(path, name)
            if name in entries and hasattr(plugin, "load_state_dict"):
                loading.try_to_load(where, plugin, loading.unpack(entries[name]["state"], partial(_state, plugin)))
            elif name not in entries and _state(plugin):
                warn(f"{where} is new: it has no saved state and starts from the beginning.")
        for name in [name for name in entries if name not in live]:
            entry, where = entries[name], join_path(path, name)
            if entry.get("required"):
                advice = f"Add {entry['name']}(**{entry['config']}) again before loading"
                loading.note("unexpected", where, f"the saved model was made with it. {advice}")
            elif entry["state"]:
                warn(f"{where} was saved with a state, but is not part of this run: its state is not used.")
        return keep(item)

    def saved_as(self, item: object) -> str:
        return "name, settings and state of each"

    def describe(self, item: Item) -> str:
        return ", ".join(type(plugin).__name__ for plugin in item) or "none"


def _numbered(values: Sequence[Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return values by unique names, by default of their classes: `EMA`, `EMA#2`, ..."""
    names = [type(value).__name__ for value in values] if names is None else names
    counts = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return {name if count == 1 else f"{name}#{count}": value for name, count, value in zip(names, counts, values)}


def _state(plugin: object) -> object:
    return plugin.state_dict() if hasattr(plugin, "state_dict") else {}


class HeldKind(Kind):
    """A list or tuple of objects with state, or None where such an object could be."""

    name = "held"

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        if item is None:
            loading.note("unexpected", path, "it was saved with a state, but is None now")
            return keep(None)
        for index, (element, state) in enumerate(zip(item, saved)):
            loading.fit(element, state, join_path(path, index))
        for index in range(len(saved), len(item)):
            loading.note("missing", join_path(path, index))
        for index in range(len(item), len(saved)):
            loading.note("unexpected", join_path(path, index))
        return keep(item)

    def saved_as(self, item: object) -> str:
        return "nothing there" if item is None else "own state of each"

    def describe(self, item: Item) -> str:
        return ", ".join(type(element).__name__ for element in item or ()) or "none"


class GeneratorsKind(Kind):
    """Generators by name; one that has no saved state keeps its own, one of a device that is not here starts again."""

    name = "generators"

    def fit(self, item: dict[str, torch.Generator], saved: Saved, loading: "Loading", path: str) -> Restore:
        types = {key: torch.device(state["value"]["device"]).type for key, state in saved.items()}
        absent = [
            key for key, type in types.items() if type != "cpu" and not torch.get_device_module(type).is_available()
        ]
        if absent:
            warn(
                f"{path}: the generators {', '.join(absent)} were saved on a device that this machine does not have; they start from "
                "their seeds."
            )
        restores = {}
        for key, state in saved.items():
            if key not in absent:
                live = item.get(key)
                same_device = live is not None and live.device.type == types[key]
                where = join_path(path, key)
                restores[key] = loading.fit(live, state, where) if same_device else loading.build(state, where)

        def restore() -> dict[str, torch.Generator]:
            item.update({key: put() for key, put in restores.items()})
            return item

        return restore

    def saved_as(self, item: object) -> str:
        return "full state of each"
