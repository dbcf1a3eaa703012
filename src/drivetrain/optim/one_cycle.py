"""The 1cycle policy (Smith and Topin, 2017): up from a fraction of the rate, then down to almost nothing."""

from drivetrain.core.arguments import check_choice, check_fraction, check_number
from drivetrain.core.errors import ConfigError
from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration
from drivetrain.optim.schedules import ANNEAL_SHAPES, one_cycle


class OneCycleLr(CurveLr):
    """As torch's OneCycleLR in two phases with max_lr = base; past the end the last rate holds."""

    def sche_init(
        self,
        pct_start: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        anneal: str = "cos",
        total_steps: Duration | None = None,
    ) -> None:
        """Take the share of the rise, the divisors of the rate at both ends, the shape and the length."""
        self.pct_start = check_fraction("pct_start", pct_start)
        self.div_factor = check_number("div_factor", div_factor, above=0)
        self.final_div_factor = check_number("final_div_factor", final_div_factor, above=0)
        self.anneal = check_choice("anneal", anneal, ANNEAL_SHAPES)
        self.set_length(total_steps)

    def settle(self) -> None:
        """Find the peak."""
        super().settle()
        self._peak, self._end = self.pct_start * self._total - 1, self._total - 1
        if self._peak > self._end:
            raise ConfigError(f"pct_start={self.pct_start}: the rise is longer than the run of {self._total} steps.")

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step."""
        start = 1.0 / self.div_factor
        return one_cycle(real_step - 1, self._peak, self._end, start, start / self.final_div_factor, self.anneal)
