"""The inverse square root of the step (Vaswani et al., 2017), from a peak at the end of the warm-up."""

from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration
from drivetrain.optim.schedules import inverse_sqrt


class InverseSqrtLr(CurveLr):
    """f = sqrt(w' / max(s, w')); with a linear warm-up this is NoamLr."""

    def sche_init(self, warmup_steps: Duration = 0, warmup_start: float = 0.0, warmup: str = "linear") -> None:
        """Take the warm-up, which also sets how fast the rate falls."""
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step."""
        return inverse_sqrt(real_step, max(self._w, 1))
