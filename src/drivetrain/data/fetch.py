"""From indices to a batch: one gather per tensor where the data allows it, else sample by sample.

Data that is tensors already (a `TensorDataset`, a tensor, an array, a dict or tuple of those, a `Subset` of one of them) needs no
Python call per sample: its batch is one `index_select` per tensor, or one copy where the rows are neighbours. A dataset with
`get_batch(indices)` builds whole batches itself, one with `__getitems__` reads many samples at once, and everything else is read
sample by sample and collated. Whatever the way, values, dtypes and container types are those of torch's DataLoader, which makes a
list of tuple samples. A batch is always a copy: writing into it never changes the data.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert

from drivetrain.core.errors import ParameterError
from drivetrain.data.order import BatchInfo, Rows, as_indices
from drivetrain.data.randomness import RngMode, keep_generators, put_back, seed_generators
from drivetrain.runtime.seeds import derive_seed

Gather = Callable[[Any], Any]
"""Makes a batch from rows: a tensor of indices, or a range."""


class Columns:
    """Tensors whose first dimension is the sample, in the container a batch has."""

    def __init__(self, tree: Any, length: int, subset: Tensor | None = None):
        self.tree, self.length, self.subset = tree, length, subset
        self.leaves = list(_leaves(tree))
        self.device: torch.device = self.leaves[0].device

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that are used."""
        return sum(leaf[:1].numel() * leaf.element_size() * self.length for leaf in self.leaves)

    def gather(self) -> Gather:
        """Return the function that makes a batch of the rows a tensor names."""
        subset = self.subset
        rows_of = _compile(self.tree, _select)
        if subset is None:
            return rows_of
        return lambda rows: rows_of(subset.index_select(0, rows))

    def gather_range(self) -> Gather:
        """Return the function that makes a batch of neighbouring rows, given as a range."""
        subset = self.subset
        if subset is None:
            return _compile(self.tree, _copy_range)
        rows_of = _compile(self.tree, _select)
        return lambda rows: rows_of(subset[rows.start : rows.stop])

    def cast(self, dtype: torch.dtype) -> "Columns":
        """Return the data with floating-point tensors as `dtype`."""
        tree = _map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, self.tree)
        return Columns(tree, self.length, self.subset)

    def to(self, device: torch.device) -> "Columns":
        """Return the rows that are used as tensors on `device`."""
        subset = self.subset

        def place(leaf: Tensor) -> Tensor:
            return (leaf if subset is None else leaf.index_select(0, subset)).to(device)

        return Columns(_map_leaves(place, self.tree), self.length)


def find_columns(dataset: Any) -> Columns | None:
    """Return the tensors a dataset consists of, or None if it must be read through its own methods."""
    if type(dataset) is Subset:
        base = find_columns(dataset.dataset)
        if base is None or base.device.type != "cpu" or len(dataset.indices) == 0:
            return None
        subset = torch.as_tensor(dataset.indices, dtype=torch.int64)
        subset = torch.where(subset < 0, subset + base.length, subset)
        if base.subset is not None:
            subset = base.subset.index_select(0, subset)
        return Columns(base.tree, len(subset), subset)
    tree = _column_tree(dataset)
    if tree is None:
        return None
    leaves = list(_leaves(tree))
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:
        raise ParameterError(
            f"dataset: the tensors of a {type(dataset).__name__} must have equally many rows, these have "
            f"{', '.join(str(len(leaf)) for leaf in leaves)}. For a dataset of separate samples give a list."
        )
    if len({leaf.device for leaf in leaves}) != 1:
        return None
    return Columns(tree, lengths.pop())


