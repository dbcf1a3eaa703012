"""End a job in which a rank hangs, and name a rank that is slow.

A rank that waits for data, for a lock or in an endless loop makes all others wait in a collective, often for hours and without a
message. In each rank a thread reads a counter that the training loop increments anyway. If it has not changed for the time limit,
the thread prints the stacks of its process and ends it with `HANG_STATUS`, after the threads of the other ranks had a moment to
do the same. They communicate through the store of the process group, so this adds nothing to the training step.
"""

import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import NoReturn, Protocol, Self

import torch
import torch.distributed as dist

from drivetrain.runtime.environment import seconds_from
from drivetrain.runtime.ranks import get_num_processes, get_rank, is_distributed

logger = logging.getLogger(__name__)

HANG_STATUS = 124
"""Exit status of a process that was ended because it, or another rank, made no progress (timeout(1) uses the same)."""
HANG_TIMEOUT = 1800.0
"""Seconds without progress on several processes, unless another limit is given."""
HANG_VARIABLE = "DRIVETRAIN_HANG_TIMEOUT"
"""The environment variable that sets other seconds; 0 switches the watch off."""
PATIENCE = 4
"""How many times the limit applies before the first batch, and where `PATIENT` code runs."""
PATIENT = tuple(
    part.replace("/", os.sep)
    for part in ("/torch/_dynamo/", "/torch/_inductor/", "/drivetrain/checkpoint/", "/drivetrain/train/evaluation")
)
"""Parts of paths of code that may take long without a hang: compiling, saving, evaluating."""
POLL_SECONDS = 5.0
ANSWER_SECONDS = 10.0
"""How long a rank waits for the others to report before it ends."""
EXCHANGE_SECONDS = 30.0
"""How often ranks compare their times."""
SLOW_SHARE = 0.2
"""A rank is slow if it delays every step by this fraction of the step, in two consecutive comparisons."""
REPEAT_SECONDS = 600.0
"""Seconds until a rank that stays slow is reported again."""

_numbers = itertools.count()


