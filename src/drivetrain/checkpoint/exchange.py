"""How ranks agree about one checkpoint: each reports its result, and all ranks get every report.

A save needs two such rounds: before writing (where, and is there enough space) and after it (was every file written). The first
round has a deadline and names the ranks that are missing, because a save that only some ranks call is the most common mistake. A
background save runs during training, so it uses its own group: two threads must not share one.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from drivetrain.core.errors import CheckpointError, first_line
from drivetrain.runtime.collectives import control_group, gather_objects
from drivetrain.runtime.ranks import get_num_processes, get_rank

DEADLINE = timedelta(minutes=10)

Failure = Callable[[str], CheckpointError]
"""Makes the error of a failed attempt from its explanation."""


class RankExchange:
    """Rounds of messages between the ranks that save or restore together. On a single rank a round returns its own message."""

    def __init__(self, group: "dist.ProcessGroup | None" = None, deadline: timedelta = DEADLINE):
        self.group = group
        self.rank = get_rank() if group is not None else 0
        self.size = get_num_processes() if group is not None else 1
        self.deadline = deadline

    def meet(self, purpose: str) -> None:
        """Wait for all ranks, at most until the deadline. The error names the missing ranks."""
        if self.group is None:
            return
        try:
            dist.monitored_barrier(self.group, timeout=self.deadline, wait_all_ranks=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"{purpose}: not every rank arrived within {self.deadline.total_seconds():.0f} s ({first_line(error)}). "
                "All ranks must call it, in the same order; a condition such as `if is_master():` around it is the "
                "usual cause."
            ) from error

    def gather(self, value: object) -> list[Any]:
        """Return the messages of all ranks, in rank order."""
        if self.group is None:
            return [value]
        return gather_objects(value, self.group)

    def first(self, ask: Callable[[], object], failure: Failure | None = None) -> Any:
        """Return rank 0's result on every rank, or raise its error (made into a `failure`) on every rank."""
        outcome = self.attempt(lambda: ask() if self.rank == 0 else None)
        if outcome.own is not None and failure is None:
            raise outcome.own
        return outcome.checked(failure or CheckpointError)[0]

    def attempt(self, action: Callable[[], object]) -> "AttemptResults":
        """Run `action` on every rank and report the results to all of them.

        A disk error or a CheckpointError is an outcome, to be judged by the caller. Any other error of one rank is
        raised on all of them, so that none is left waiting.
        """
        result, own = None, None
        try:
            result = action()
        except Exception as error:
            own = error
        expected = own is None or isinstance(own, OSError | CheckpointError)
        said = self.gather((result, None if own is None else _describe(own), expected))
        if own is not None and not expected:
            raise own
        for rank, (_, problem, is_expected) in enumerate(said):
            if not is_expected:
                raise CheckpointError(f"rank {rank} failed: {problem}")
        problems = {rank: problem for rank, (_, problem, _) in enumerate(said) if problem is not None}
        return AttemptResults([result for result, _, _ in said], problems, own)

    def close(self) -> None:
        """Destroy a group that was made for this exchange alone."""
        if self.group is not None and self.group is not control_group():
            dist.destroy_process_group(self.group)


class AttemptResults(NamedTuple):
    """The results of an attempt on each rank, and the errors."""

    results: list[Any]
    problems: dict[int, str]
    own: Exception | None

    def checked(self, failure: Failure) -> list[Any]:
        """Return the results, or raise the `failure` that explains why there are none."""
        if self.problems:
            raise failure(self.explain()) from self.own
        return self.results

    def explain(self) -> str:
        """Return what went wrong, with ranks if there are several."""
        if len(self.results) == 1:
            return "; ".join(self.problems.values())
        return "; ".join(f"rank {rank}: {problem}" for rank, problem in self.problems.items())


def control_exchange() -> RankExchange:
    """Return the exchange over the control group, for the main thread."""
    return RankExchange(control_group() if get_num_processes() > 1 else None)


def background_exchange() -> RankExchange:
    """Return an exchange over a new group, for one background thread. Every rank makes it at the same point."""
    if get_num_processes() == 1:
        return RankExchange()
    return RankExchange(dist.new_group(backend="gloo"))


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
