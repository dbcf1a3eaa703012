"""What a loader reads from: the order of its samples, the way from an index to a batch, and the position in it.

The state of a loader is `{seed, epoch, position, length, version}`, and for some loaders what a user's sampler or stream adds. `position`
counts the samples that all ranks together have received in this epoch. There is no rank, world size or number of workers in it, so a
run may continue with others.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler, default_collate, default_convert

from drivetrain.core.errors import DrivetrainWarning, ResumeError, StateError
from drivetrain.core.types import StateDict
from drivetrain.data.columns import Columns, ColumnSamples, find_columns
from drivetrain.data.fetch import GatherFetch, UserFetch, dataset_length, sized_length
from drivetrain.data.iterable import IterableMode
from drivetrain.data.order import BatchInfo, BatchOrder, IndexOrder, ReplicaOrder, SampleOrder, SamplerOrder
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
    dataset: object, collate: Collate | None, batched: bool, rng: RngMode, mode: IterableMode
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


VERSION = 1
REQUIRED = ("seed", "epoch", "position", "length", "version")
OPTIONAL = ("sampler", "stream")


class Cursor:
    """The position of one iterator; the loader's state follows the newest."""

    __slots__ = ("before", "epoch", "info", "sampler", "start", "started", "stream")

    def __init__(self, epoch: int = 0, start: int = 0, *, stream: object = None, before: BatchInfo | None = None):
        self.epoch, self.start = epoch, start
        self.started = False
        """Whether an iterator has claimed this position; the next one then begins the next epoch."""
        self.info: BatchInfo | None = None
        """The batch in hand."""
        self.sampler: object = None
        """What the user's sampler needs to draw the stream of this epoch again."""
        self.stream = stream
        """What a state says about the position of an iterable dataset at `start`."""
        self.before = before
        """The last batch of the epoch that ended here: a loop that reads ahead may still have it in hand."""

    @property
    def position(self) -> int:
        """Samples received in this epoch by all ranks together; the batch in hand counts."""
        return self.start if self.info is None else self.info.end


def check_state(state: object, length: int | None, last: int | None, strict: bool) -> StateDict:
    """Return a saved state that fits data of `length` samples and an epoch of `last` samples, or raise a `StateError`."""
    if not isinstance(state, Mapping):
        raise StateError(f"loader state: got a {type(state).__name__}, expected a mapping as state_dict() returns it.")
    missing = [name for name in REQUIRED if name not in state]
    unknown = [name for name in state if name not in REQUIRED + OPTIONAL]
    if missing or (unknown and strict):
        wrong = [f"missing: {', '.join(missing)}"] if missing else []
        wrong += [f"unknown: {', '.join(map(str, unknown))}"] if unknown else []
        raise StateError(
            f"loader state: {'; '.join(wrong)}. Expected {', '.join(REQUIRED)} as state_dict() returns them."
        )
    for name in ("seed", "epoch", "position", "version"):
        if not isinstance(state[name], int) or isinstance(state[name], bool) or (name != "seed" and state[name] < 0):
            raise StateError(f"loader state: {name} is {state[name]!r}, expected a whole number of at least 0.")
    if state["version"] > VERSION:
        raise ResumeError(
            f"loader state: it has version {state['version']}, this library reads up to {VERSION}. Update the library."
        )
    checked = dict(state)
    if state["length"] != length and not (state["length"] is None or length is None):
        message = (
            f"the loader's data has {length} samples, the saved state is of {state['length']}: position {state['position']} means "
            "another sample now. Resume with the same data, or start a new run from the weights."
        )
        if strict:
            raise ResumeError(message)
        warnings.warn(f"{message} Epoch {state['epoch']} starts from its beginning.", DrivetrainWarning, stacklevel=3)
        checked["position"] = 0
    elif last is not None and checked["position"] > last:
        raise StateError(
            f"loader state: position {checked['position']} lies behind the end of the epoch ({last} samples)."
        )
    return checked
