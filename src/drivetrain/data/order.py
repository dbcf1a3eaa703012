"""The order of samples in an epoch, and which of them each data rank gets.

There is one order of the whole epoch, whatever the number of processes: a permutation drawn from the loader's seed and the
epoch, or 0..N-1, or the stream of a user's sampler. A global batch is the next `batch_size * world` samples of it, and rank r
takes its r-th contiguous part. The position in that order is all a checkpoint needs, and it means the same for any world size.

An order has `samples` (in an epoch; None if only the batches determine it), `num_batches(share)` (the same on every rank) and `batches`,
which prepares the epoch at once and returns this rank's batches from a position on.
"""

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler, SubsetRandomSampler

from drivetrain.core.errors import ParameterError, ResumeError
from drivetrain.core.types import Batch
from drivetrain.data.randomness import SeededGenerators, generator_states, held_generators, set_generators
from drivetrain.runtime.codec import pack, unpack
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.seeds import derive_seed

T = TypeVar("T")
Keys = TypeVar("Keys")
Rows = Tensor | range | list[object]
"""Which samples a batch has: indices into the dataset, or the keys a user's sampler gives."""


BLOCK = 256
"""Batches whose indices are cut at once: a view costs half as much that way, and an epoch of any length needs no more memory."""
_AT_ONCE = 1 << 16  # keys of a sampler that are held as objects


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
    device: torch.device | None = None
    """Where indices are needed, if the data is gathered on an accelerator."""

    @property
    def whole(self) -> int:
        """Samples of a full batch on all ranks."""
        return self.batch_size * self.world


def share_of(total: int, rank: int, world: int) -> tuple[int, int]:
    """Return offset and size of one rank's contiguous part of `total` samples, split as evenly as possible.

    >>> [share_of(6, rank, 4) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 1)]
    """
    base, extra = divmod(total, world)
    return rank * base + min(rank, extra), base + (rank < extra)


