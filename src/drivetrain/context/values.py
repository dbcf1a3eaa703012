"""Items that are values: numbers, text, tensors, arrays, paths, enums, dates, generators, and what has no state at all.

A value is replaced by the saved one; where other objects may hold on to it (a tensor, an array, a generator) it is
written in place instead.
"""

import functools
import types
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.context.kinds import Kind, Restore, keep
from drivetrain.context.moving import move_tensor
from drivetrain.core.errors import warn
from drivetrain.core.types import Item, Saved, StateDict
from drivetrain.module.distributed_tensors import fit_tensor
from drivetrain.runtime.coders import GENERATORS, NOT_STATE, PLAIN, enum_member, tag_of, tagged, value_coder

if TYPE_CHECKING:
    from drivetrain.context.context import DataParallel, Move
    from drivetrain.context.loading import Loading, Saving

NUMBERS = (bool, int, float, complex)


class PlainKind(Kind):
    """Numbers, strings and None; numpy's scalars count as numbers."""

    name = "plain"

    def holds(self, item: object) -> bool:
        if isinstance(item, np.generic):
            return type(item.item()) in PLAIN
        return type(item) in PLAIN or (isinstance(item, (*NUMBERS, str)) and not isinstance(item, Enum))

    def fit(self, item: object, saved: object, loading: "Loading", path: str) -> Restore:
        if item is None:
            return loading.build(saved, path)
        if not _same_family(item, saved):
            return loading.add_mismatch(path, item, saved)
        if isinstance(item, np.generic) and isinstance(saved, NUMBERS):
            return lambda: type(item)(saved)
        return lambda: saved


def _same_family(item: object, saved: object) -> bool:
    """Numbers interchange, tensors of one element among them: a best loss often begins as `inf` and becomes a tensor."""
    if isinstance(item, (*NUMBERS, np.number, np.bool_)):
        return isinstance(saved, NUMBERS) or (isinstance(saved, Tensor) and saved.numel() == 1)
    return type(saved) is str


class TensorKind(Kind):
    """Tensors and parameters that are items themselves."""

    name = "tensor"

    def holds(self, item: object) -> bool:
        return isinstance(item, Tensor)

    def move(self, item: Tensor, job: "Move") -> Tensor:
        return move_tensor(item, job.device)

    def device(self, item: Tensor) -> torch.device:
        return item.device

    def describe(self, item: Tensor) -> str:
        return f"{type(item).__name__} {tuple(item.shape)}"

    def fit(self, item: Tensor, saved: Saved, loading: "Loading", path: str) -> Restore:
        if not isinstance(saved, Tensor):
            is_number = item.numel() == 1 and isinstance(saved, NUMBERS)
            return keep(saved) if is_number else loading.add_mismatch(path, item, saved)
        return lambda: restore_tensor(item, saved)


@torch.no_grad()
def restore_tensor(item: Tensor, saved: Tensor) -> Tensor:
    """Copy a saved tensor into the live one, or return a new one where it does not fit; a trained leaf stays itself."""
    saved = fit_tensor(saved.detach(), item)
    leaf = isinstance(item, nn.Parameter) or (item.requires_grad and item.is_leaf)
    # An expanded tensor shows one number in many places, and torch guards tensors made in inference mode.
    is_writable = (leaf or not item.requires_grad) and 0 not in item.stride() and not item.is_inference()
    if is_writable and item.shape == saved.shape and item.dtype == saved.dtype:
        return item.copy_(saved)
    fresh = saved.to(item.device, copy=True)
    if not leaf:
        return fresh
    item.grad = None
    item.data = fresh
    return item


class CodedKind(Kind):
    """Values the codec has a tag for: arrays, paths, enums, dates, dtypes, devices, sizes, ranges."""

    name = "value"

    def holds(self, item: object) -> bool:
        return value_coder(item) is not None

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        coder = value_coder(item)
        assert coder is not None
        if type(saved) is type(item):
            return lambda: saved
        if tag_of(saved) != coder.tag:
            return loading.add_mismatch(path, item, saved)
        if isinstance(item, Enum):
            member = enum_member(type(item), saved["value"])
            return lambda: member
        value = loading.unpack(saved)
        if isinstance(item, PurePath):
            return lambda: type(item)(value)
        if isinstance(item, np.ndarray):
            return lambda: _restore_array(item, value)
        return lambda: value


