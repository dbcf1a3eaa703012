"""Data that is tensors already: which datasets are, how their rows become a batch, and when they are kept on the accelerator.

A `TensorDataset`, a tensor, an array, a dict or tuple of those, or a `Subset` of one of them needs no Python call per sample: its
batch is one `index_select` per tensor, or one copy where the rows are neighbours. The container of a batch is looked at once, when
the gather is compiled. A batch is always a copy: writing into it never changes the data.

Small data may be kept on the accelerator and gathered there, so that no batch crosses the bus. `resident="auto"` does it for data of at
most 1 GiB that takes at most a tenth of the free memory, and logs it once; `resident=True` insists. The order of samples stays the same.
"""

import copy
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from drivetrain.context.moving import move_to_device
from drivetrain.core.containers import leaves, map_items
from drivetrain.core.display import format_bytes
from drivetrain.core.errors import DeviceError, ParameterError
from drivetrain.runtime.device import choose_device, device_memory

if TYPE_CHECKING:
    from drivetrain.data.loader import SmartDataLoader

logger = logging.getLogger(__name__)

AUTO_BYTES = 2**30
AUTO_FRACTION = 0.1

Residence = bool | Literal["auto"]
Gather = Callable[[Any], Any]
"""Makes a batch from rows: a tensor of indices, or a range."""


class Columns:
    """Tensors whose first dimension is the sample, in the container a batch has."""

    def __init__(self, tree: object, length: int, subset: Tensor | None = None):
        self.tree, self.length, self.subset = tree, length, subset
        self.leaves = list(leaves(tree, Tensor))
        self.device: torch.device = self.leaves[0].device

    def __len__(self) -> int:
        return self.length

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that are used."""
        return sum(leaf[:1].nbytes * self.length for leaf in self.leaves)

    def reads_as(self, other: "Columns") -> bool:
        """Return whether both read the same rows of the same memory."""
        mine, others = (
            [(leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype) for leaf in one.leaves] for one in (self, other)
        )
        if self.subset is None or other.subset is None:
            return mine == others and self.subset is other.subset
        return mine == others and torch.equal(self.subset, other.subset)

    def gathers(self, pinned: bool = False) -> tuple[Gather, Gather]:
        """Return two functions that make a batch: of the rows that a tensor names, and of neighbouring rows, given as a range.

        `pinned` puts batches into page-locked memory.
        """
        subset = self.subset
        select = _compile(self.tree, _select_pinned if pinned else _select)
        if subset is None:
            return select, _compile(self.tree, _copy_range_pinned if pinned else _copy_range)
        return lambda rows: select(subset.index_select(0, rows)), lambda rows: select(subset[rows.start : rows.stop])

    def to(self, device: torch.device) -> "Columns":
        """Return the rows that are used as tensors on `device`."""
        subset = self.subset

        def place(leaf: Tensor) -> Tensor:
            return move_to_device(device, leaf if subset is None else _select(leaf)(subset))

        return Columns(_map_leaves(place, self.tree), self.length)


def find_columns(dataset: object) -> Columns | None:
    """Return the tensors a dataset consists of, or None if it must be read through its own methods."""
    if type(dataset) is Subset:
        base = find_columns(dataset.dataset)
        if base is None or base.device.type != "cpu":
            return None
        subset = torch.as_tensor(dataset.indices, dtype=torch.int64, device="cpu")
        subset = torch.where(subset < 0, subset + base.length, subset)
        if base.subset is not None:
            subset = base.subset.index_select(0, subset)
        return Columns(base.tree, len(subset), subset)
    tree = _column_tree(dataset)
    if tree is None:
        return None
    held = list(leaves(tree, Tensor))
    lengths = {len(leaf) for leaf in held}
    if len(lengths) != 1:
        raise ParameterError(
            f"dataset: the tensors of a {type(dataset).__name__} must have the same number of rows; got "
            f"{', '.join(str(len(leaf)) for leaf in held)}. For a dataset of separate samples give a list."
        )
    if len({leaf.device for leaf in held}) != 1:
        return None
    return Columns(tree, lengths.pop())


def _column_tree(dataset: object) -> object:
    """Return tensors in the container of a batch, or None."""
    if isinstance(dataset, TensorDataset):
        methods = ("__getitem__", "__len__", "__getitems__", "get_batch")
        if any(getattr(type(dataset), name, None) is not getattr(TensorDataset, name, None) for name in methods):
            return None
        tree = tuple(_as_column(tensor) for tensor in dataset.tensors)
        return tree if tree and all(leaf is not None for leaf in tree) else None
    return _map_leaves(_as_column, dataset) if _is_column(dataset) else None


def _is_column(value: object) -> bool:
    if isinstance(value, dict | tuple):
        items = value.values() if isinstance(value, dict) else value
        return bool(value) and all(map(_is_column, items))
    return isinstance(value, Tensor | np.ndarray) and _as_column(value) is not None


def _as_column(value: Tensor | np.ndarray) -> Tensor | None:
    """Return a tensor whose gathered rows equal the collated samples, or None where that is not so."""
    if isinstance(value, np.ndarray):
        is_plain = value.dtype.isnative and not value.dtype.hasobject and all(step >= 0 for step in value.strides)
        if value.ndim == 0 or not is_plain:
            return None
        try:
            with warnings.catch_warnings():
                # Read-only arrays: batches are copies, nothing writes here.
                warnings.simplefilter("ignore", UserWarning)
                tensor = torch.from_numpy(value)
        except TypeError:
            return None
        if value.ndim == 1 and len(value) and default_collate([value[0]]).dtype != tensor.dtype:
            return None
        return tensor
    if type(value) is not Tensor or value.layout != torch.strided or value.is_nested or value.ndim == 0:
        return None
    return value


def _map_leaves(change: Callable[[Any], Any], tree: object) -> object:
    return map_items(tree, partial(_map_leaves, change)) if isinstance(tree, dict | tuple) else change(tree)


def _compile(tree: Any, leaf: Callable[[Tensor], Gather]) -> Gather:
    """Return one function that makes a batch: the container is looked at once, not for each batch."""
    if isinstance(tree, Tensor):
        return leaf(tree)
    if isinstance(tree, dict):
        named = {name: _compile(item, leaf) for name, item in tree.items()}
        if type(tree) is dict:
            return lambda rows: {name: part(rows) for name, part in named.items()}

        def like_tree(rows: object) -> object:
            clone = copy.copy(tree)  # a mapping of the same type, with the same extra properties
            clone.update({name: part(rows) for name, part in named.items()})
            return clone

        return like_tree
    parts = [_compile(item, leaf) for item in tree]
    if hasattr(tree, "_fields"):
        return lambda rows: type(tree)(*[part(rows) for part in parts])
    return lambda rows: [part(rows) for part in parts]


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types of which torch selects no single numbers (2.13), each with the type of the same size that it does select."""


