"""A straight line from the configured rate to the floor."""

from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration
from drivetrain.optim.schedules import linear


class LinearLr(CurveLr):
    """f = 1 - u."""

    def sche_init(
        self,
        total_steps: Duration | None = None,
        min_lr: float | None = None,
        min_lr_ratio: float = 0.0,
        warmup_steps: Duration = 0,
        warmup_start: float = 0.0,
        warmup: str = "linear",
    ) -> None:
        """Take length, floor and warm-up."""
        self.set_length(total_steps)
        self.set_floor(min_lr, min_lr_ratio)
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step."""
        return linear(self.position(real_step))
