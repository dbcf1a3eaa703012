"""Iterable datasets: streams without an index, split over ranks and workers, with an exact place to continue from.

`filter`: every rank (and worker) reads the whole stream and keeps its slices of each global batch. Reading is repeated, but the
batches are exactly those of one process, for any number of ranks and workers, and one state of the stream fits them all.
`sharded`: the dataset splits itself by rank and worker; each part has a place of its own, so a run must be continued with as many
ranks and workers as it had.

A stream with `state_dict`/`load_state_dict`, on the dataset or on the iterator it returns, continues at once; any other is read
again up to the place and discarded.
"""

import itertools
import logging
from collections.abc import Iterator
from typing import Any, Literal

from drivetrain.core.errors import DistributedError, ResumeError
from drivetrain.core.types import Batch
from drivetrain.data.order import BatchInfo, Pairs
from drivetrain.data.stream import IDLE, FilterReader, ShardedReader, StreamStart
from drivetrain.data.workers import WorkerPool
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

IterableMode = Literal["filter", "sharded"]


def filtered_batches(reader: FilterReader, start: StreamStart, pool: WorkerPool | None) -> Pairs:
    """Yield this rank's batches of the stream, read here or by workers."""
    if start.position and start.stream is None:
        _say_skipped(start.position)
    if pool is None:
        yield from reader.fresh().batches(start)
        return
    jobs = ((start, number) for number in itertools.count())
    for _, step in pool.run(jobs, derive_seed(start.seed, "workers", start.epoch, start.share.rank)):
        if step is None:
            return
        yield step


def sharded_batches(reader: ShardedReader, start: StreamStart, pool: WorkerPool | None, num_workers: int) -> Pairs:
    """Yield the batches of this rank's own stream; ranks that end early repeat their last batch as padding."""
    rank, world = start.share.rank, start.share.world
    lanes = max(1, num_workers)
    stream = start.stream or {"workers": {}, "turn": 0}
    skipped = sum(
        place["samples"] for place in stream["workers"].values() if place["state"] is None and not place["ended"]
    )
    if skipped:
        _say_skipped(skipped)
    turn = stream["turn"]
    steps = _sharded_steps(reader, start, pool, lanes, turn)
    workers, position = dict(stream["workers"]), start.position
    last: tuple[int, Any] | None = None
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
                f"data rank {rank} has no sample at all in epoch {start.epoch}; each rank's shard needs one."
            )
        total = sum(sizes.values())
        first = position + sum(size for other, size in sizes.items() if other < rank)
        position += total
        assert last is not None
        info = BatchInfo(start.epoch, index, first, size, total, 0 if size else last[0], position, None)
        info.stream = {"workers": dict(workers), "turn": turn, "batches": index + 1}
        yield info, last[1]


def _sharded_steps(
    reader: ShardedReader, start: StreamStart, pool: WorkerPool | None, lanes: int, turn: int
) -> Iterator[Batch]:
    """Yield (worker, size, batch, place, next turn) in the order in which workers take turns."""
    if pool is None:
        for size, batch, place in reader.fresh().batches(start, 0):
            yield 0, size, batch, place, 0
        return
    # Workers answer in turn from the first. Idle jobs bring the turn to the worker whose batch comes next.
    jobs = ((start, number) for number in itertools.count(-turn))
    ended = 0
    for (_, number), step in pool.run(jobs, derive_seed(start.seed, "workers", start.epoch, start.share.rank)):
        if step is None:
            ended += 1
            if ended == lanes:
                return
        elif step != IDLE:
            ended = 0
            yield (*step, (number + turn + 1) % lanes)


def mark_last(pairs: Pairs) -> Pairs:
    """Read one batch ahead, so that the last batch is known to be the last."""
    held = next(pairs, None)
    while held is not None:
        following = next(pairs, None)
        held[0].last = following is None
        yield held
        held = following


def gathered_stream_state(own: object, mode: IterableMode, rank: int, world: int, num_workers: int) -> Any:
    """Return what a state holds about the stream; for `sharded` a collective that brings the parts of all ranks together."""
    if mode == "filter":
        return own
    parts = dict(all_gather_values((rank, own))) if world > 1 else {0: own}
    return {"ranks": [parts[number] for number in range(world)], "num_workers": num_workers}


def own_stream_state(stream: Any, mode: IterableMode, rank: int, world: int, num_workers: int) -> Any:
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


def _say_skipped(count: int) -> None:
    logger.warning(
        "the dataset has no state_dict: reading %d samples again and discarding them to continue at the same place",
        count,
    )