def _select(leaf: Tensor) -> Gather:
    if leaf.dtype in _SIGNED:
        signed = _select(leaf.view(_SIGNED[leaf.dtype]))
        return lambda rows: signed(rows).view(leaf.dtype)
    select = leaf.index_select
    return lambda rows: select(0, rows)


def _copy_range(leaf: Tensor) -> Gather:
    if leaf.requires_grad:  # torch 2.11 has no derivative for the quicker call
        return lambda rows: leaf.narrow(0, rows.start, len(rows)).clone()
    narrow = leaf.narrow_copy
    return lambda rows: narrow(0, rows.start, len(rows))


def _empty_pinned(leaf: Tensor, num_rows: int) -> Tensor:
    return torch.empty((num_rows, *leaf.shape[1:]), dtype=leaf.dtype, device="cpu", pin_memory=True)


def _select_pinned(leaf: Tensor) -> Gather:
    signed = leaf.detach().view(_SIGNED.get(leaf.dtype, leaf.dtype))
    return lambda rows: torch.index_select(signed, 0, rows, out=_empty_pinned(signed, len(rows))).view(leaf.dtype)


def _copy_range_pinned(leaf: Tensor) -> Gather:
    leaf = leaf.detach()
    return lambda rows: _empty_pinned(leaf, len(rows)).copy_(leaf.narrow(0, rows.start, len(rows)))


class ColumnSamples:
    """A dict or tuple of tensors read sample by sample, for a user's own collation."""

    def __init__(self, columns: Columns):
        self.columns = columns

    def __getitem__(self, index: int) -> object:
        return _map_leaves(lambda leaf: leaf[index], self.columns.tree)


def resident_columns(
    columns: Columns | None, device: torch.device, mode: Residence, max_fraction: float | None = None
) -> Columns | None:
    """Return the data on `device`, or None if it stays where it is; with `mode` True it is an error if it cannot move."""
    if mode is False or (mode == "auto" and device.type == "cpu"):
        return None
    if columns is None and mode is True:
        raise ParameterError(
            "resident=True needs data that is tensors (a TensorDataset, tensors, arrays, a dict or tuple of them) without a "
            "collate_fn: per-sample Python code cannot run on the device. Give tensors, or resident=False."
        )
    if columns is None or columns.device == device:
        return columns
    size = columns.num_bytes
    try:
        free, _ = device_memory(device)
    except DeviceError:  # a backend that does not report its memory
        if mode is True:
            raise
        return None
    limit = min(AUTO_BYTES, AUTO_FRACTION * free) if mode == "auto" else free * (max_fraction or 1.0)
    if size > limit and mode is True:
        raise ParameterError(
            f"resident=True: the data has {format_bytes(size)}, but {str(device)!r} has {format_bytes(free)} free, of which "
            f"{format_bytes(limit)} may be used. Use resident=False, a smaller dtype, or less data."
        )
    if size > limit:
        return None
    placed = columns.to(device)
    text = "%s of tensor data moved to %s; batches are gathered there (resident=False keeps the data on the host)"
    logger.info(text, format_bytes(size), device)
    return placed


def make_resident(
    loader: "SmartDataLoader[object]",
    device: torch.device | str,
    *,
    max_fraction: float = 0.5,
    dtype: torch.dtype | None = None,
) -> None:
    """Keep a loader's tensor data on `device` from its next iteration on; order, position and seed stay as they are.

    Floating-point tensors are stored as `dtype` if one is given. Data that does not fit in `max_fraction` of the free memory, or
    that is not made of tensors, is rejected.
    """
    target = choose_device(device)
    columns = loader.columns
    if columns is not None and dtype is not None:
        tree = _map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, columns.tree)
        columns = Columns(tree, columns.length, columns.subset)
    placed = resident_columns(columns, target, True, max_fraction)
    assert placed is not None
    loader.place(placed, placed.device)
