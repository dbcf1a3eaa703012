"""How ranks agree: one vote carries everything that may differ between them.

Clocks, signals, stops, limits and the results of user functions differ between ranks. What follows from them (a save, an
evaluation, the end of the run) needs all ranks, so it is decided by the vote: every rank sends what it sees, and all act on the
same result. A single process needs no exchange.
"""

from collections.abc import Callable, Generator, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from drivetrain.context.state import State
from drivetrain.core.errors import DistributedError, StopTrainingError, TrainingStopped
from drivetrain.core.types import Settings
from drivetrain.runtime.collectives import all_gather_values, control_group
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.signals import URGENCY, StopSignals, is_stop
from drivetrain.train.settings import RunLimits

PATIENCE = 10.0
"""Seconds that a rank which leaves inside a step waits for the others to leave."""
WINDOW_SECONDS = 5.0
"""Maximum seconds that a signal waits for the end of an accumulation window, estimated from the mean time of a batch."""
STOP = 1
"""A request to stop without a signal."""
_ORDER = (0, STOP, *URGENCY)  # the last one wins: a save comes before a stop, and a signal to end before both


def is_stop_signal(request: int) -> bool:
    """Return whether a request is a signal to stop the process."""
    return request > STOP and is_stop(request)


class StopVote:
    """Collects requests from all ranks once a step. The exchange runs while the step computes.

    A request is 0 (go on), `STOP`, or the number of a signal. The most urgent one wins, on all ranks alike. With it travel the time that
    each rank's clock shows, whether a rank has changed the end of the run, and whether it answers yes to a question of the moment.
    """

    def __init__(self) -> None:
        # The request, -1 where all leave inside the step, the seconds, a changed end, a yes: of each the largest.
        self._ballot = torch.zeros(5, dtype=torch.float64, device="cpu")
        self._work: dist.Work | None = None
        self.count = 0  # how many votes this rank has opened: a sign of progress for the watch over ranks
        self.seconds = 0.0  # the largest time that a rank's clock showed in the last vote
        self.has_new_end = False  # whether a rank had changed the end of the run
        self.any_rank_votes_yes = False  # whether a rank had answered yes

    def open(
        self, request: int, leaves: bool = False, *, seconds: float = 0.0, new_end: bool = False, yes: bool = False
    ) -> None:
        """Send this rank's request at the start of a step."""
        self.count += 1
        ballot = [_ORDER.index(request), -1 if leaves else 0, seconds, new_end, yes]
        self._ballot = torch.tensor(ballot, dtype=torch.float64, device="cpu")
        self._work = dist.all_reduce(self._ballot, op=dist.ReduceOp.MAX, group=control_group(), async_op=True)

    def close(self) -> int:
        """Return at the end of the step the most urgent request sent at its start."""
        self.has_new_end = self.any_rank_votes_yes = False
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        request, _, self.seconds, new_end, yes = self._ballot.tolist()  # a CPU tensor: nothing waits for the device
        self.has_new_end, self.any_rank_votes_yes = bool(new_end), bool(yes)
        return _ORDER[int(request)]

    def all_ranks_stop(self) -> bool:
        """Return whether all ranks leave inside this step. A rank that does not votes otherwise at its boundary, or never."""
        self.close()
        self.open(STOP, leaves=True)
        assert self._work is not None
        try:
            self._work.wait(timedelta(seconds=PATIENCE))
        except RuntimeError:  # no other rank came
            return False
        self._work = None
        return int(self._ballot[1]) == -1

    def now(self, request: int, *, seconds: float = 0.0, new_end: bool = False, yes: bool = False) -> int:
        """Vote and wait, outside a step."""
        earlier, had_new_end = self.close(), self.has_new_end
        self.open(max(request, earlier, key=_ORDER.index), seconds=seconds, new_end=new_end or had_new_end, yes=yes)
        return self.close()


