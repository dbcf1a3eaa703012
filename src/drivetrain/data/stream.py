"""Iterable datasets: streams without an index, split over ranks and workers, with an exact position to continue from.

`filter`: every rank (and worker) reads the whole stream and keeps its slices of each global batch, so the batches are those of one process
for any number of ranks and workers. `sharded`: the dataset splits itself by rank and worker; each part has a position of its own, so a run
must be continued with as many of both.

A reader seeds the shared generators for each step, so that what user code draws depends on the position alone. A stream with
`state_dict`/`load_state_dict`, on the dataset or on the iterator it returns, continues at once; any other is read again up to the position.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch.utils.data
from torch.utils.data import default_collate, default_convert

from drivetrain.core.containers import with_last
from drivetrain.core.errors import DistributedError, ResumeError
from drivetrain.core.types import Batch, StateDict
from drivetrain.data.order import BatchInfo, Pairs, RankShare, keeps_state, share_of
from drivetrain.data.randomness import RngMode, SeededGenerators, seed_generators
from drivetrain.data.workers import WorkerPool
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

IterableMode = Literal["filter", "sharded"]
Step = TypeVar("Step")
NO_STATE: StateDict = {"state": None, "ended": False}
"""The place of a stream that reports none: it is read again."""
IDLE = "idle"
"""The answer to a job that only passes the turn to the next worker."""


@dataclass(slots=True)
class StreamStart:
    """Everything a reader needs to open a stream at a place."""

    token: int
    """Identifies one iteration; workers that outlive an epoch open the stream again when it changes."""
    seed: int
    epoch: int
    position: int
    share: RankShare
    stream: Any = None
    """What the state holds about the stream; its meaning depends on the mode."""


class StreamReader(Generic[Step]):
    """Reads a stream in order, on generators seeded for the place in it."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Batch] | None, *, batched: bool, rng: RngMode):
        self.dataset, self.batched, self.rng = dataset, batched, rng
        self.own_collate = collate is not None
        self.collate: Callable[[Any], Batch] = collate or (default_collate if batched else default_convert)
        self.restores_generators = True
        self.iterator: Any = iter(())
        self.steps: Iterator[Step] = iter(())  # of a worker, for the iteration `token`
        self.token: int | None = None

    def open(self, start: StreamStart, state: Any, *lane: int) -> None:
        """Begin the stream, at `state` if there is one; `lane` keys the random numbers of one of several streams."""
        self.start, self.lane = start, lane
        with self.seeded("open"):
            if callable(getattr(self.dataset, "set_epoch", None)):
                self.dataset.set_epoch(start.epoch)
            dataset_restores = keeps_state(self.dataset)
            if state is not None and dataset_restores:
                self.dataset.load_state_dict(copy.deepcopy(state))
            self.iterator = iter(self.dataset)
            if state is not None and not dataset_restores:
                self.iterator.load_state_dict(copy.deepcopy(state))

    def seeded(self, name: str, *place: int) -> AbstractContextManager[None]:
        """Return a context in which user code runs on generators seeded for a place."""
        if self.rng == "off":
            return nullcontext()
        seed = derive_seed(self.start.seed, name, self.start.epoch, *self.lane, *place)
        return SeededGenerators(seed, self.restores_generators)

    def take(self, position: int, count: int) -> list[object]:
        """Read up to `count` samples, the first of which is at `position`."""
        if self.rng != "sample":
            return list(itertools.islice(self.iterator, count))
        samples = []
        for place in range(position, position + count):
            seed_generators(derive_seed(self.start.seed, "sample", self.start.epoch, *self.lane, place))
            try:
                samples.append(next(self.iterator))
            except StopIteration:
                break
        return samples

    def skip(self, position: int, step: int) -> None:
        """Read and discard `position` samples, in the steps in which they were read the first time."""
        place = 0
        while place < position:
            wanted = min(step, position - place)
            with self.seeded("stream", place):
                read = len(self.take(place, wanted))
            place += read
            if read < wanted:
                raise ResumeError(
                    f"the stream ended after {place} samples, but the run must continue after {position}. Resume with the same data."
                )

    def collated(self, samples: list[object], *place: int) -> Batch:
        """Make a batch; a user's collation gets random numbers of this place."""
        if self.own_collate and self.rng != "off":
            seed_generators(derive_seed(self.start.seed, "fetch", self.start.epoch, *self.lane, *place))
        return self.collate(samples if self.batched else samples[0])

    def place(self, ended: bool) -> StateDict | None:
        """Return the position of the stream now, or None if it has none; at its end it may have gone back to the beginning."""
        for part in (self.iterator, self.dataset):
            if keeps_state(part) and not ended:
                return {"state": copy.deepcopy(part.state_dict()), "ended": False}
        return {"state": None, "ended": True} if ended else None

    def read(self, start: StreamStart, saved: StateDict, position: int, size: int, *lane: int) -> Iterator[Step]:
        """Yield what `step` makes of each `size` samples, from a saved place at `position` to the end of the stream."""
        if saved["ended"]:
            return
        self.open(start, saved["state"], *lane)
        if saved["state"] is None:
            self.skip(position, size)
        while True:
            with self.seeded("stream", position):
                samples = self.take(position, size)
                is_short = len(samples) < size
                if not samples or (start.share.drop_last and is_short):
                    return
                step = self.step(position, samples, is_short)
            yield step
            position += len(samples)

    def step(self, position: int, samples: list[object], is_short: bool) -> Step:
        """Return a batch of samples, and what belongs to it."""
        raise NotImplementedError


