"""From indices to a batch: one gather per tensor where the data allows it, else sample by sample.

Tensor data is gathered. A dataset with `get_batch(indices)` builds whole batches itself, one with `__getitems__` reads many samples
at once, and everything else is read sample by sample and collated. Whatever the way, values, dtypes and container types are those
of torch's DataLoader, which makes a list of tuple samples.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from drivetrain.core.errors import ParameterError
from drivetrain.core.types import Batch
from drivetrain.data.columns import Columns
from drivetrain.data.order import BatchInfo, Rows, as_indices
from drivetrain.data.randomness import RngMode, SeededGenerators, held_generators, seed_generators
from drivetrain.runtime.coders import generator_kind
from drivetrain.runtime.device import copy_to
from drivetrain.runtime.seeds import derive_seed


class GatherFetch:
    """Batches of tensor data; there is no user code in it, so it draws no random numbers."""

    def __init__(self, columns: Columns, pinned: bool = False):
        self.columns = columns
        self._gather, self._gather_range = columns.gathers(pinned)

    @property
    def can_pin(self) -> bool:
        """Whether batches can be gathered straight into page-locked memory: host data through which no gradient flows."""
        return all(leaf.device.type == "cpu" and not leaf.requires_grad for leaf in self.columns.leaves)

    def __call__(self, info: BatchInfo, seed: int) -> Batch:
        rows = info.rows
        if type(rows) is range:
            return self._gather_range(rows)
        if type(rows) is list:
            rows = copy_to(self.columns.device, torch.as_tensor(as_indices(rows, self.columns.length)))
        return self._gather(rows)

    def __reduce__(self) -> tuple[object, ...]:
        return GatherFetch, (self.columns,)  # the compiled functions are made again in a worker


class UserFetch:
    """Batches of a dataset's own methods and collation, on generators seeded for the place in the data."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Batch] | None, *, batched: bool, rng: RngMode):
        self.dataset, self.rng, self.batched = dataset, rng, batched
        self.collate = collate or (default_collate if batched else default_convert)
        self.whole = batched and collate is None and rng != "sample" and has_get_batch(dataset)
        if not self.whole and not any(hasattr(dataset, method) for method in ("__getitem__", "__getitems__")):
            raise ParameterError(
                f"dataset: {type(dataset).__name__} has get_batch but no __getitem__, which is needed for a collate_fn, "
                "batch_size=None or rng='sample'. Define __getitem__ too."
            )
        self.restores_generators = True
        self._held: dict[str, object] | None = None

    def __call__(self, info: BatchInfo, seed: int) -> Batch:
        assert info.rows is not None
        keys = keys_of(info.rows)
        try:
            if self.rng == "off":
                return self._read(keys, info, seed)
            with SeededGenerators(derive_seed(seed, "fetch", info.epoch, info.first), self.restores_generators):
                if not self.restores_generators:
                    self._seed_held(seed, info.epoch, info.first)
                return self._read(keys, info, seed)
        except Exception as error:
            shown = ", ".join(map(repr, keys[:16])) + (", ..." if len(keys) > 16 else "")
            error.add_note(f"This batch has the samples {shown} of {type(self.dataset).__name__}.")
            raise

    def _seed_held(self, seed: int, *place: int) -> None:
        """In a worker, seed the generators that the dataset holds: all workers have copies of the same, which nobody saves."""
        if self._held is None:
            self._held = held_generators(self, "dataset")
        for name, generator in self._held.items():
            kind = generator_kind(generator)
            assert kind is not None
            kind.reseed(generator, derive_seed(seed, name, *place))

    def _read(self, keys: list[object], info: BatchInfo, seed: int) -> Batch:
        if self.whole:
            return default_convert(self.dataset.get_batch(keys))
        if self.rng == "sample":
            samples = []
            for number, key in enumerate(keys):
                # A key that is not a number is seeded by its position in the global order.
                place = key if isinstance(key, int) else info.first + number
                seed_generators(derive_seed(seed, "sample", info.epoch, place))
                if not self.restores_generators:
                    self._seed_held(seed, info.epoch, place)
                samples.append(self.dataset[key])
            if not self.batched:
                return self.collate(samples[0])
            if self.collate is not default_collate:
                seed_generators(derive_seed(seed, "fetch", info.epoch, info.first))
            return self.collate(samples)
        if not self.batched:
            return self.collate(self.dataset[keys[0]])
        read_many = getattr(self.dataset, "__getitems__", None)
        return self.collate(read_many(keys) if read_many else [self.dataset[key] for key in keys])


def has_get_batch(dataset: object) -> bool:
    """Return whether a dataset builds whole batches itself."""
    return callable(getattr(dataset, "get_batch", None))


def keys_of(rows: Rows) -> list[object]:
    """Return rows as the plain list that a dataset's own methods get.

    >>> keys_of(range(2, 4))
    [2, 3]
    """
    return rows.tolist() if isinstance(rows, Tensor) else list(rows)


def dataset_length(dataset: Any, has_keys: bool) -> int | None:
    """Return the number of samples of a dataset with the indices 0..N-1, or raise an error with what is missing.

    With `has_keys` a sampler decides what is read, and the dataset may have no length.
    """
    if has_keys:
        return len(dataset) if hasattr(dataset, "__len__") else None
    if isinstance(dataset, Mapping) and 0 not in dataset and len(dataset):
        raise ParameterError(
            f"dataset: a {type(dataset).__name__} with the keys {', '.join(map(repr, list(dataset)[:4]))} is not a dataset of samples. "
            "Give a mapping of tensors or arrays with the same number of rows, or a list of samples."
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
            f"the dataset ({type(dataset).__name__}) has no __len__, so it has no order. Give it one, or use an IterableDataset."
        ) from None