class Watched(Protocol):
    """What the watch reads from a run, in its own thread."""

    def position(self) -> tuple[int, ...]:
        """Return counters, one of which changes whenever the run makes progress. The first counts batches."""

    def describe(self) -> str:
        """Return where the run is, as text."""

    def times(self) -> tuple[int, float, float]:
        """Return batches, the seconds of them before this rank first waited for another one, and all their seconds."""


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    seconds: float
    """Seconds it needs in a step before it waits for other ranks."""
    others: float
    """Median seconds of the other ranks."""
    step: float
    """The seconds of a whole step."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: it needs {self.seconds:.3g} s for data and forward in each step, the others {self.others:.3g} s "
            f"(median), and delays each step of {self.step:.3g} s by {(self.seconds - self.others) / self.step:.0%}"
        )


def hang_limit(given: float | None) -> float | None:
    """Return the seconds without progress after which to end: as given, from the environment, or the default for several processes."""
    if given is None:
        given = seconds_from(HANG_VARIABLE, HANG_TIMEOUT if get_num_processes() > 1 else None)
    return given or None


class RankWatch:
    """Watches this rank's progress inside its context. `limit` None only compares the times of ranks."""

    def __init__(self, watched: Watched, limit: float | None):
        self._watched, self._limit = watched, limit
        self._rank, self._size = get_rank(), get_num_processes()
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        self._store: dist.Store | None = None
        self._report = ""  # of another rank that hangs
        self._last_times = (0, 0.0, 0.0)
        self._suspect: int | None = None
        self._named: tuple[int, float] | None = None
        self.straggler: Straggler | None = None
        """The rank that was slow last, on rank 0; the recorder may clear it."""

    def __enter__(self) -> Self:
        if self._limit is None and self._size == 1:
            return self
        if is_distributed():
            # A connection of its own: the main thread may hold the other one while it waits.
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._store = dist.PrefixStore(f"drivetrain/watch/{next(_numbers)}", store)
        # Two threads: a network that is down may block the one that exchanges, and the other still ends this rank.
        for work in (self._watch, self._exchange) if self._store is not None else (self._watch,):
            self._threads.append(threading.Thread(target=work, name="drivetrain-rank-watch", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        for thread, seconds in zip(self._threads, (None, ANSWER_SECONDS)):
            thread.join(seconds)
        self._threads, self._store = [], None

    def _watch(self) -> None:
        period = self._period()
        first = last = self._watched.position()
        stuck, woke = 0.0, time.monotonic()
        while not self._done.wait(period):
            now = time.monotonic()
            # A process that was stopped as a whole (SIGSTOP, a suspended machine) did not hang.
            stuck, woke = stuck + min(now - woke, 2 * period), now
            position = self._watched.position()
            if position != last:
                last, stuck = position, 0.0
            if self._limit is not None and stuck > self._limit:
                running = [frame.f_code.co_filename for frame in _main_frames()]
                patient = last[0] == first[0] or any(part in file for file in running for part in PATIENT)
                if stuck > self._limit * (PATIENCE if patient else 1):
                    self._end(stuck, f"hang_timeout is {self._limit:g} s{f' × {PATIENCE} here' if patient else ''}")
        if self._report:
            self._end(stuck, f"another rank reports: {self._report}")

    def _exchange(self) -> None:
        """Read whether another rank hangs, and compare times."""
        store, period, compared = self._store, self._period(), time.monotonic()
        assert store is not None
        try:
            while not self._done.wait(period):
                if store.check(["hang"]):
                    self._report = store.get("hang").decode(errors="replace")
                    self._done.set()
                elif time.monotonic() - compared > EXCHANGE_SECONDS:
                    compared = time.monotonic()
                    self._compare(store)
        except (RuntimeError, OSError) as error:  # the store went with rank 0; each rank is still watched by itself
            logger.debug("rank %d: the other ranks cannot be reached: %s", self._rank, error)

    def _period(self) -> float:
        return POLL_SECONDS if self._limit is None else min(POLL_SECONDS, self._limit / 8)

    def _end(self, stuck: float, reason: str) -> NoReturn:
        """Print where this process is, give the others time to do the same, and end."""
        where = "an unknown place"
        if frames := _main_frames():
            code = frames[0].f_code
            where = f"{code.co_filename}:{frames[0].f_lineno} in {code.co_qualname}"
        place = f"{self._watched.describe()}, at {where}"
        text = f"rank {self._rank} of {self._size} has made no progress for {stuck:.1f} s ({reason}): {place}\n"
        collectives = _collectives_in_progress()
        text += f"collectives in progress: {', '.join(collectives)}\n" if collectives else ""
        _print(text + _stacks(), f"rank {self._rank}")
        threading.Timer(2 * ANSWER_SECONDS, os._exit, [HANG_STATUS]).start()  # the network may be down
        try:
            if self._store is not None:
                self._answer(self._store, place)
        finally:  # the store may have gone with another rank
            os._exit(HANG_STATUS)

    def _answer(self, store: dist.Store, place: str) -> None:
        """Notify the other ranks, wait until they have reported, and list all of them once."""
        store.set(f"at/{self._rank}", place)
        if not store.check(["hang"]):
            store.set("hang", f"rank {self._rank}, {place}")
        deadline, missing = time.monotonic() + ANSWER_SECONDS, list(range(self._size))
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([f"at/{rank}"])]
            time.sleep(0.05)
        answered = [rank for rank in range(self._size) if rank not in missing]
        if self._rank == answered[0]:
            lines = [f"rank {rank}: {store.get(f'at/{rank}').decode(errors='replace')}" for rank in answered]
            lines += [f"rank {rank}: no answer; the process is stopped, or its machine is down" for rank in missing]
            _print("\n".join(["where the ranks are:", *lines]) + "\n", "all ranks")

    def _compare(self, store: dist.Store) -> None:
        """Publish this rank's times since the last comparison; rank 0 reads all of them."""
        now = self._watched.times()
        batches, own, whole = (a - b for a, b in zip(now, self._last_times))
        if batches < 3:
            return
        self._last_times = now
        store.set(f"times/{self._rank}", json.dumps([own / batches, whole / batches]))
        if self._rank == 0 and store.check([f"times/{rank}" for rank in range(self._size)]):
            times = [json.loads(store.get(f"times/{rank}")) for rank in range(self._size)]
            self._find_slow_rank(find_straggler([own for own, _ in times], whole / batches))

    def _find_slow_rank(self, slow: Straggler | None) -> None:
        """Name a rank that was slow twice in a row."""
        is_again = slow is not None and slow.rank == self._suspect
        self._suspect = None if slow is None else slow.rank
        if slow is None or not is_again:
            return
        now = time.monotonic()
        if self._named is None or self._named[0] != slow.rank or now - self._named[1] > REPEAT_SECONDS:
            self._named, self.straggler = (slow.rank, now), slow
            logger.warning("%s.", slow)


def find_straggler(seconds: list[float], step: float) -> Straggler | None:
    """Return the rank whose own part of a step takes longest, if it delays the step enough.

    >>> find_straggler([0.1, 0.1, 0.4], step=0.5).rank
    2
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    others = median(seconds[:slowest] + seconds[slowest + 1 :]) if len(seconds) > 1 else seconds[slowest]
    if step <= 0 or seconds[slowest] - others < SLOW_SHARE * step:
        return None
    return Straggler(slowest, seconds[slowest], others, step)


def _main_frames() -> list[FrameType]:
    """Return the frames of the main thread, innermost first."""
    frame, frames = sys._current_frames().get(threading.main_thread().ident or 0), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _stacks() -> str:
    """Return the stacks of all threads but this one, the main thread last, where a reader looks first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    order = sorted((ident for ident in frames if ident != threading.get_ident()), key=lambda ident: ident == main)
    stacks = {ident: "".join(traceback.format_stack(frames[ident])) for ident in order}
    return "".join(f"thread {names.get(ident, ident)}:\n{stack}" for ident, stack in stacks.items())


def _collectives_in_progress() -> list[str]:
    """Return what torch's flight recorder has of collectives that were begun and not completed."""
    module = getattr(torch._C, "_distributed_c10d", None)
    found: list[str] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Callable[[bool, bool], bytes] | None = getattr(module, name, None)
        if dump is None:
            continue
        try:
            for entry in json.loads(dump(True, False)).get("entries", []):
                if not entry.get("retired", True) and entry.get("state") != "completed":
                    group = "/".join(map(str, entry.get("process_group", ())))
                    number = entry.get("collective_seq_id")
                    found.append(f"{entry.get('profiling_name')} number {number} of group {group}")
        except (RuntimeError, ValueError, TypeError, AttributeError):  # a private format, which may change
            continue
    return list(dict.fromkeys(found))[:8]


def _print(text: str, who: str) -> None:
    """Write lines that stay together when several ranks write at once."""
    sys.stderr.write("".join(f"[{who}] {line}\n" for line in text.splitlines()))
    sys.stderr.flush()
