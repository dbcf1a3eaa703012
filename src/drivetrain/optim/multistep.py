"""A factor at each of several milestones."""

from collections.abc import Sequence

from drivetrain.core.arguments import check_number
from drivetrain.core.errors import ConfigError
from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration, check_duration, real_steps
from drivetrain.optim.schedules import multistep


class MultiStepLr(CurveLr):
    """f = gamma^(number of milestones m <= s - 1)."""

    def sche_init(
        self,
        milestones: Sequence[Duration],
        gamma: float = 0.1,
        warmup_steps: Duration = 0,
        warmup_start: float = 0.0,
        warmup: str = "linear",
    ) -> None:
        """Take the milestones, the factor and the warm-up."""
        if isinstance(milestones, str) or not isinstance(milestones, Sequence) or not milestones:
            raise ConfigError(
                f"milestones={milestones!r}: expected a list of steps or times, such as [30, 60] or ['3ep', '6ep']."
            )
        self.milestones, self.gamma = milestones, check_number("gamma", gamma, above=0)
        self._milestone_times = [check_duration("milestones", milestone) for milestone in milestones]
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def settle(self) -> None:
        """Turn the milestones into real steps too."""
        super().settle()
        steps = [real_steps("milestones", time, self.run_length, self.accum_grad) for time in self._milestone_times]
        if steps != sorted(steps):
            raise ConfigError(f"milestones={list(self.milestones)!r}: expected ascending order.")
        self._steps = steps

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step."""
        return multistep(real_step - 1, self._steps, self.gamma)
