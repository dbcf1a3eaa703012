"""What a loader reads from: the order of its samples, and the way from an index to a batch, chosen once while it is built."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler, default_collate, default_convert

from drivetrain.data.columns import Columns, ColumnSamples, find_columns
from drivetrain.data.fetch import GatherFetch, UserFetch, dataset_length, sized_length
from drivetrain.data.iterable import IterableMode
from drivetrain.data.order import BatchOrder, IndexOrder, ReplicaOrder, SampleOrder, SamplerOrder
from drivetrain.data.randomness import RngMode
from drivetrain.data.stream import FilterReader, ShardedReader

Collate = Callable[[Any], Any]


@dataclass(kw_only=True)
class BatchSource:
    """Either an order and a fetch, or the reader of a stream."""

    order: SampleOrder | None = None
    fetch: GatherFetch | UserFetch | None = None
    columns: Columns | None = None
    """The tensors that are gathered; None where user code makes the batches."""
    length: int | None = None
    """Samples of the dataset, where it says so."""
    reader: FilterReader | ShardedReader | None = None


def stream_source(
    dataset: Any, collate: Collate | None, batched: bool, rng: RngMode, mode: IterableMode
) -> BatchSource:
    """Return the source of an iterable dataset."""
    kind = FilterReader if mode == "filter" else ShardedReader
    used = collate or (default_collate if batched else default_convert)
    return BatchSource(reader=kind(dataset, used, batched=batched, rng=rng, own_collate=collate is not None))


def indexed_source(
    dataset: Any,
    shuffle: bool,
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[Any] | None,
    collate: Collate | None,
    batched: bool,
    rng: RngMode,
) -> BatchSource:
    """Return the source of data with an index: whose order it is, and whether its rows are gathered."""
    columns = find_columns(dataset)
    has_keys = sampler is not None or batch_sampler is not None
    length = sized_length(dataset, columns) if has_keys else dataset_length(dataset, columns)
    gathered = columns if collate is None and batched else None
    order: SampleOrder
    if batch_sampler is not None:
        order = BatchOrder(batch_sampler)
    elif isinstance(sampler, DistributedSampler):
        order = ReplicaOrder(sampler)
    elif sampler is not None:
        order = SamplerOrder(sampler, None if gathered is None else length)
    else:
        order = IndexOrder(dataset if columns is None else columns, shuffle)
    if gathered is not None:
        return BatchSource(order=order, fetch=GatherFetch(gathered), columns=gathered, length=length)
    samples = ColumnSamples(columns) if columns is not None and isinstance(dataset, dict | tuple) else dataset
    return BatchSource(order=order, fetch=UserFetch(samples, collate, batched=batched, rng=rng), length=length)