class FilterReader(StreamReader[tuple[BatchInfo, Batch]]):
    """Reads the whole stream and makes this rank's part of every global batch."""

    number: int | None = None
    """The batch since the start that is made, in a worker; the others are only read. None makes every batch."""
    done = 0

    def batches(self, start: StreamStart) -> Pairs:
        """Yield the batches, each with its place; those that are not made are None."""
        return self.read(start, start.stream or NO_STATE, start.position, start.share.whole)

    def step(self, position: int, samples: list[object], is_short: bool) -> tuple[BatchInfo, Batch]:
        share, count = self.start.share, len(samples)
        offset, size = share_of(count, share.rank, share.world)
        own = samples[offset : offset + size] or samples[-1:]
        index, first, pad, stream = position // share.whole, position + offset, int(size == 0), self.place(is_short)
        info = BatchInfo(self.start.epoch, index, first, size, count, pad, position + count, last=None, stream=stream)
        is_made = self.number in (None, self.done)
        self.done += 1
        return info, self.collated(own, first) if is_made else None

    def __call__(self, start: StreamStart, number: int) -> object:
        """Return the batch of a number to a worker's job, or None at the end of the stream."""
        if start.token != self.token:
            self.token, self.done, self.steps = start.token, 0, self.batches(start)
        self.number = number
        return next((step for step in self.steps if self.done > number), None)


class ShardedReader(StreamReader[tuple[int, Batch, StateDict]]):
    """Reads this rank's and worker's own stream."""

    def batches(self, start: StreamStart, worker: int) -> Iterator[tuple[int, Batch, StateDict]]:
        """Yield size, batch and place of each batch of the stream of one worker."""
        saved = {"samples": 0, **NO_STATE}
        if start.stream is not None:
            saved = start.stream["workers"].get(worker, saved)
        return self.read(start, saved, saved["samples"], start.share.batch_size, start.share.rank, worker)

    def step(self, position: int, samples: list[object], is_short: bool) -> tuple[int, Batch, StateDict]:
        batch, place = self.collated(samples, position), self.place(is_short) or NO_STATE
        return len(samples), batch, {"samples": position + len(samples), **place}

    def __call__(self, start: StreamStart, number: int) -> object:
        """Return the next batch to a worker's job, or None at the end of its stream."""
        if number < 0:
            return IDLE
        info = torch.utils.data.get_worker_info()
        assert info is not None
        if start.token != self.token:
            self.token, self.steps = start.token, self.batches(start, info.id)
        step = next(self.steps, None)
        return None if step is None else (info.id, *step)


def filtered_batches(reader: FilterReader, start: StreamStart, pool: WorkerPool | None) -> Pairs:
    """Yield this rank's batches of the stream, read here or by workers."""
    if start.stream is None:
        _log_skipped(start.position)
    if pool is None:
        yield from copy.copy(reader).batches(start)
        return
    jobs = ((start, number) for number in itertools.count())
    for _, step in pool.run(jobs, derive_seed(start.seed, "workers", start.epoch, start.share.rank)):
        if step is None:
            return
        yield step