def _column_tree(dataset: Any) -> Any:
    """Return tensors in the container of a batch, or None."""
    if isinstance(dataset, TensorDataset):
        methods = ("__getitem__", "__len__", "__getitems__", "get_batch")
        if any(getattr(type(dataset), name, None) is not getattr(TensorDataset, name, None) for name in methods):
            return None
        tree = tuple(_as_column(tensor) for tensor in dataset.tensors)
        return tree if tree and all(leaf is not None for leaf in tree) else None
    if isinstance(dataset, Tensor | np.ndarray):
        return _as_column(dataset)
    if isinstance(dataset, dict | tuple) and dataset and all(_is_column(item) for item in _items(dataset)):
        return _map_leaves(_as_column, dataset)
    return None


def _is_column(value: Any) -> bool:
    if isinstance(value, dict | tuple):
        return bool(value) and all(_is_column(item) for item in _items(value))
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0 and _as_column(value) is not None


def _as_column(value: Tensor | np.ndarray) -> Tensor | None:
    """Return a tensor whose gathered rows equal the collated samples, or None where that is not so."""
    if isinstance(value, np.ndarray):
        if (
            value.ndim == 0
            or value.dtype.hasobject
            or not value.dtype.isnative
            or any(step < 0 for step in value.strides)
        ):
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # read-only arrays: batches are copies, nothing writes here
                tensor = torch.from_numpy(value)
        except TypeError:
            return None
        if value.ndim == 1 and len(value) and default_collate([value[0]]).dtype != tensor.dtype:
            return None
        return tensor
    if type(value) is not Tensor or value.layout != torch.strided or value.is_nested or value.ndim == 0:
        return None
    return value


def _items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def _leaves(tree: Any) -> "list[Tensor]":
    return [tree] if isinstance(tree, Tensor) else [leaf for item in _items(tree) for leaf in _leaves(item)]


