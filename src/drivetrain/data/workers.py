"""Worker processes: torch's DataLoader carries jobs to them and results back, in order.

A job says everything a worker needs (seed, epoch, place, indices), so workers hold no position of their own: they may live for the
whole run, read ahead as far as they like, and be replaced by none at all without a change in what comes out. The inner DataLoader
gets a generator of its own, because torch would take the workers' base seed from the global one.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain.core.types import StateDict
from drivetrain.data.fetch import keys_of
from drivetrain.data.order import BatchInfo
from drivetrain.data.worker_processes import WorkerStart, end_workers, start_iterator


class WorkerSide(Dataset[Any]):
    """What a worker has in hand: the user's dataset and the function that answers a job.

    It replaces the dataset in `get_worker_info()`, so names it does not know are the dataset's, for reading and writing.
    """

    def __init__(self, dataset: object, answer: Callable[[Any], object]):
        own = self.__dict__
        own["dataset"], own["answer"] = dataset, answer

    def __getitem__(self, job: object) -> Any:
        return self.__dict__["answer"](job)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["dataset"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["dataset"], name, value)

    def __getstate__(self) -> StateDict:
        return dict(self.__dict__)

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)


class FetchAnswer:
    """Answers a job `(info, seed)` with the batch."""

    def __init__(self, fetch: Any):
        self.fetch = copy.copy(fetch)
        self.fetch.puts_back = False

    def __call__(self, job: Any) -> Any:
        info, seed = job
        return self.fetch(info, seed)


def fetch_jobs(infos: Iterator[BatchInfo], seed: int) -> Iterator[tuple[BatchInfo, int]]:
    """Return the jobs of an epoch."""
    for info in infos:
        if isinstance(info.rows, Tensor):
            info.rows = keys_of(info.rows)  # a tensor would travel through shared memory, one file per batch
        yield info, seed


class _JobSampler:
    """The sampler of the inner DataLoader: whatever jobs the next iteration has."""

    def __init__(self) -> None:
        self.jobs: Iterator[object] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.jobs


class WorkerPool:
    """Worker processes that answer jobs; with `persistent_workers` the same ones for every epoch."""

    def __init__(self, side: WorkerSide, options: dict[str, Any]):
        self._side, self._options = side, options
        self._sampler = _JobSampler()
        self._busy = False
        self._inner: DataLoader[Any] = DataLoader(
            side,
            batch_size=None,
            sampler=self._sampler,
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            **{**options, "worker_init_fn": WorkerStart(options["worker_init_fn"])},
        )

    def run(self, jobs: Iterator[object], base_seed: int) -> Iterator[tuple[Any, Any]]:
        """Yield each job with its answer, in the order of jobs."""
        if self._busy and self._inner.persistent_workers:  # another iterator is using them
            yield from WorkerPool(self._side, {**self._options, "persistent_workers": False}).run(jobs, base_seed)
            return
        self._busy = True
        iterator = None
        try:
            sent: deque[Any] = deque()
            self._sampler.jobs = _recorded(jobs, sent)
            self._inner.generator.manual_seed(base_seed)
            iterator = start_iterator(self._inner, self._inner.__iter__)
            for answer in iterator:
                yield sent.popleft(), answer
        finally:
            self._busy = False
            if iterator is not None and not self._inner.persistent_workers:
                end_workers([iterator])

    def close(self) -> None:
        """End the workers; the next run starts new ones."""
        if self._inner._iterator is not None:
            end_workers([self._inner._iterator])


def _recorded(jobs: Iterator[object], sent: deque[object]) -> Iterator[object]:
    for job in jobs:
        sent.append(job)
        yield job


def _as_it_is(answer: object) -> object:
    return answer
