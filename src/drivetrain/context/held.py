"""Fields of a State that hold given kinds of objects: a file never puts something else there.

A list in a Context grows to its saved length. A tuple of optimizers must not: what a file holds of an optimizer is a
dict, and a dict is none.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.context.codec import join_path
from drivetrain.context.kinds import Kind, Restore, keep
from drivetrain.core.errors import DrivetrainWarning

if TYPE_CHECKING:
    from drivetrain.context.loading import Loading


class HeldKind(Kind):
    """A list or tuple of objects with state, or None where such an object could be."""

    name = "held"

    def fit(self, item: Any, saved: Any, loading: "Loading", path: str) -> Restore:
        if item is None:
            loading.note("unexpected", path, "it was saved with a state, but is None here")
            return keep(None)
        for index, (element, state) in enumerate(zip(item, saved)):
            loading.fit(element, state, join_path(path, index))
        for index in range(len(saved), len(item)):
            loading.note("missing", join_path(path, index))
        for index in range(len(item), len(saved)):
            loading.note("unexpected", join_path(path, index))
        return keep(item)

    def saved_as(self, item: Any) -> str:
        return "nothing there" if item is None else "own state of each"

    def describe(self, item: Any) -> str:
        return ", ".join(type(element).__name__ for element in item or ()) or "none"


class GeneratorsKind(Kind):
    """Generators by name; one that has no saved state keeps its own, one of a device that is not here begins anew."""

    name = "generators"

    def fit(self, item: dict[str, torch.Generator], saved: Any, loading: "Loading", path: str) -> Restore:
        absent = [key for key, state in saved.items() if not _is_available(state)]
        if absent:
            warnings.warn(
                f"{path}: the generators {', '.join(absent)} were saved on a device that is not here; they begin anew.",
                DrivetrainWarning,
                stacklevel=4,
            )
        restores = {}
        for key, state in saved.items():
            if key not in absent:
                live = item.get(key)
                same_place = live is not None and live.device.type == _device_type(state)
                where = join_path(path, key)
                restores[key] = loading.fit(live, state, where) if same_place else loading.build(state, where)

        def restore() -> dict[str, torch.Generator]:
            item.update({key: put() for key, put in restores.items()})
            return item

        return restore

    def saved_as(self, item: Any) -> str:
        return "full state of each"


def _device_type(state: Any) -> str:
    return torch.device(state["value"]["device"]).type


def _is_available(state: Any) -> bool:
    kind = _device_type(state)
    return kind == "cpu" or torch.get_device_module(kind).is_available()
