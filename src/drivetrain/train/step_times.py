"""What a run shows to the watch over its ranks (`runtime/hangs.py`): how far it is, and how long this rank's own part of a step takes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.time import Clock
from drivetrain.runtime.hangs import RankWatch, hang_limit
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.train.agreement import Agreement
from drivetrain.train.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from drivetrain.train.run import Run

SAMPLED = 10
"""On a CUDA device every tenth batch is timed there too, since the host runs ahead of it."""


class StepTimes(TrainerCallback):
    """Measures a step up to its backward pass: the wait for data and the forward pass, before ranks wait for each other.

    After the backward pass the steps of all ranks have taken equally long. Sharded parameters are gathered during the forward pass, so
    with them only the wait for data is a rank's own.
    """

    def __init__(self, clock: Clock, agreement: Agreement, device: torch.device | str):
        self._clock, self._agreement = clock, agreement
        self._on_cuda = torch.device(device).type == "cuda"
        self._began: float | None = None
        self._own: float | None = None
        self._totals = (0, 0.0, 0.0)  # replaced as a whole, because another thread reads it
        self._begins_on_device: torch.cuda.Event | None = None
        self._on_its_way: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._own_on_device = 0.0
        self.watch: RankWatch | None = None

    def before_dataloader(self, state: object, logger: object) -> None:
        """Begin a step; what happens between two steps is not part of either."""
        self._began, self._own = perf_counter(), None
        if self._on_cuda and self._clock.batch % SAMPLED == 0 and self._on_its_way is None:
            self._begins_on_device = torch.cuda.Event(enable_timing=True)
            self._begins_on_device.record()

    def before_backward(self, state: object, logger: object) -> None:
        """End this rank's own part, at the first backward pass of the step."""
        if self._own is None and self._began is not None:
            self._own = perf_counter() - self._began
            if self._begins_on_device is not None:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                self._on_its_way, self._begins_on_device = (self._begins_on_device, end), None

    def batch_end(self, state: Any, logger: Any) -> None:
        """Count the step, and record a slow rank that the watch has found."""
        if self._began is not None and self._own is not None:
            if self._on_its_way is not None and self._on_its_way[1].query():  # does not wait
                begin, end = self._on_its_way
                self._own_on_device, self._on_its_way = begin.elapsed_time(end) / 1000, None
            batches, own, whole = self._totals
            seconds = max(self._own, self._own_on_device)
            self._totals = (batches + 1, own + seconds, whole + perf_counter() - self._began)
        watch = self.watch
        if watch is not None and (slow := watch.straggler) is not None:
            watch.straggler = None
            logger.log_step({"straggler/rank": slow.rank, "straggler/delay": slow.seconds - slow.others})

    def position(self) -> tuple[int, ...]:
        """Return the batch, and on several processes the number of votes, of which each batch of an evaluation has one."""
        vote = self._agreement.vote
        return self._clock.batch, self._clock.epoch, 0 if vote is None else vote.count

    def describe(self) -> str:
        """Return where the run is."""
        clock = self._clock
        return f"epoch {clock.epoch}, batch {clock.batch} of the run ({clock.batch_in_epoch} of the epoch)"

    def times(self) -> tuple[int, float, float]:
        """Return batches, the seconds of this rank's own part of them, and all their seconds."""
        return self._totals


@contextmanager
def watched_ranks(
    run: "Run", clock: Clock, device: torch.device | str, update_plugins: Callable[[], object]
) -> Iterator[None]:
    """Watch a run for a rank that hangs; on several processes also time the steps, to find one that is slow."""
    given = run.require_settings().hang_timeout
    times = StepTimes(clock, run.agreement, device)
    watch = RankWatch(times, hang_limit(None if given is None else float(given.value)))
    if get_num_processes() > 1:
        times.watch, run.measures.step_times = watch, times
        update_plugins()
    try:
        with watch:
            yield
    finally:
        run.measures.step_times = None