def _restore_array(item: np.ndarray, value: np.ndarray) -> np.ndarray:
    if item.shape != value.shape or item.dtype != value.dtype or not item.flags.writeable:
        return value
    item[...] = value
    return item


class GeneratorKind(Kind):
    """Random generators of torch, numpy and Python; they are restored in place, because others hold on to them."""

    name = "generator"

    def holds(self, item: object) -> bool:
        coder = value_coder(item)
        return coder is not None and coder.tag in GENERATORS

    def has_state(self, item: object) -> bool:
        return True

    def saved_as(self, item: object) -> str:
        return "full state"

    def device(self, item: object) -> torch.device | None:
        return item.device if isinstance(item, torch.Generator) else None

    def move(self, item: object, job: "Move") -> Item:
        if not isinstance(item, torch.Generator) or item.device == job.device:
            return item
        if item.device.type == "cpu" and not isinstance(item, _GeneratorMovedToCpu):
            return item  # it serves draws on the CPU, wherever the model is
        make = _GeneratorMovedToCpu if job.device.type == "cpu" else torch.Generator
        moved = make(device=job.device).manual_seed(item.initial_seed())
        if item.device.type == job.device.type:
            moved.set_state(item.get_state())
        return moved

    def fit(self, item: Item, saved: Saved, loading: "Loading", path: str) -> Restore:
        coder = value_coder(item)
        assert coder is not None
        if tag_of(saved) != coder.tag:
            return loading.add_mismatch(path, item, saved)
        content = loading.unpack(saved["value"])
        bits = getattr(item, "bit_generator", None)
        if bits is not None and content["bit_generator"] != type(bits).__name__:
            reason = f"saved from a {content['bit_generator']}, this one is a {type(bits).__name__}"
            return loading.add_mismatch(path, item, saved, reason)
        if coder.tag == "generator" and torch.device(content["device"]).type != item.device.type:
            return lambda: _start_again(item, content, path)

        def restore() -> object:
            GENERATORS[coder.tag].restore(item, content)
            return item

        return restore


class _GeneratorMovedToCpu(torch.Generator):
    """A generator of an accelerator that a move made again on the CPU; the move back makes it again there."""


def _start_again(item: torch.Generator, content: StateDict, path: str) -> torch.Generator:
    warn(
        f"{path} was saved on {content['device']} and is on {item.device} now, where its state cannot be restored: it restarts from "
        f"its seed {content['seed']}."
    )
    return item.manual_seed(content["seed"])


class OtherKind(Kind):
    """Functions, classes, datasets and unknown objects: they may move themselves, and have no state."""

    name = "other"
    saves_itself = True

    def holds(self, item: object) -> bool:
        return True

    def move(self, item: object, job: "Move") -> Item:
        return ask(item, "to", job.device)

    def ddp(self, item: object, job: "DataParallel") -> Item:
        return ask(item, "ddp")

    def save(self, item: object, saving: "Saving", path: str) -> Saved:
        if not is_known_stateless(item):
            saving.warn_unknown(path, item)
        return tagged(NOT_STATE, None)

    def fit(self, item: object, saved: object, loading: "Loading", path: str) -> Restore:
        # The state of a module without any, such as a loss, whose place a function has taken. An array compares element by element.
        if isinstance(saved, dict) and not saved:
            return keep(item)
        return loading.add_mismatch(path, item, saved, "it has no state_dict and load_state_dict")

    def saved_as(self, item: object) -> str:
        return "no (not state)" if is_known_stateless(item) else "no (has no state_dict and load_state_dict)"


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def is_known_stateless(item: object) -> bool:
    """Return whether no state is expected of an item: functions, classes, modules of code, datasets."""
    return isinstance(item, (*_FUNCTIONS, type, types.ModuleType, torch.utils.data.Dataset))


def ask(item: object, verb: str, *args: object) -> Item:
    """Let an object do something itself if it has a method for it; a method that returns nothing worked in place."""
    method = None if isinstance(item, type) else getattr(item, verb, None)
    if not callable(method):
        return item
    result = method(*args)
    return item if result is None else result
