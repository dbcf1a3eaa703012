"""Attributes that change in training and that no `state_dict` holds: a number that a module counts, a queue of tensors, a generator.

The parts of a session are watched from the moment it gets them: modules of the model and the loss, other losses that are objects, and
schedulers without a state of their own. Their attributes as they were then are known by digests. What is different when a state is taken
is a part of the state. What is different but cannot be saved is named in a warning, once. Callbacks and algorithms save what they return
from `state_dict`, because a count of theirs may be meant for one process only.

Not state: parameters, modules, functions, results that still have a graph, and what `nn.Module` itself keeps. Objects that a part holds
are parts too if their class comes from the same package, which leaves out writers, trackers and trainers. Every rank saves its own, as
they may see different data. Nothing happens in a step.
"""

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, MutableSet, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.context.kinds import ItemHolder, Kind, Restore, keep
from drivetrain.context.values import restore_tensor
from drivetrain.core.containers import join_path, leaves
from drivetrain.core.errors import warn
from drivetrain.core.types import Item, Saved, StateDict
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.wrapping import clean_key, inner_attribute, unwrap
from drivetrain.runtime.codec import pack
from drivetrain.runtime.coders import PLAIN, generator_kind
from drivetrain.runtime.collectives import bytes_of

if TYPE_CHECKING:
    from drivetrain.context.loading import Loading, Saving

_OF_TORCH = frozenset(vars(nn.Module())) | {"training"}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, types.ModuleType)
_NEVER = (nn.Parameter, nn.Module, Optimizer, type, weakref.ref, *_FUNCTIONS)
_CONTAINERS = (list, tuple, dict, set, deque, Mapping, np.ndarray)
_DEPTH = 3  # objects in objects of a part
_NOT_STATE = ""


class PlainAttributes:
    """What the attributes of a session's parts were when it got them."""

    def __init__(self) -> None:
        self._start: MutableMapping[object, dict[str, str]] = WeakIdKeyDictionary()
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return PlainAttributes, ()  # the parts of a copy are not known to it

    def watch(self, session: ItemHolder) -> None:
        """Take down the attributes of all parts that are new. One that can be saved needs no warning that it has no `state_dict`."""
        for path, part in _parts(session):
            if part in self._start:
                continue
            start = self._start[part] = {name: _digest(value) for name, value in _attributes(part)}
            if not any(digest.startswith("?") for digest in start.values()):
                session._needs_no_warning(path)

    def changed(self, session: ItemHolder) -> Iterator[tuple[str, str, object, bool]]:
        """Yield path, name and value of each attribute that has changed, and whether it is new. What cannot be saved is named."""
        for path, part in _parts(session):
            start = self._start.get(part)
            if start is None:
                continue
            for name, value in _attributes(part):
                digest = _digest(value)
                if digest in (_NOT_STATE, start.get(name)):
                    continue
                if not digest.startswith("?"):
                    yield path, name, value, name not in start
                else:
                    self._warn(path, name, part, value)

    def _warn(self, path: str, name: str, part: object, value: object) -> None:
        place = join_path(path, name)
        is_own = isinstance(value, _CONTAINERS) or _is_of_package(value, part)
        if place in self._warned or name.startswith("_") or not is_own:
            return
        self._warned.add(place)
        advice = (
            "register_buffer, or get_extra_state and set_extra_state" if isinstance(part, nn.Module) else "state_dict"
        )
        warn(
            f"{place} of {type(part).__name__} has changed since the run began, and a {type(value).__name__} like this cannot be saved: a "
            f"resumed run begins with another one. Keep it as numbers or tensors, or save it with {advice}."
        )


class AttributesKind(Kind):
    """The attributes of a session's parts that have changed."""

    name = "attributes"
    saves_itself = True

    def save(self, item: PlainAttributes, saving: "Saving", path: str) -> Saved:
        saved: dict[str, StateDict] = {}
        for part, name, value, is_new in item.changed(saving._root):
            where = join_path(part, name)
            device = next((tensor.device.type for tensor in leaves(value, Tensor)), "cpu")
            entry = {"value": saving.pack(value, where), "device": device, "is_new": is_new}
            saved.setdefault(part, {})[name] = entry
        return saved

    def fit(self, item: PlainAttributes, saved: Saved, loading: "Loading", path: str) -> Restore:
        parts = dict(_parts(loading._root))
        places: list[tuple[object, str, object, object]] = []
        for part_path, entries in saved.items():
            part = parts.get(part_path)
            if part is None and part_path.partition(".")[0] == "schedulers":
                continue  # a run may be continued with another one
            held = {} if part is None else dict(_attributes(part))
            for name, entry in entries.items():
                if part is None or not (name in held or entry["is_new"]):
                    warn(f"{join_path(part_path, name)} was saved and is not there now: its value is not used.")
                else:
                    live = held.get(name)
                    value = loading.unpack(entry["value"], functools.partial(held.get, name))
                    device = loading._root._device if entry["device"] != "cpu" else None
                    places.append((part, name, live, _copied(value, device)))

        def restore() -> object:
            for part, name, live, value in places:
                _put(part, name, live, value)
            return item

        return restore if places else keep(item)

    def saved_as(self, item: object) -> str:
        return "what has changed since the session got its parts"


