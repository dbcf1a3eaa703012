"""The order of samples in an epoch, and which of them each data rank gets.

There is one order of the whole epoch, whatever the number of processes: a permutation drawn from the loader's seed and the
epoch, or 0..N-1, or the stream of a user's sampler. A global batch is the next `batch_size * world` places of it, and rank r
takes its r-th contiguous part. The place in that order is all a checkpoint needs, and it means the same for any world size.

Four kinds of order share one shape: how many batches an epoch has, and the batches of this rank from a place onwards.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from drivetrain.core.errors import ParameterError, ResumeError
from drivetrain.core.types import Batch
from drivetrain.data.randomness import SeededGenerators
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.seeds import derive_seed

T = TypeVar("T")
Rows = Tensor | range | list[object]
"""Which samples a batch has: indices into the dataset, or the keys a user's sampler gives."""


BLOCK = 256
"""Batches whose indices are cut at once: a view costs half as much that way, and an epoch of any length needs no more memory."""


@dataclass(slots=True)
class BatchInfo:
    """The position of a batch in its epoch."""

    epoch: int
    index: int
    """Number of the batch in its epoch, from 0."""
    first: int
    """Place of this rank's first sample in the global order of the epoch."""
    size: int
    """Real samples of the batch on this rank, without padding."""
    global_size: int
    """Real samples of the batch on all ranks together."""
    pad: int
    """Copies that fill the batch where this rank had nothing left; `size` is then 0."""
    end: int
    """Samples yielded on all ranks once this batch is out: the position a checkpoint stores."""
    last: bool | None
    """Whether no batch follows in this epoch; None for a stream that is not read ahead."""
    rows: Rows | None = None
    """The samples themselves, padding included; None where the order is a stream."""
    stream: object = None
    """The position of an iterable dataset after this batch, if it reports one."""


Pairs = Iterator[tuple[BatchInfo, Batch]]
"""Batches, each with its place."""


class RankShare(NamedTuple):
    """How one rank cuts the global order."""

    rank: int
    world: int
    batch_size: int
    drop_last: bool


def share_of(total: int, rank: int, world: int) -> tuple[int, int]:
    """Return offset and size of one rank's contiguous part of `total` samples, split as evenly as possible.

    >>> [share_of(6, rank, 4) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 1)]
    """
    base, extra = divmod(total, world)
    return rank * base + min(rank, extra), base + (rank < extra)


def sliced_batches(
    order: Tensor | Sequence[object] | None, length: int, epoch: int, position: int, share: RankShare
) -> Iterator[BatchInfo]:
    """Yield this rank's part of each global batch from `position` on; `order` None means 0..length-1."""
    rank, world, size, drop_last = share
    whole, offset = size * world, size * rank
    index = position // whole
    places: Any = range(length) if order is None else order
    stop = length - whole + 1 if drop_last else length  # nothing follows a batch that ends here or later
    for rows in _full_rows(places, position, length, whole, offset, size):
        end = position + whole
        yield BatchInfo(epoch, index, position + offset, size, whole, 0, end, end >= stop, rows)
        position, index = end, index + 1
    left = length - position
    if left > 0 and not drop_last:
        offset, size = share_of(left, rank, world)
        first = position + offset
        rows = places[first : first + size] if size else places[length - 1 : length]
        yield BatchInfo(epoch, index, first, size, left, int(size == 0), length, True, rows)


