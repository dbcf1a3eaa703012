"""How a run ends early without leaving a rank behind."""

from datetime import timedelta

import torch
import torch.distributed as dist

from drivetrain.runtime.collectives import control_group

PATIENCE = 10.0
"""Seconds that a rank waits, which leaves inside a step, for the others to do the same."""
STOP = 1  # a wish to stop; larger numbers than any wish are signals, so a signal outweighs it


class StopVote:
    """Asks all ranks once a step what anyone wishes; the answer travels while the step computes.

    A wish is 0 (go on), `STOP`, or the number of a signal. The largest one wins, on all ranks alike.
    """

    def __init__(self) -> None:
        self._wish = torch.zeros(2, dtype=torch.int32)  # the strongest wish, and -1 where all leave inside the step
        self._work: dist.Work | None = None

    def open(self, wish: int, leaves: bool = False) -> None:
        """Send this rank's wish, at the start of a step."""
        self._wish[0], self._wish[1] = wish, -1 if leaves else 0
        self._work = dist.all_reduce(self._wish, op=dist.ReduceOp.MAX, group=control_group(), async_op=True)

    def close(self) -> int:
        """Return the strongest wish sent at the start of the step, at its end."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._wish[0])  # a CPU tensor: nothing waits for the device

    def everyone_leaves(self) -> bool:
        """Say whether all ranks leave inside this step; one that does not answers otherwise at its boundary, or never."""
        self.close()
        self.open(STOP, leaves=True)
        assert self._work is not None
        try:
            self._work.wait(timedelta(seconds=PATIENCE))
        except RuntimeError:  # nobody came
            return False
        self._work = None
        return int(self._wish[1]) == -1

    def now(self, wish: int) -> int:
        """Ask and wait, where no step is under way."""
        earlier = self.close()
        self.open(max(wish, earlier))
        return self.close()