def _parts(session: ItemHolder) -> Iterator[tuple[str, Item]]:
    """Yield path and object of each part."""
    items, seen = session._items(), set[int]()
    for path, owner in _owners(items):
        if isinstance(owner, nn.Module):
            root = unwrap(owner)
            named = list(root.named_modules())
            shells = {name for name, module in named if inner_attribute(module) is not None}
            for name, module in named:
                if name not in shells:
                    where = clean_key(root, name) if shells else name
                    yield from _with_held(join_path(path, where) if name else path, module, seen, _DEPTH)
        elif hasattr(owner, "__dict__") and not isinstance(owner, _NEVER):
            yield from _with_held(path, owner, seen, _DEPTH)


def _owners(items: Mapping[str, Item]) -> Iterator[tuple[str, Item]]:
    yield "model", items.get("model")
    yield "loss_fn", items.get("loss_fn")
    for index, scheduler in enumerate(items.get("schedulers") or ()):
        if not hasattr(scheduler, "state_dict"):
            yield f"schedulers.{index}", scheduler


def _with_held(path: str, part: Item, seen: set[int], depth: int) -> Iterator[tuple[str, Item]]:
    """Yield a part and, with their paths, the objects of its own package that it holds."""
    if id(part) in seen or not type(part).__weakrefoffset__:
        return
    seen.add(id(part))
    yield path, part
    for name, value in vars(part).items() if depth else ():
        if type(value) not in PLAIN and name not in _OF_TORCH and _is_of_package(value, part):
            yield from _with_held(join_path(path, name), value, seen, depth - 1)


def _is_of_package(value: object, part: object) -> bool:
    """Return whether a value is an object with attributes whose class comes from the same package as the part's."""
    cls = type(value)
    if (
        cls in PLAIN
        or cls.__module__ == "builtins"
        or not hasattr(value, "__dict__")
        or isinstance(value, (*_NEVER, Tensor, Mapping))
    ):
        return False
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__}
    return cls.__module__.partition(".")[0] == type(part).__module__.partition(".")[0] and not packages & {
        "drivetrain",
        "torch",
    }


def _attributes(part: Item) -> Iterator[tuple[str, object]]:
    """Yield names and values of a part's attributes that may be state, and a module's buffers that are not saved."""
    for name, value in vars(part).items():
        if name in _OF_TORCH:
            continue
        if type(value) in PLAIN or not (isinstance(value, _NEVER) or _is_of_package(value, part)):
            yield name, value
    if isinstance(part, nn.Module):
        yield from ((name, part._buffers[name]) for name in part._non_persistent_buffers_set if name in part._buffers)


class _NotStateError(Exception):
    """This refers to something that is saved elsewhere, or is computed again."""


def _digest(value: object) -> str:
    """Return a text that is another one when the value has changed: it begins with `?` for what cannot be saved."""
    if type(value) in PLAIN:
        return f"{type(value).__name__} {value!r}"
    try:
        return f"{type(value).__name__} {pack(value, special=_reject, tensor=_digest_of_tensor)!r}"
    except _NotStateError:
        return _NOT_STATE
    except Exception:  # whatever a foreign object raises, it says that it cannot be saved
        size = len(value) if isinstance(value, _CONTAINERS) and not isinstance(value, np.ndarray) else 0
        return f"?{type(value).__name__} {id(value)} {size}"


def _reject(value: object, path: str) -> Item:
    if isinstance(value, _NEVER):
        raise _NotStateError
    if isinstance(value, Tensor) and (
        value.grad_fn is not None or value.is_meta or value.is_inference() or is_dtensor(value)
    ):
        raise _NotStateError
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:  # not written out as text: it may be large
        return f"{value.dtype} {value.shape} {hash(value.tobytes())}"
    return NotImplemented


def _digest_of_tensor(tensor: Tensor) -> object:
    plain = tensor.detach().to_dense().cpu()
    return f"{plain.dtype} {tuple(plain.shape)} {hash(bytes_of(plain).numpy().tobytes())}"


def _copied(value: Item, device: torch.device | None) -> Item:
    """Return a value whose tensors are copies, on the session's device if they were on an accelerator."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True) if device is not None else value.clone()
    if type(value) in (list, tuple, set, deque):
        return type(value)(_copied(item, device) for item in value)
    return {key: _copied(item, device) for key, item in value.items()} if type(value) is dict else value


def _put(part: Item, name: str, live: Item, value: Item) -> None:
    """Restore an attribute: in place where other objects may hold on to it."""
    kind = generator_kind(live)
    if kind is not None and kind is generator_kind(value):
        kind.restore(live, kind.state(value))
    elif isinstance(live, Tensor) and isinstance(value, Tensor):
        setattr(part, name, restore_tensor(live, value))
    elif isinstance(live, np.ndarray) and isinstance(value, np.ndarray) and live.shape == value.shape:
        live[...] = value
    elif isinstance(live, list | deque) and isinstance(value, Sequence | deque):
        live.clear()
        live.extend(value)
    elif isinstance(live, MutableMapping | MutableSet) and isinstance(value, type(live) | dict | set):
        live.clear()
        live.update(value)  # type: ignore[union-attr]
    else:
        setattr(part, name, value)


def merge_attributes(saved: Sequence[StateDict], rank: int) -> StateDict:
    """Return the attributes of one rank out of those of another number of ranks."""
    return saved[rank % len(saved)] or {}