class Agreement:
    """What may end or interrupt a run: its limits, signals and requests to stop, on which all ranks act together."""

    def __init__(self, state: State):
        self._state, self.limits = state, RunLimits()
        self.vote: StopVote | None = None  # None on a single process
        self.signals = StopSignals()  # active during a run; before that it records nothing
        self.stop: StopTrainingError | TrainingStopped | None = None  # why this rank requested a stop
        self.is_reached = False  # whether all ranks stop at the same position

    def own_request(self) -> int:
        """Return this rank's request: the number of a signal, `STOP`, or 0 to continue. On a single process, follow a new end."""
        if self.vote is None and self._has_new_end():
            self.limits.adopt([self._state.max_duration], self._state)
        return self.signals.requested or (STOP if self.stop is not None else 0)

    def request(self, yes: bool = False) -> int:
        """Return the most urgent request of any rank, outside a step. This waits for the result."""
        if self.vote is None:
            return self.own_request()
        request = self.vote.now(self.own_request(), **self._seen(yes))
        self._follow()
        return request

    def any_rank_votes_yes(self, answer: bool) -> bool:
        """Return whether any rank votes yes."""
        if self.vote is None:
            return answer
        self.request(yes=answer)
        return self.vote.any_rank_votes_yes

    def after_batch(self, yes: bool = False, follows: bool = True) -> int:
        """Return the most urgent request of any rank at the start of the step that has ended, and start the next vote."""
        if self.vote is None:
            return self.own_request()
        request = self.vote.close()
        if follows:
            self._follow()
        self.vote.open(self.own_request(), **self._seen(yes))
        return request

    def waits_for_window_end(self, request: int, batches_left: int) -> bool:
        """Return whether a signal waits for the end of an accumulation window, from which any number of processes can continue."""
        if request == STOP:
            return False
        clock = self._state.clock
        seconds = clock.total_seconds() if self.vote is None else self.vote.seconds  # the same on all ranks
        return batches_left * seconds <= WINDOW_SECONDS * clock.batch

    def check_all_ranks_stop(self, stop: Exception, owner: str) -> None:
        """Raise an error if not all ranks raise a stop, so that the others end too instead of waiting."""
        if self.vote is not None and not self.is_reached and not self.vote.all_ranks_stop():
            raise DistributedError(
                f"rank {get_rank()}: a hook of {owner} raised {type(stop).__name__} ({stop}) inside a step or an evaluation "
                "of several processes, where the other ranks cannot stop. Call trainer.request_stop(reason) "
                "instead: all ranks then stop after the step. Only callbacks may raise it."
            ) from stop

    def call(self, hook: Callable[[], object]) -> None:
        """Call a hook or the plugins of an event; on several processes a stop waits until all ranks can act on it."""
        if self.vote is None:
            hook()
            return
        try:
            hook()
        except (StopTrainingError, TrainingStopped) as stop:
            self.stop = self.stop or stop

    def until_signal(self, batches: Iterable[object]) -> Generator[object, None, bool]:
        """Yield batches, then return whether a stop signal on any rank cut them short.

        The ranks agree while a batch computes. One with fewer batches goes on voting until the others are through, so that all leave
        together.
        """
        self.after_batch(yes=True, follows=False)  # yes: this rank still evaluates
        for batch in batches:
            yield batch
            if is_stop_signal(self.after_batch(yes=True, follows=False)):
                return True
        while self.vote is not None:
            request = self.vote.close()
            if not is_stop_signal(request) and not self.vote.any_rank_votes_yes:
                return False
            self.vote.open(self.own_request(), **self._seen())
            if is_stop_signal(request):
                return True
        return False

    def close(self) -> None:
        """Take part in the last vote that other ranks have opened."""
        if self.vote is not None:
            self.vote.close()
            self.vote = None

    def _has_new_end(self) -> bool:
        return self._state.max_duration is not self.limits.planned

    def _seen(self, yes: bool = False) -> Settings:
        """Return what a rank sends with its request."""
        return {"seconds": self._state.clock.total_seconds(), "new_end": self._has_new_end(), "yes": yes}

    def _follow(self) -> None:
        """Set the clock to the time all ranks agreed on, and follow an end that a rank has set."""
        assert self.vote is not None
        self._state.clock.advance_to(self.vote.seconds)
        if self.vote.has_new_end:
            ends = all_gather_values(self._state.max_duration if self._has_new_end() else None)
            self.limits.adopt(ends, self._state)
