"""Reading a stream in order: by every rank as a whole, or by each rank and worker its own part.

A reader lives in the process that reads, be it this one or a worker. It opens the stream at a place, seeds the shared generators
for each step so that what user code draws depends on the position alone, and returns the position of the stream after each batch.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch.utils.data

from drivetrain.core.errors import ResumeError
from drivetrain.core.types import Batch
from drivetrain.data.order import BatchInfo, RankShare, share_of
from drivetrain.data.randomness import RngMode, keep_generators, restore_generators, seed_generators
from drivetrain.runtime.seeds import derive_seed

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


class StreamReader:
    """Reads a stream in order, on generators seeded for the place in it."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Batch], *, batched: bool, rng: RngMode, own_collate: bool
    ):
        self.dataset, self.collate, self.batched, self.rng, self.own_collate = (
            dataset,
            collate,
            batched,
            rng,
            own_collate,
        )
        self.puts_back = True
        self.iterator: Any = iter(())

    def fresh(self) -> Self:
        """Return a reader of the same stream that has not been opened."""
        other = copy.copy(self)
        other.iterator = iter(())
        return other

    def open(self, start: StreamStart, state: Any, *lane: int) -> None:
        """Begin the stream, at `state` if there is one; `lane` keys the random numbers of one of several streams."""
        self.start, self.lane = start, lane
        with_state = state is not None

        def begin() -> Iterator[Batch]:
            if callable(getattr(self.dataset, "set_epoch", None)):
                self.dataset.set_epoch(start.epoch)
            if with_state and _keeps_state(self.dataset):
                self.dataset.load_state_dict(copy.deepcopy(state))
                return iter(self.dataset)
            iterator = iter(self.dataset)
            if with_state:
                iterator.load_state_dict(copy.deepcopy(state))
            return iterator

        self.iterator = self.seeded(begin, "open")

    def seeded(self, action: Callable[[], Any], name: str, *place: int) -> Any:
        """Run user code on seeded generators and put the caller's back."""
        if self.rng == "off":
            return action()
        kept = keep_generators() if self.puts_back else None
        try:
            seed_generators(derive_seed(self.start.seed, name, self.start.epoch, *self.lane, *place))
            return action()
        finally:
            if kept is not None:
                restore_generators(kept)

    def take(self, position: int, count: int) -> list[Any]:
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
            read = len(self.seeded(partial(self.take, place, wanted), "stream", place))
            place += read
            if read < wanted:
                raise ResumeError(
                    f"the stream ended after {place} samples, but the run is to continue after {position}. Resume with the data "
                    "it was started with."
                )

    def collated(self, samples: list[Any], *place: int) -> Batch:
        """Make a batch; a user's collation gets random numbers of this place."""
        if self.own_collate and self.rng != "off":
            seed_generators(derive_seed(self.start.seed, "fetch", self.start.epoch, *self.lane, *place))
        return self.collate(samples if self.batched else samples[0])

    def place(self, ended: bool) -> dict[str, Any] | None:
        """Return the position of the stream now, or None if it has none; at its end it may have gone back to the beginning."""
        for part in (self.iterator, self.dataset):
            if _keeps_state(part) and not ended:
                return {"state": copy.deepcopy(part.state_dict()), "ended": False}
        return {"state": None, "ended": True} if ended else None


def _keeps_state(part: object) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


class FilterReader(StreamReader):
    """Yields this rank's part of every global batch of the stream."""

    def batches(
        self, start: StreamStart, wanted: Callable[[int], bool] = lambda number: True
    ) -> Iterator[tuple[BatchInfo, Batch]]:
        """Yield info and batch for each batch whose number since the start is `wanted`, and (info, None) for the others."""
        position, whole = start.position, start.share.batch_size * start.share.world
        saved = start.stream or {"state": None, "ended": False}
        if saved["ended"]:
            return
        self.open(start, saved["state"])
        if saved["state"] is None:
            self.skip(position, whole)
        for number in itertools.count():
            read = partial(self._next, position, start.share, wanted(number))
            step = self.seeded(read, "stream", position)
            if step is None:
                return
            yield step
            position = step[0].end

    def _next(self, position: int, share: RankShare, wanted: bool) -> Any:
        whole = share.batch_size * share.world
        samples = self.take(position, whole)
        if not samples or (share.drop_last and len(samples) < whole):
            return None
        offset, size = share_of(len(samples), share.rank, share.world)
        own = samples[offset : offset + size] or samples[-1:]
        first, end = position + offset, position + len(samples)
        info = BatchInfo(self.start.epoch, position // whole, first, size, len(samples), int(size == 0), end, None)
        info.stream = self.place(ended=len(samples) < whole)
        return info, self.collated(own, first) if wanted else None


class ShardedReader(StreamReader):
    """Yields the batches of this rank's and worker's own stream."""

    def batches(self, start: StreamStart, worker: int) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """Yield size, batch and place of each batch of the stream of one worker."""
        size = start.share.batch_size
        place: dict[str, Any] = {"samples": 0, "state": None, "ended": False}
        if start.stream is not None:
            place = start.stream["workers"].get(worker, place)
        if place["ended"]:
            return
        self.open(start, place["state"], start.share.rank, worker)
        read = place["samples"]
        if place["state"] is None:
            self.skip(read, size)
        while True:
            step = self.seeded(partial(self._next, read, size, start.share.drop_last), "stream", read)
            if step is None:
                return
            read = step[2]["samples"]
            yield step

    def _next(self, read: int, size: int, drop_last: bool) -> Any:
        samples = self.take(read, size)
        if not samples or (drop_last and len(samples) < size):
            return None
        batch = self.collated(samples, read)
        place = self.place(ended=len(samples) < size) or {"state": None, "ended": False}
        return len(samples), batch, {"samples": read + len(samples), **place}


class StreamAnswer:
    """Answers a worker's job `(start, number)`: the batch of that number, or None at the end of the stream."""

    def __init__(self, reader: StreamReader):
        self.reader = reader.fresh()
        self.reader.puts_back = False
        self.token: int | None = None
        self.steps: Iterator[Any] = iter(())

    def __call__(self, job: tuple[StreamStart, int]) -> Any:
        start, number = job
        info = torch.utils.data.get_worker_info()
        if isinstance(self.reader, ShardedReader):
            if number < 0:
                return IDLE
            assert info is not None
            if start.token != self.token:
                self.token, self.steps = start.token, self.reader.batches(start, info.id)
            step = next(self.steps, None)
            return None if step is None else (info.id, *step)
        assert isinstance(self.reader, FilterReader)
        if start.token != self.token:
            self.token, self.read, self.number = start.token, 0, number
            self.steps = self.reader.batches(start, lambda index: index == self.number)
        self.number = number
        for step in self.steps:
            self.read += 1
            if self.read > number:
                return step
        return None


class HiddenWorker:
    """A `worker_init_fn` after which `get_worker_info()` is None, so that a dataset reads its whole stream in every worker.

    A dataset that splits itself by `get_worker_info()` would, in `filter` mode, lose what the other workers have.
    """

    def __init__(self, init: Callable[[int], Any] | None):
        self.init = init

    def __call__(self, worker_id: int) -> None:
        torch.utils.data._utils.worker._worker_info = None
        if self.init is not None:
            self.init(worker_id)
