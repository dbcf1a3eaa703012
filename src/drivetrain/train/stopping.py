"""How a run ends early without leaving a rank behind."""

import torch
import torch.distributed as dist

from drivetrain.runtime.collectives import control_group

STOP = 1  # a wish to stop; larger numbers than any wish are signals, so a signal outweighs it


class StopVote:
    """Asks all ranks once a step what anyone wishes; the answer travels while the step computes.

    A wish is 0 (go on), `STOP`, or the number of a signal. The largest one wins, on all ranks alike.
    """

    def __init__(self) -> None:
        self._wish = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def open(self, wish: int) -> None:
        """Send this rank's wish, at the start of a step."""
        self._wish.fill_(wish)
        self._work = dist.all_reduce(self._wish, op=dist.ReduceOp.MAX, group=control_group(), async_op=True)

    def close(self) -> int:
        """Return the strongest wish sent at the start of the step, at its end."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._wish.item())  # a CPU tensor: nothing waits for the device

    def now(self, wish: int) -> int:
        """Ask and wait, where no step is under way."""
        earlier = self.close()
        self.open(max(wish, earlier))
        return self.close()