def sliced_batches(places: Any, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
    """Yield this rank's part of each global batch of an order from `position` on."""
    rank, world, size, drop_last, device = share
    length, whole, offset = len(places), share.whole, size * rank
    index = position // whole
    if isinstance(places, Tensor) and device is not None:
        places = places.to(device)  # the host waits here, once an epoch
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
    """Return how many batches `sliced_batches` yields in a whole epoch, the same on every rank."""
    return length // share.whole if share.drop_last else -(-length // share.whole)


def epoch_permutation(length: int, seed: int, epoch: int) -> Tensor:
    """Return the shuffled order of an epoch, drawn from a generator of its own.

    >>> sorted(epoch_permutation(5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "shuffle", epoch))
    return torch.randperm(length, generator=generator, device="cpu")


class IndexOrder(Sampler[int]):
    """The default order: shuffled by seed and epoch, or 0..N-1. Iterating it gives the order of `epoch`."""

    def __init__(self, data: Sized, shuffle: bool):
        self.data, self.shuffle = data, shuffle
        self.seed, self.epoch = 0, 0

    def use(self, data: Sized) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)  # asked each time: a dataset may have grown since the last epoch

    @property
    def samples(self) -> int:
        return len(self)

    def __iter__(self) -> Iterator[int]:
        return iter(epoch_permutation(len(self), self.seed, self.epoch).tolist() if self.shuffle else range(len(self)))

    def num_batches(self, share: RankShare) -> int:
        return num_sliced_batches(len(self), share)

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        self.seed, self.epoch = seed, epoch
        order = epoch_permutation(len(self), seed, epoch) if self.shuffle else range(len(self))
        return sliced_batches(order, epoch, position, share)


class SamplerOrder:
    """A user's sampler: rank 0's stream is the global order of the epoch.

    `rows` is the number of rows of tensors that are gathered; None where a dataset's own methods get the keys as they are.
    """

    def __init__(self, sampler: Iterable[object], rows: int | None):
        self.sampler, self.rows = sampler, rows
        _sized_length(sampler, "sampler")

    def use(self, data: Sized) -> None:
        self.rows = len(data)

    @property
    def samples(self) -> int:
        return _sized_length(self.sampler, "sampler")

    def num_batches(self, share: RankShare) -> int:
        return num_sliced_batches(self.samples, share)

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        keys = as_indices(draw_stream(self.sampler, seed, epoch, read_keys), self.rows)
        if share.world > 1:
            keys = broadcast_from_master(keys)
        return sliced_batches(keys, epoch, position, share)


class ReplicaOrder:
    """A `DistributedSampler`: each rank already has its own stream, which is used as it is."""

    def __init__(self, sampler: DistributedSampler):
        self.sampler = sampler

    @property
    def samples(self) -> int:
        return len(self.sampler) * self.sampler.num_replicas

    def num_batches(self, share: RankShare) -> int:
        return num_sliced_batches(len(self.sampler), share._replace(rank=0, world=1))

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        world = self.sampler.num_replicas
        if position % world:
            raise ResumeError(
                f"position {position} cannot be continued with a DistributedSampler of {world} replicas: it is not a multiple of "
                f"{world}. Resume with the number of processes that saved it, or without the sampler (shuffle=True)."
            )
        keys = as_indices(draw_stream(self.sampler, seed, epoch, read_keys), None)
        own = sliced_batches(keys, epoch, position // world, share._replace(rank=0, world=1))
        return _on_all_replicas(own, self.sampler)


def _on_all_replicas(infos: Iterator[BatchInfo], sampler: DistributedSampler) -> Iterator[BatchInfo]:
    """Turn positions in one replica's stream into positions in the order of all replicas."""
    rank, world = sampler.rank, sampler.num_replicas
    for info in infos:
        info.first, info.end = info.first * world + rank, info.end * world
        info.global_size *= world
        yield info


class BatchOrder:
    """A user's `batch_sampler`: its batches go round the ranks."""

    samples = None

    def __init__(self, batch_sampler: Iterable[Iterable[object]]):
        self.sampler = batch_sampler
        _sized_length(batch_sampler, "batch_sampler")
        inner = getattr(batch_sampler, "sampler", None)
        self.replicas = inner if isinstance(inner, DistributedSampler) else None

    def num_batches(self, share: RankShare) -> int:
        world = 1 if self.replicas is not None else share.world
        return -(-_sized_length(self.sampler, "batch_sampler") // world)

    def batches(self, seed: int, epoch: int, position: int, share: RankShare) -> Iterator[BatchInfo]:
        lists = [list(batch) for batch in draw_stream(self.sampler, seed, epoch, list)]
        if [] in lists:
            raise ParameterError(
                f"batch_sampler: batch {lists.index([])} is empty; every batch needs at least one index."
            )
        if self.replicas is not None:
            own = dealt_batches(lists, epoch, position // self.replicas.num_replicas, 0, 1)
            return _on_all_replicas(own, self.replicas)
        if share.world > 1:
            lists = broadcast_from_master(lists)
        return dealt_batches(lists, epoch, position, share.rank, share.world)


SampleOrder = IndexOrder | SamplerOrder | ReplicaOrder | BatchOrder


def dealt_batches(lists: list[list[object]], epoch: int, position: int, rank: int, world: int) -> Iterator[BatchInfo]:
    """Deal ready-made batches to the ranks in turn, from the one that starts at `position`."""
    starts = list(itertools.accumulate(map(len, lists), initial=0))
    nearest = next((start for start in starts if start >= position), starts[-1])
    if nearest != position:
        raise ResumeError(
            f"position {position} is not at the start of one of the batch sampler's batches in epoch {epoch} (the nearest ends at "
            f"{nearest}). Resume with the same batch_sampler, and give it a generator or draw from the global ones."
        )

    def deal() -> Iterator[BatchInfo]:
        for number in range(starts.index(position), len(lists), world):
            stop, own = min(number + world, len(lists)), number + rank
            begin, end = starts[number], starts[stop]
            if own < stop:
                first, rows, pad = starts[own], lists[own], 0
            else:
                first, rows, pad = end, lists[stop - 1][-1:], 1
            size = 0 if pad else len(rows)
            yield BatchInfo(epoch, number // world, first, size, end - begin, pad, end, stop == len(lists), rows)

    return deal()


def set_sampler_epoch(sampler: object, epoch: int) -> None:
    """Pass the number of the epoch to a sampler and those it wraps: the length of its stream may depend on it."""
    for part in _parts(sampler):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def draw_stream(sampler: Iterable[T], seed: int, epoch: int, read: Callable[[Iterable[T]], Keys]) -> Keys:
    """Return the whole stream of a sampler for one epoch, as `read` collects it.

    A sampler that draws from the shared generators gets them seeded for the epoch, and they are restored: the same epoch has
    the same stream after a resume, and the caller's numbers are not disturbed.
    """
    set_sampler_epoch(sampler, epoch)
    with SeededGenerators(derive_seed(seed, "sampler", epoch)):
        return read(sampler)


def read_keys(stream: Iterable[object]) -> "list[object] | array[int]":
    """Return the keys of a stream. Whole numbers take eight bytes each, a fifth of what they take as objects."""
    if type(stream) is SubsetRandomSampler and isinstance(stream.indices, list | range | Tensor):
        own = stream.indices  # all taken at once, with the same draw: one by one, ten million take ten seconds
        keys = read_keys(own.tolist() if isinstance(own, Tensor) else own)
        if isinstance(keys, array):
            places = torch.randperm(len(keys), generator=stream.generator).numpy()
            return array("q", np.asarray(keys)[places].tobytes())
    rest, numbers = iter(stream), array("q")
    while part := list(itertools.islice(rest, _AT_ONCE)):
        try:
            numbers.fromlist(part)  # type: ignore[arg-type]  # all of them, or none
        except TypeError:
            return [*numbers, *part, *rest]
    return numbers


def as_indices(keys: "list[object] | array[int]", rows: int | None) -> Tensor | list[object]:
    """Return a stream of whole numbers as a tensor, within `rows` where that is given; other keys stay a list."""
    numbers = read_keys(keys) if isinstance(keys, list) else keys
    if isinstance(numbers, list):
        return numbers
    indices = torch.from_numpy(np.asarray(numbers))
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


def keeps_state(part: object) -> bool:
    """Return whether an object can save and restore its own state."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def sampler_state(order: SampleOrder) -> object:
    """Return what the user's sampler needs to draw this epoch's stream again, or None if the seed is enough."""
    part = _stateful_part(order)
    return part.state_dict() if part is not None else pack(generator_states(held_generators(order, "sampler"))) or None


def load_sampler_state(order: SampleOrder, state: Any) -> None:
    """Restore in the user's sampler what `sampler_state` returned."""
    part, held = _stateful_part(order), held_generators(order, "sampler")
    if part is not None:
        part.load_state_dict(state)
    elif isinstance(state, Tensor) and held:  # of an earlier version: the state of a sampler's torch generator
        next(one for one in held.values() if isinstance(one, torch.Generator)).set_state(state.cpu())
    elif isinstance(state, dict) and state.keys() <= held.keys():
        set_generators(held, unpack(state))
    else:
        raise ResumeError(
            "the state holds a sampler's state, but the loader's sampler cannot load one. Use the sampler that was saved."
        )


def _stateful_part(order: SampleOrder) -> Any:
    return next(filter(keeps_state, _parts(getattr(order, "sampler", None))), None)


def _parts(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those inside it."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)
