"""A power of what is left of the run."""

from drivetrain.core.arguments import check_number
from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration
from drivetrain.optim.schedules import polynomial


class PolynomialLr(CurveLr):
    """f = (1 - u)^power."""

    def sche_init(
        self,
        power: float = 1.0,
        total_steps: Duration | None = None,
        min_lr: float | None = None,
        min_lr_ratio: float = 0.0,
        warmup_steps: Duration = 0,
        warmup_start: float = 0.0,
        warmup: str = "linear",
    ) -> None:
        """Take the power, then length, floor and warm-up."""
        self.power = check_number("power", power, above=0)
        self.set_length(total_steps)
        self.set_floor(min_lr, min_lr_ratio)
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step."""
        return polynomial(self.position(real_step), self.power)