def sharded_batches(reader: ShardedReader, start: StreamStart, pool: WorkerPool | None, num_workers: int) -> Pairs:
    """Yield the batches of this rank's own stream; ranks that end early repeat their last batch as padding."""
    rank, world = start.share.rank, start.share.world
    stream = start.stream or {"workers": {}, "turn": 0}
    again = [place for place in stream["workers"].values() if place["state"] is None and not place["ended"]]
    _log_skipped(sum(place["samples"] for place in again))
    turn = stream["turn"]
    steps = _sharded_steps(reader, start, pool, num_workers, turn)
    workers, position = dict(stream["workers"]), start.position
    last: tuple[int, Batch] | None = None
    for index in itertools.count(stream.get("batches", 0)):
        step = next(steps, None)
        size = 0 if step is None else step[1]
        sizes = dict(all_gather_values((rank, size))) if world > 1 else {0: size}
        if not any(sizes.values()):
            return
        if step is not None:
            worker, _, batch, place, turn = step
            workers[worker], last = place, (size, batch)
        elif last is None:
            raise DistributedError(
                f"data rank {rank} has no samples in epoch {start.epoch}; each rank's shard needs at least one."
            )
        total = sum(sizes.values())
        first = position + sum(size for other, size in sizes.items() if other < rank)
        position += total
        assert last is not None
        state, pad = {"workers": dict(workers), "turn": turn, "batches": index + 1}, 0 if size else last[0]
        yield BatchInfo(start.epoch, index, first, size, total, pad, position, last=None, stream=state), last[1]


def _sharded_steps(
    reader: ShardedReader, start: StreamStart, pool: WorkerPool | None, num_workers: int, turn: int
) -> Iterator[tuple[int, int, Batch, StateDict, int]]:
    """Yield (worker, size, batch, place, next turn) in the order in which workers take turns."""
    if pool is None:
        for size, batch, place in copy.copy(reader).batches(start, 0):
            yield 0, size, batch, place, 0
        return
    # Workers answer in turn from the first. Idle jobs bring the turn to the worker whose batch comes next.
    jobs = ((start, number) for number in itertools.count(-turn))
    ended = 0
    for (_, number), step in pool.run(jobs, derive_seed(start.seed, "workers", start.epoch, start.share.rank)):
        if step is None:
            ended += 1
            if ended == num_workers:
                return
        elif step != IDLE:
            ended = 0
            yield (*step, (number + turn + 1) % num_workers)


def mark_last(pairs: Pairs) -> Pairs:
    """Read one batch ahead, so that the last batch is known to be the last."""
    for pair, is_last in with_last(pairs):
        pair[0].last = is_last
        yield pair


def gathered_stream_state(own: object, mode: IterableMode, rank: int, world: int, num_workers: int) -> object:
    """Return what a state holds about the stream; for `sharded` a collective that brings the parts of all ranks together."""
    if mode == "filter":
        return own
    parts = dict(all_gather_values((rank, own))) if world > 1 else {0: own}
    return {"ranks": [parts[number] for number in range(world)], "num_workers": num_workers}


def own_stream_state(stream: Any, mode: IterableMode, rank: int, world: int, num_workers: int) -> object:
    """Return this rank's part of a saved stream state, or reject one of another number of ranks or workers."""
    if mode == "filter" or stream is None:
        return stream
    saved = (len(stream["ranks"]), stream["num_workers"])
    if saved != (world, num_workers):
        raise ResumeError(
            f"a sharded stream was saved with {saved[0]} ranks of {saved[1]} workers and cannot be continued with {world} ranks of "
            f"{num_workers}. Use the same numbers, or iterable='filter', which allows any."
        )
    return stream["ranks"][rank]


def has_ended(saved: Any, rank: int) -> bool:
    """Return whether a rank had read its saved stream to the end, so that nothing of it is read again."""
    if saved is None or "ranks" not in saved:
        return saved is not None and bool(saved["ended"])
    places = [place for own in saved["ranks"][rank : rank + 1] for place in own["workers"].values()]
    return bool(places) and all(place["ended"] for place in places)


def _log_skipped(count: int) -> None:
    if count:
        text = (
            "the dataset has no state_dict: reading %d samples again and discarding them to continue at the same place"
        )
        logger.warning(text, count)
