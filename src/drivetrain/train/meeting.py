"""Where the ranks of a run meet: they agree on time, signals, stops and evaluations, and no rank leaves alone.

Each rank sees its own clock, signals and errors. What it sees goes into the vote (`stopping.py`), and what all ranks do together follows
from the answer. One process asks nobody.
"""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from drivetrain.core.engine import Engine, Fire
from drivetrain.core.errors import DistributedError, StopTrainingError, TrainingStopped
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.ranks import get_rank
from drivetrain.runtime.signals import StopSignals
from drivetrain.train import resuming
from drivetrain.train.gradients import Gradients
from drivetrain.train.hooks import TrainerHooks
from drivetrain.train.settings import RunLimits
from drivetrain.train.stopping import STOP, WINDOW_SECONDS, StopVote, is_stop_signal


class TrainerMeeting(TrainerHooks):
    """The part of a Trainer's loop that agrees with the other ranks."""

    engine: Engine
    _vote: StopVote | None
    _signals: StopSignals
    _limits: RunLimits
    _gradients: Gradients

    def _own_request(self) -> int:
        """Return what this rank requests: the number of a signal, `STOP`, or 0 to go on."""
        return self._signals.requested or (STOP if self._stop is not None else 0)

    def _open_vote(self, yes: bool = False) -> None:
        assert self._vote is not None
        self._vote.open(
            self._own_request(), seconds=self.state.clock.total_seconds(), new_end=self._has_new_end(), yes=yes
        )

    def _ask_all(self, yes: bool = False) -> int:
        """Vote and wait for the answer; return the most urgent request of any rank."""
        assert self._vote is not None
        request = self._vote.now(
            self._own_request(), seconds=self.state.clock.total_seconds(), new_end=self._has_new_end(), yes=yes
        )
        self._follow_vote()
        return request

    def _has_new_end(self) -> bool:
        return self.state.max_duration is not self._limits.planned

    def _follow_vote(self) -> None:
        """Set the clock to the time all ranks agreed on, and follow an end that a rank has set."""
        assert self._vote is not None
        self.state.clock.advance_to(self._vote.seconds)
        if self._vote.has_new_end:
            self._limits.adopt(all_gather_values(self.state.max_duration if self._has_new_end() else None), self.state)

    def _meet(self) -> None:
        """Outside a step: act on a stop or a signal of any rank, on all ranks at the same place."""
        request = self._own_request() if self._vote is None else self._ask_all()
        if request:
            self._obey(request)

    def _obey(self, request: int) -> None:
        """Stop because a rank asked for it, or act on a signal any rank received."""
        if request == STOP:
            self._stop_together()
        resuming.obey_signal(self, request)

    def _window_ends_soon(self, request: int) -> bool:
        """Return whether a signal waits for the end of an accumulation window, which any number of processes can go on from."""
        window, clock = self._gradients.window, self.state.clock
        if request == STOP or not window.count or self._units is not None:
            return False
        seconds = clock.total_seconds() if self._vote is None else self._vote.seconds  # the same on all ranks
        return (window.length - window.count) * seconds <= WINDOW_SECONDS * clock.batch

    def _stop_together(self) -> NoReturn:
        """Raise what ends the run, on all ranks at the same place."""
        self._has_agreed = True
        raise self._stop or StopTrainingError("another process asked to stop")

    _has_agreed = False

    def _refuse_to_leave_alone(self, stop: Exception) -> None:
        """Turn a stop that not all ranks raise into an error, which ends the others too instead of leaving them to wait."""
        if self._vote is not None and not self._has_agreed and not self._vote.everyone_leaves():
            raise DistributedError(
                f"rank {get_rank()}: a hook of {type(self).__name__} raised {type(stop).__name__} ({stop}) inside a step or an evaluation "
                "of several processes, which the others cannot leave with it. Call trainer.request_stop(reason) there instead: all "
                "ranks then stop after the step. A callback may raise it."
            ) from stop

    def _between_steps(self, hook: Callable[[], Any]) -> None:
        """Call a hook outside the steps; on several processes a stop that it raises waits until all ranks meet."""
        if self._vote is None:
            hook()
        else:
            self._together(hook)

    def _fire_of_all_ranks(self) -> Fire:
        """Return the events for a run on several processes, where no rank may leave alone."""
        if self._guarded_fire is None:
            self._guarded_fire = self.engine.guarded(self._together)
        return self._guarded_fire

    _guarded_fire: Fire | None = None

    def _together(self, run: Callable[[], Any]) -> None:
        """Run the guests of an event on one of several processes: a stop is noted, and acted on where all ranks meet."""
        try:
            run()
        except (StopTrainingError, TrainingStopped) as stop:
            self._stop = self._stop or stop

    _evaluation_was_cut = False

    def _until_signal(self, batches: Any) -> Iterator[Any]:
        """Yield batches until they end, or until a signal asks any rank to end; the ranks agree while a batch computes.

        A rank with fewer batches goes on voting until the others are through, so that all leave together.
        """
        vote = self._vote
        if vote is not None:
            vote.close()
            self._open_vote(yes=True)  # yes: this rank still evaluates
        for batch in batches:
            yield batch
            request = self._own_request() if vote is None else vote.close()
            if vote is not None:
                self._open_vote(yes=True)
            if is_stop_signal(request):
                self._evaluation_was_cut = True
                return
        while vote is not None:
            request = vote.close()
            if not is_stop_signal(request) and not vote.says_yes:
                return
            self._open_vote()
            if is_stop_signal(request):
                self._evaluation_was_cut = True
                return
