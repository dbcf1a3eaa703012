"""Warm-up, stable, decay (Hu et al., 2024): the full rate until a short decay at the end."""

from drivetrain.core.arguments import check_choice
from drivetrain.core.errors import ConfigError
from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration, check_duration, real_steps
from drivetrain.optim.schedules import DECAY_SHAPES, decay


class WSDLr(CurveLr):
    """f = 1 until T - d, then down over d steps: linear, sqrt (1 - sqrt v), cosine or inverse (1 / (v/r + 1 - v))."""

    def sche_init(
        self,
        decay_steps: Duration = "0.1dur",
        decay: str = "linear",
        total_steps: Duration | None = None,
        min_lr: float | None = None,
        min_lr_ratio: float = 0.0,
        warmup_steps: Duration = 0,
        warmup_start: float = 0.0,
        warmup: str = "linear",
    ) -> None:
        """Take the decay, then length, floor and warm-up."""
        self.decay_steps, self.decay = decay_steps, check_choice("decay", decay, DECAY_SHAPES)
        self._decay_time = check_duration("decay_steps", decay_steps)
        self.set_length(total_steps)
        self.set_floor(min_lr, min_lr_ratio)
        self.set_warmup(warmup_steps, warmup_start, warmup)
        if decay == "inverse" and not self._floor > 0:
            raise ConfigError("decay='inverse' never reaches zero: give min_lr or min_lr_ratio above 0.")

    def settle(self) -> None:
        """Turn the decay into real steps too."""
        super().settle()
        self._decay = real_steps("decay_steps", self._decay_time, self.run_length, self.accum_grad, self._total)
        if self._w + self._decay > self._total:
            raise ConfigError(
                f"a warm-up of {self._w} and a decay of {self._decay} steps do not fit into a run of {self._total} steps."
            )

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step, floor included."""
        into_decay = real_step - (self._total - self._decay)
        if into_decay <= 0:
            return 1.0
        return decay(min(1.0, into_decay / (self._decay + 1)), self.decay, self._floor)

    def lifted(self, factor: float) -> float:
        """Return the factor as it is: its floor is part of the decay."""
        return factor
