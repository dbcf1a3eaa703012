"""The configured learning rate throughout, after an optional warm-up."""

from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration


class ConstantLr(CurveLr):
    """f = 1."""

    decays = False

    def sche_init(self, warmup_steps: Duration = 0, warmup_start: float = 0.0, warmup: str = "linear") -> None:
        """Take the warm-up."""
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return 1."""
        return 1.0