def _full_rows(places: Any, position: int, length: int, whole: int, offset: int, size: int) -> Iterator[Rows]:
    """Yield one rank's rows of every full global batch."""
    count = max(0, (length - position) // whole)
    if not isinstance(places, Tensor):
        for first in range(position + offset, position + offset + count * whole, whole):
            yield places[first : first + size]
        return
    for done in range(0, count, BLOCK):
        now = min(BLOCK, count - done)
        block = places.narrow(0, position + done * whole, now * whole).view(now, whole)
        yield from block.narrow(1, offset, size).unbind()


def num_sliced_batches(length: int, share: RankShare) -> int:
    """Return how many batches `sliced_batches` yields in a whole epoch; the same on every rank."""
    whole = share.batch_size * share.world
    return length // whole if share.drop_last else -(-length // whole)


def epoch_permutation(length: int, seed: int, epoch: int) -> Tensor:
    """Return the shuffled order of an epoch, drawn from a generator of its own.

    >>> sorted(epoch_permutation(5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "shuffle", epoch))
    return torch.randperm(length, generator=generator)


class SampleOrder(Protocol):
    """One epoch's order of samples."""

    @property
    def samples(self) -> int | None:
        """Samples in an epoch; None when only the batches themselves determine it."""

    def num_batches(self, share: RankShare) -> int:
        """Return the number of batches of an epoch, the same on every rank."""

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        """Prepare the epoch now and return this rank's batches from `position` on."""


class IndexOrder(Sampler[int]):
    """The default order: shuffled by seed and epoch, or 0..N-1. Iterating it gives the order of `epoch`."""

    def __init__(self, data: Sized, shuffle: bool):
        self.data, self.shuffle = data, shuffle
        self.seed, self.epoch = 0, 0
        self.device: torch.device | None = None
        """Where the permutation lives; set when the data is gathered on an accelerator."""

    def __len__(self) -> int:
        return len(self.data)  # asked each time: a dataset may have grown since the last epoch

    @property
    def samples(self) -> int | None:
        return len(self)

    def __iter__(self) -> Iterator[int]:
        return iter(epoch_permutation(len(self), self.seed, self.epoch).tolist() if self.shuffle else range(len(self)))

    def num_batches(self, share: RankShare) -> int:
        return num_sliced_batches(len(self), share)

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        self.seed, self.epoch = seed, epoch
        order = None
        if self.shuffle:
            order = epoch_permutation(len(self), seed, epoch)
            order = order if self.device is None else order.to(self.device)  # the host waits here, once an epoch
        return sliced_batches(order, len(self), epoch, position, share)


class SamplerOrder:
    """A user's sampler: rank 0's stream is the global order of the epoch."""

    def __init__(self, sampler: Iterable[object], rows: int | None):
        self.sampler = sampler
        self.rows = rows
        """Rows of the tensors that are gathered; None where a dataset's own methods get the keys as they are."""
        self.device: torch.device | None = None
        _sized_length(sampler, "sampler")

    @property
    def samples(self) -> int | None:
        return _sized_length(self.sampler, "sampler")

    def num_batches(self, share: RankShare) -> int:
        return num_sliced_batches(_sized_length(self.sampler, "sampler"), share)

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        keys = as_indices(draw_stream(self.sampler, seed, epoch), self.rows)
        if share.world > 1:
            keys = broadcast_from_master(keys)
        if isinstance(keys, Tensor) and self.device is not None:
            keys = keys.to(self.device)
        return sliced_batches(keys, len(keys), epoch, position, share)


class ReplicaOrder:
    """A `DistributedSampler`: each rank already has its own stream, which is used as it is."""

    def __init__(self, sampler: DistributedSampler):
        self.sampler = sampler
        self.device: torch.device | None = None

    @property
    def samples(self) -> int | None:
        return len(self.sampler) * self.sampler.num_replicas

    def num_batches(self, share: RankShare) -> int:
        return num_sliced_batches(len(self.sampler), RankShare(0, 1, share.batch_size, share.drop_last))

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        rank, world = self.sampler.rank, self.sampler.num_replicas
        if position % world:
            raise ResumeError(
                f"position {position} cannot be continued with a DistributedSampler of {world} replicas: it is not a multiple of "
                f"{world}. Resume with the number of processes that saved it, or without the sampler (shuffle=True)."
            )
        keys = as_indices(draw_stream(self.sampler, seed, epoch), None)
        if isinstance(keys, Tensor) and self.device is not None:
            keys = keys.to(self.device)
        own = sliced_batches(
            keys, len(keys), epoch, position // world, RankShare(0, 1, share.batch_size, share.drop_last)
        )
        return (_on_all_replicas(info, rank, world) for info in own)


def _on_all_replicas(info: BatchInfo, rank: int, world: int) -> BatchInfo:
    """Turn a place in one replica's stream into one in the order of all replicas."""
    info.first, info.end = info.first * world + rank, info.end * world
    info.global_size *= world
    return info


class BatchOrder:
    """A user's `batch_sampler`: its batches go round the ranks."""

    def __init__(self, batch_sampler: Iterable[Iterable[object]]):
        self.batch_sampler = batch_sampler
        _sized_length(batch_sampler, "batch_sampler")
        inner = getattr(batch_sampler, "sampler", None)
        self.replicas = inner if isinstance(inner, DistributedSampler) else None

    @property
    def samples(self) -> int | None:
        return None

    def num_batches(self, share: RankShare) -> int:
        world = 1 if self.replicas is not None else share.world
        return -(-_sized_length(self.batch_sampler, "batch_sampler") // world)

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        lists = [list(batch) for batch in draw_stream(self.batch_sampler, seed, epoch)]
        if any(not batch for batch in lists):
            raise ParameterError(
                f"batch_sampler: batch {lists.index([])} is empty; every batch needs at least one index."
            )
        if self.replicas is not None:
            rank, world = self.replicas.rank, self.replicas.num_replicas
            own = dealt_batches(lists, epoch, position // world, 0, 1)
            return (_on_all_replicas(info, rank, world) for info in own)
        if share.world > 1:
            lists = broadcast_from_master(lists)
        return dealt_batches(lists, epoch, position, share.rank, share.world)


def dealt_batches(lists: list[list[object]], epoch: int, position: int, rank: int, world: int) -> Iterator[BatchInfo]:
    """Deal ready-made batches to the ranks in turn, from the one that starts at `position`."""
    start, place = 0, 0
    while place < position and start < len(lists):
        place, start = place + len(lists[start]), start + 1
    if place != position:
        raise ResumeError(
            f"position {position} is not at the start of one of the batch sampler's batches in epoch {epoch} (the nearest ends at "
            f"{place}). Resume with the same batch_sampler, and give it a generator or draw from the global ones."
        )
    return _deal(lists, epoch, start, place, rank, world)


def _deal(lists: list[list[object]], epoch: int, start: int, place: int, rank: int, world: int) -> Iterator[BatchInfo]:
    for start_of_round in range(start, len(lists), world):
        hands = lists[start_of_round : start_of_round + world]
        sizes = [len(hand) for hand in hands]
        index, total = start_of_round // world, sum(sizes)
        if rank < len(hands):
            first, rows, pad = place + sum(sizes[:rank]), hands[rank], 0
        else:
            first, rows, pad = place + total, hands[-1][-1:], 1
        last = start_of_round + world >= len(lists)
        yield BatchInfo(epoch, index, first, 0 if pad else len(rows), total, pad, place + total, last, rows)
        place += total


def draw_stream(sampler: Iterable[T], seed: int, epoch: int) -> list[T]:
    """Return the whole stream of a sampler for one epoch.

    A sampler that draws from the shared generators gets them seeded for the epoch, and they are restored: the same epoch has
    the same stream after a resume, and the caller's numbers are not disturbed.
    """
    part: Any = sampler
    while part is not None:
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
        part = getattr(part, "sampler", None)
    with SeededGenerators(derive_seed(seed, "sampler", epoch)):
        return list(sampler)


def as_indices(keys: list[Any], rows: int | None) -> Tensor | list[object]:
    """Return a stream of whole numbers as a tensor, within `rows` where that is given; other keys stay a list."""
    try:
        indices = torch.tensor([operator.index(key) for key in keys], dtype=torch.int64)
    except TypeError:
        return keys
    if rows is not None and len(indices):
        low, high = int(indices.min()), int(indices.max())
        if low < -rows or high >= rows:
            raise IndexError(
                f"the sampler returned index {high if high >= rows else low}, but the dataset has {rows} samples."
            )
        if low < 0:
            indices = torch.where(indices < 0, indices + rows, indices)
    return indices


def _sized_length(stream: Iterable[object], name: str) -> int:
    if not isinstance(stream, Sized):
        raise ParameterError(
            f"{name}: {type(stream).__name__} has no __len__, so the length of an epoch is unknown. Give it one, or write the "
            "stream as an IterableDataset."
        )
    return len(stream)


def sampler_state(order: SampleOrder) -> object:
    """Return what the user's sampler needs to draw this epoch's stream again, or None if the seed is enough."""
    for part in _parts(order):
        if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
            return part.state_dict()
        if isinstance(getattr(part, "generator", None), torch.Generator):
            return part.generator.get_state()
    return None


def load_sampler_state(order: SampleOrder, state: Any) -> None:
    """Give the user's sampler back what `sampler_state` returned."""
    for part in _parts(order):
        if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
            part.load_state_dict(state)
            return
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.set_state(state.cpu())
            return
    raise ResumeError(
        "the state holds a sampler's state, but the loader's sampler cannot load one. Use the sampler that was saved."
    )


def _parts(order: SampleOrder) -> Iterator[Any]:
    given = getattr(order, "sampler", None) or getattr(order, "batch_sampler", None)
    while given is not None:
        yield given
        given = getattr(given, "sampler", None)
