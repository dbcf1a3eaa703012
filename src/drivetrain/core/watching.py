"""Strict mode: after a plugin that may only watch, the state must be what it was.

Two things are compared: which object each field of the state holds, and how often the tensors behind them were written
in place. Tensors are recognised by their version counter, so that this file needs no torch.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from drivetrain.core.binding import Binding
from drivetrain.core.errors import EngineError

_COUNTED = ("batch", "outputs", "loss")
_ABSENT = object()
Snapshot = dict[tuple[str, str], Any]
"""A value for each field of the state and path inside it."""

# What a name in `writes` covers besides the field of that name.
_COVERS: Mapping[str, tuple[str, ...]] = {
    "outputs": ("outputs", "output", "batch_output"),
    "loss": ("loss", "batch_output", "total_loss_dict"),
    "model": ("model", "parameters"),
    "dataloader": ("dataloader", "dataloader_len", "dataloader_label", "train_dataloader", "evaluators"),
    "timestamp": ("timestamp", "clock", "max_duration"),
}


def watched(act: Callable[[], Any], binding: Binding, state: object) -> Callable[[], Any]:
    """Return `act`, which raises if it changes a part of the state that its plugin does not list in `writes`."""
    writes = tuple(getattr(binding.plugin, "writes", ()))
    allowed = {field for name in writes for field in _COVERS.get(name, (name,))}

    def call() -> Any:
        fields, versions = _fields(state), dict(_versions(state))
        result = act()
        changed = _differing(fields, _fields(state), operator.is_) + _differing(
            versions, dict(_versions(state)), operator.eq
        )
        for field, what in changed:
            if field not in allowed:
                raise EngineError(
                    f"{binding.name} changed state.{what} at {binding.event.name}, but callbacks only watch. "
                    f"Write it as an Algorithm, or declare it: writes = {(*writes, field)!r}."
                )
        return result

    return call


def _fields(state: object) -> Snapshot:
    return {(name, name): value for name, value in vars(state).items() if not name.startswith("_")}


def _versions(state: object) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the version of every tensor that a watcher could write in place, under its field and its path."""
    for name in _COUNTED:
        for path, tensor in _tensors(getattr(state, name, None), name):
            yield (name, path), tensor._version
    named_parameters = getattr(getattr(state, "model", None), "named_parameters", None)
    if named_parameters is not None:
        for name, parameter in named_parameters():
            gradient = parameter.grad
            yield ("model", f"model.{name}"), parameter._version
            yield ("grads", f"model.{name}.grad"), (id(gradient), None if gradient is None else gradient._version)


def _tensors(value: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(getattr(value, "_version", None), int):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _tensors(item, f"{path}[{place}]")


def _differing(old: Snapshot, new: Snapshot, same: Callable[[Any, Any], bool]) -> list[tuple[str, str]]:
    """Return field and path of every entry that came, went or is not the same."""
    return [key for key in {**old, **new} if not same(old.get(key, _ABSENT), new.get(key, _ABSENT))]
