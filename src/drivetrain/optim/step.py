"""A factor after every so many steps."""

from drivetrain.core.arguments import check_number
from drivetrain.core.errors import ConfigError
from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration, check_duration, real_steps
from drivetrain.optim.schedules import step_decay


class StepLr(CurveLr):
    """f = gamma^floor((s - w') / step_size), counted from the peak."""

    def sche_init(
        self,
        step_size: Duration,
        gamma: float = 0.1,
        warmup_steps: Duration = 0,
        warmup_start: float = 0.0,
        warmup: str = "linear",
    ) -> None:
        """Take the size of a step, the factor and the warm-up."""
        self.step_size, self.gamma = step_size, check_number("gamma", gamma, above=0)
        self._size_time = check_duration("step_size", step_size)
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def settle(self) -> None:
        """Turn the size into real steps too."""
        super().settle()
        self._size = real_steps("step_size", self._size_time, self.run_length, self.accum_grad)
        if self._size < 1:
            raise ConfigError(f"step_size={self.step_size!r} is {self._size} steps; expected at least 1.")

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step."""
        return step_decay(self.after_peak(real_step), self._size, self.gamma)
