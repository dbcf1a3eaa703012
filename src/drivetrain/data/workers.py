"""Worker processes: torch's DataLoader carries jobs to them and results back, in order.

A job holds everything a worker needs (seed, epoch, position, indices), so workers may live for the whole run, read ahead, or be absent
without a change in what comes out. The inner DataLoader has its own generator, because torch would draw the base seed from the global one.

torch ends workers when nothing refers to their iterator, one after the other with five seconds for each; `ending_workers()` ends all that
were started within it at the same time. A signal to the process group reaches workers too; they leave it to the process that trains.
"""

import atexit
import io
import os
import signal
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling, worker

from drivetrain.core.types import Settings
from drivetrain.data.fetch import keys_of
from drivetrain.data.order import BatchInfo
from drivetrain.runtime.environment import end_with_parent

END_SECONDS = 3.0
"""How long all workers together may take to end by themselves."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_running: weakref.WeakKeyDictionary[Any, "weakref.ref[DataLoader[object]]"] = weakref.WeakKeyDictionary()
"""torch's iterators that have started workers, each with its loader."""


class _WorkerScope(threading.local):
    """What was started within the outermost `ending_workers()` of a thread."""

    is_open = False
    iterators: "weakref.WeakSet[Any]"
    undo: list[Callable[[], None]]


_scope = _WorkerScope()


class WorkerStart:
    """The first thing a worker calls: from here on only its parent ends it, and its parent's end does.

    With `is_hidden`, `get_worker_info()` is None, so that a dataset reads its whole stream in every worker.
    """

    def __init__(self, init: Callable[[int], object] | None, is_hidden: bool = False):
        self.init, self.is_hidden = init, is_hidden

    def __call__(self, worker_id: int) -> None:
        for number in STOP_SIGNALS:
            # A handler, since programs that a worker starts would inherit SIG_IGN.
            signal.signal(number, lambda number, frame: None)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        end_with_parent()
        info = worker._worker_info
        if self.is_hidden:
            worker._worker_info = None
        elif info is not None and isinstance(info.dataset, WorkerSide):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # torch makes it read-only
        if self.init is not None:
            self.init(worker_id)


def start_iterator(loader: DataLoader[object], make: Callable[[], Any]) -> Any:
    """Return a loader's iterator; workers that it starts are noted, and cannot be hit by a signal before they handle it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) if hasattr(signal, "pthread_sigmask") else None
    try:
        iterator = make()
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if hasattr(iterator, "_shutdown_workers"):
        _running[iterator] = weakref.ref(loader)
        if _scope.is_open:
            _scope.iterators.add(iterator)
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # before torch's own, which waits for each worker in turn
    return iterator


@contextmanager
def ending_workers() -> Iterator[bool]:
    """End all workers that are started within, however the block ends; inside another such block (False) that one ends them."""
    if _scope.is_open:
        yield False
        return
    _scope.is_open, _scope.iterators, _scope.undo = True, weakref.WeakSet(), []
    try:
        yield True
    finally:
        _scope.is_open = False
        end_workers(list(_scope.iterators))
        for undo in _scope.undo:
            undo()


def guard_workers(loader: DataLoader[object]) -> None:
    """Treat the workers of a user's plain loader like ours until the surrounding `ending_workers()` ends."""
    if not _scope.is_open or not loader.num_workers or "_get_iterator" in vars(loader):
        return
    init, make = loader.worker_init_fn, loader._get_iterator

    def undo() -> None:
        vars(loader).pop("_get_iterator", None)
        loader.worker_init_fn = init

    _scope.undo.append(undo)
    loader.worker_init_fn = WorkerStart(init)
    loader._get_iterator = lambda: start_iterator(loader, make)  # type: ignore[method-assign]


def end_workers(iterators: Iterable[Any]) -> None:
    """End the workers of torch's iterators: all are asked at once, and killed when they have not ended soon after."""
    iterators = [iterator for iterator in iterators if not iterator._shutdown]
    for iterator in iterators:
        if hasattr(iterator, "_pin_memory_thread"):  # first, since a worker that is killed may leave half a message
            iterator._pin_memory_thread_done_event.set()
            iterator._worker_result_queue.put((None, None))
            iterator._pin_memory_thread.join()
        iterator._workers_done_event.set()
        for number, is_up in enumerate(iterator._workers_status):
            if is_up or iterator._persistent_workers:
                iterator._mark_worker_as_unavailable(number, shutdown=True)
    workers = {process.sentinel: process for iterator in iterators for process in iterator._workers}
    deadline = time.monotonic() + END_SECONDS
    while workers and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(workers), left):
            workers.pop(sentinel)
    for iterator in iterators:
        if iterator._worker_pids_set:  # else torch raises an error about workers that were killed
            signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
    for process in workers.values():
        process.kill()
    for iterator in iterators:
        iterator._shutdown_workers()
        reference = _running.pop(iterator, None)
        loader = None if reference is None else reference()
        if loader is not None and loader._iterator is iterator:
            loader._iterator = None  # persistent workers: the next iteration starts new ones