def _map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return _like_mapping(tree, {name: _map_leaves(change, item) for name, item in tree.items()})
    if isinstance(tree, tuple):
        items = [_map_leaves(change, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return change(tree)


def _like_mapping(example: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in a mapping of the same type and with the same extra properties."""
    if type(example) is dict:
        return items
    clone = copy.copy(example)
    clone.update(items)
    return clone


def _compile(tree: Any, leaf: Callable[[Tensor], Gather]) -> Gather:
    """Return one function that makes a batch: the container is looked at once, not for each batch."""
    if isinstance(tree, Tensor):
        return leaf(tree)
    if isinstance(tree, dict):
        named = {name: _compile(item, leaf) for name, item in tree.items()}
        if type(tree) is dict:
            return lambda rows: {name: part(rows) for name, part in named.items()}
        return lambda rows: _like_mapping(tree, {name: part(rows) for name, part in named.items()})
    parts = [_compile(item, leaf) for item in tree]
    if hasattr(tree, "_fields"):
        return lambda rows: type(tree)(*[part(rows) for part in parts])
    return lambda rows: [part(rows) for part in parts]


def _select(leaf: Tensor) -> Gather:
    select = leaf.index_select
    return lambda rows: select(0, rows)


def _copy_range(leaf: Tensor) -> Gather:
    narrow = leaf.narrow_copy
    return lambda rows: narrow(0, rows.start, len(rows))


class ColumnSamples:
    """A dict or tuple of tensors read sample by sample, for a user's own collation."""

    def __init__(self, columns: Columns):
        self.columns = columns

    def __len__(self) -> int:
        return self.columns.length

    def __getitem__(self, index: int) -> Any:
        return _map_leaves(lambda leaf: leaf[index], self.columns.tree)


class GatherFetch:
    """Batches of tensor data; there is no user code in it, so it draws no random numbers."""

    draws_random = False

    def __init__(self, columns: Columns):
        self.columns = columns
        self._gather, self._gather_range = columns.gather(), columns.gather_range()

    def __call__(self, info: BatchInfo, seed: int) -> Any:
        rows = info.rows
        if type(rows) is range:
            return self._gather_range(rows)
        if type(rows) is list:
            rows = as_indices(rows, self.columns.length).to(self.columns.device, non_blocking=True)
        return self._gather(rows)

    def __reduce__(self) -> Any:
        return GatherFetch, (self.columns,)  # the compiled functions are made again in a worker


class UserFetch:
    """Batches of a dataset's own methods and collation, on generators seeded for the place in the data."""

    draws_random = True

    def __init__(self, dataset: Any, collate: Callable[[Any], Any] | None, *, batched: bool, rng: RngMode):
        self.dataset, self.rng, self.batched = dataset, rng, batched
        self.collate = collate or (default_collate if batched else default_convert)
        self.whole = batched and collate is None and rng != "sample" and has_get_batch(dataset)
        self.puts_back = True
        """Whether the caller's generators are put back; a worker process has no caller."""

    def __call__(self, info: BatchInfo, seed: int) -> Any:
        assert info.rows is not None
        keys = keys_of(info.rows)
        if self.rng == "off":
            return self._read(keys, info, seed)
        kept = keep_generators() if self.puts_back else None
        try:
            seed_generators(derive_seed(seed, "fetch", info.epoch, info.first))
            return self._read(keys, info, seed)
        finally:
            if kept is not None:
                put_back(kept)

    def _read(self, keys: list[Any], info: BatchInfo, seed: int) -> Any:
        if not self.batched:
            if self.rng == "sample":
                self._seed_sample(keys[0], info, 0, seed)
            return self.collate(self.dataset[keys[0]])
        if self.whole:
            return default_convert(self.dataset.get_batch(keys))
        if self.rng == "sample":
            samples = []
            for number, key in enumerate(keys):
                self._seed_sample(key, info, number, seed)
                samples.append(self.dataset[key])
            if self.collate is not default_collate:
                seed_generators(derive_seed(seed, "fetch", info.epoch, info.first))
            return self.collate(samples)
        read_many = getattr(self.dataset, "__getitems__", None)
        return self.collate(read_many(keys) if read_many else [self.dataset[key] for key in keys])

    def _seed_sample(self, key: Any, info: BatchInfo, number: int, seed: int) -> None:
        # A key that is no number stands for itself by its place in the global order.
        place = key if isinstance(key, int) else info.first + number
        seed_generators(derive_seed(seed, "sample", info.epoch, place))


def has_get_batch(dataset: Any) -> bool:
    """Whether a dataset builds whole batches itself."""
    return callable(getattr(dataset, "get_batch", None))


def keys_of(rows: Rows) -> list[Any]:
    """Return rows as the plain list that a dataset's own methods get.

    >>> keys_of(range(2, 4))
    [2, 3]
    """
    if isinstance(rows, Tensor):
        return rows.tolist()
    return list(rows)


def dataset_length(dataset: Any, columns: Columns | None) -> int:
    """Return the number of samples of a dataset with the indices 0..N-1, or say what is missing."""
    if columns is not None:
        return columns.length
    if isinstance(dataset, Mapping) and 0 not in dataset and len(dataset):
        raise ParameterError(
            f"dataset: a {type(dataset).__name__} with the keys {', '.join(map(repr, list(dataset)[:4]))} is no dataset of samples. "
            "Give a mapping of tensors or arrays with equally many rows, or a list of samples."
        )
    if not hasattr(dataset, "__getitem__") and not has_get_batch(dataset):
        raise ParameterError(
            f"dataset: a {type(dataset).__name__} has neither __getitem__ nor __iter__ of an IterableDataset. Give a Dataset, a "
            "sequence of samples, tensors, or an IterableDataset."
        )
    try:
        return len(dataset)
    except TypeError:
        raise ParameterError(
            f"dataset: {type(dataset).__name__} has no __len__, so it has no order. Give it one, or use an IterableDataset."
        ) from None


def sized_length(dataset: Any, columns: Columns | None) -> int | None:
    """Return the number of samples, or None if the dataset does not say; a sampler then decides what is read."""
    if columns is not None:
        return columns.length
    return len(dataset) if hasattr(dataset, "__len__") else None
