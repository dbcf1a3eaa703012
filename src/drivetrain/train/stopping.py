"""How ranks agree: one vote carries everything that may differ between them.

Clocks, signals, stops, limits and the answers of user functions are each rank's own. What follows from them (a save, an evaluation, the
end of the run) needs all ranks, so it is decided by the vote: every rank sends what it sees, and all act on the same answer.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from drivetrain.runtime.collectives import control_group
from drivetrain.runtime.signals import URGENCY, is_stop

PATIENCE = 10.0
"""Seconds that a rank waits, which leaves inside a step, for the others to do the same."""
WINDOW_SECONDS = 5.0
"""A signal waits for the end of an accumulation window that takes at most so many seconds, by the mean time of a batch."""
STOP = 1
"""A request to stop without a signal."""
_ORDER = (0, STOP, *URGENCY)  # the last one wins: a save comes before a stop, and a signal to end before both


def is_stop_signal(request: int) -> bool:
    """Return whether a request is a signal that asks the process to end."""
    return request > STOP and is_stop(request)


class StopVote:
    """Asks all ranks once a step what anyone requests; the answer travels while the step computes.

    A request is 0 (go on), `STOP`, or the number of a signal. The most urgent one wins, on all ranks alike. With it travel the time that
    each rank's clock shows, whether a rank has changed the end of the run, and whether it answers yes to a question of the moment.
    """

    def __init__(self) -> None:
        # The request, -1 where all leave inside the step, the seconds, a changed end, a yes: of each the largest.
        self._ballot = torch.zeros(5, dtype=torch.float64)
        self._work: dist.Work | None = None
        self.seconds = 0.0
        """The largest time that a rank's clock showed in the last vote."""
        self.has_new_end = False
        """Whether a rank had changed the end of the run."""
        self.says_yes = False
        """Whether a rank had answered yes."""

    def open(
        self, request: int, leaves: bool = False, *, seconds: float = 0.0, new_end: bool = False, yes: bool = False
    ) -> None:
        """Send what this rank sees, at the start of a step."""
        self._ballot = torch.tensor(
            [_ORDER.index(request), -1 if leaves else 0, seconds, new_end, yes], dtype=torch.float64
        )
        self._work = dist.all_reduce(self._ballot, op=dist.ReduceOp.MAX, group=control_group(), async_op=True)

    def close(self) -> int:
        """Return the most urgent request sent at the start of the step, at its end."""
        self.has_new_end = self.says_yes = False
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        request, _, self.seconds, new_end, yes = self._ballot.tolist()  # a CPU tensor: nothing waits for the device
        self.has_new_end, self.says_yes = bool(new_end), bool(yes)
        return _ORDER[int(request)]

    def everyone_leaves(self) -> bool:
        """Return whether all ranks leave inside this step; one that does not answers otherwise at its boundary, or never."""
        self.close()
        self.open(STOP, leaves=True)
        assert self._work is not None
        try:
            self._work.wait(timedelta(seconds=PATIENCE))
        except RuntimeError:  # nobody came
            return False
        self._work = None
        return int(self._ballot[1]) == -1

    def now(self, request: int, *, seconds: float = 0.0, new_end: bool = False, yes: bool = False) -> int:
        """Ask and wait, where no step is under way."""
        earlier, had_new_end = self.close(), self.has_new_end
        self.open(max(request, earlier, key=_ORDER.index), seconds=seconds, new_end=new_end or had_new_end, yes=yes)
        return self.close()