def _end_all() -> None:
    end_workers(list(_running))


def _forget_all() -> None:
    """In a forked process: the workers are the parent's, and torch would end them when the copies are collected here."""
    for iterator in list(_running):
        iterator._shutdown = True
    _running.clear()
    _scope.is_open = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class WorkerSide(Dataset[object]):
    """What a worker holds: the user's dataset, which `get_worker_info()` shows, and the function that answers a job."""

    def __init__(self, dataset: object, answer: Callable[..., object]):
        self.dataset, self.answer = dataset, answer
        self._is_sendable = False

    def __getitem__(self, job: tuple[object, ...]) -> object:
        answer = self.answer(*job)
        if not self._is_sendable:
            _check_sendable(answer)
            self._is_sendable = True
        return answer


class _DryPickler(ForkingPickler):
    """Pickles all but the data of tensors and arrays."""

    def persistent_id(self, value: object) -> str | None:
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
            raise ValueError("it holds a tensor with a graph: detach() it")
        return "data" if type(value) in (Tensor, np.ndarray) else None


def _check_sendable(answer: object) -> None:
    """Raise for what cannot leave a worker: the thread that sends it would only print the error, and the training process wait forever."""
    try:
        _DryPickler(io.BytesIO()).dump(answer)
    except Exception as error:
        raise TypeError(
            f"a batch cannot be sent from a worker process ({error}). Define the classes of what it holds at the top level of a module, or "
            "read the data in the training process: train_dataloader_kwargs={'num_workers': 0}, outside of train() num_workers=0."
        ) from error


def fetch_jobs(infos: Iterator[BatchInfo], seed: int) -> Iterator[tuple[BatchInfo, int]]:
    """Return the jobs of an epoch."""
    for info in infos:
        if isinstance(info.rows, Tensor):
            info.rows = keys_of(info.rows)  # a tensor would travel through shared memory, one file per batch
        yield info, seed


class _JobSampler:
    """The sampler of the inner DataLoader: the jobs of the next iteration, each noted when it is sent."""

    def __init__(self) -> None:
        self.jobs: Iterator[object] = iter(())
        self.sent: deque[object] = deque()

    def __iter__(self) -> Iterator[object]:
        sent = self.sent
        for job in self.jobs:
            sent.append(job)
            yield job


def contents_mark(value: object, depth: int = 4) -> object:
    """Return what differs after the contents of a dataset were replaced, appended to or written to.

    It covers the attributes of a dataset and of those it wraps: tensors, numpy arrays of up to 64 MiB, containers, plain values.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version, value.shape
    if isinstance(value, np.ndarray):
        is_read = value.nbytes <= 1 << 26 and not value.dtype.hasobject
        return id(value), value.shape, zlib.crc32(value.tobytes()) if is_read else None
    if isinstance(value, list | tuple | dict | deque):
        items = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
        if depth and len(items) <= 64:
            return id(value), tuple(contents_mark(item, depth - 1) for item in items)
        try:
            return len(items), hash(items)
        except Exception:  # an unhashable entry
            return len(items), hash(tuple(map(id, items)))
    if depth and hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        return id(value), tuple((name, contents_mark(item, depth - 1)) for name, item in vars(value).items())
    return id(value)


class WorkerPool:
    """Worker processes that answer jobs; with `persistent_workers` the same ones for every epoch in which the dataset stays as it is."""

    def __init__(self, side: WorkerSide, options: Settings, is_hidden: bool = False):
        self._side, self._options, self._is_hidden = side, options, is_hidden
        self._sampler = _JobSampler()
        self._busy = False
        self._mark: object = None  # of the copy of the dataset that persistent workers hold
        self._inner: DataLoader[object] = DataLoader(
            side,
            batch_size=None,
            sampler=self._sampler,
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            **{**options, "worker_init_fn": WorkerStart(options["worker_init_fn"], is_hidden)},
        )

    def run(self, jobs: Iterator[object], base_seed: int) -> Iterator[tuple[Any, Any]]:
        """Yield each job with its answer, in the order of jobs."""
        if self._busy and self._inner.persistent_workers:  # another iterator is using them
            options = {**self._options, "persistent_workers": False}
            yield from WorkerPool(self._side, options, self._is_hidden).run(jobs, base_seed)
            return
        if self._inner.persistent_workers and self._mark != (mark := contents_mark(self._side.dataset)):
            self.close()
            self._mark = mark
        self._busy = True
        iterator = None
        try:
            sent = self._sampler.sent = deque()
            self._sampler.jobs = jobs
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


def _as_it_is(answer: object) -> object:
    return answer
