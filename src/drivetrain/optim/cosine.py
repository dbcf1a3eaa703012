"""Cosine annealing (Loshchilov and Hutter, 2016), once or in cycles, and with k-decay (Zhang and Li, 2020)."""

from drivetrain.core.arguments import check_number
from drivetrain.core.errors import ConfigError
from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration, check_duration, real_steps
from drivetrain.optim.schedules import cosine, cosine_restarts


class CosineLr(CurveLr):
    """f = (1 + cos(pi u^k)) / 2."""

    def sche_init(
        self,
        k_decay: float = 1.0,
        total_steps: Duration | None = None,
        min_lr: float | None = None,
        min_lr_ratio: float = 0.0,
        warmup_steps: Duration = 0,
        warmup_start: float = 0.0,
        warmup: str = "linear",
    ) -> None:
        """Take k, then length, floor and warm-up."""
        self.k_decay = check_number("k_decay", k_decay, above=0)
        self.set_length(total_steps)
        self.set_floor(min_lr, min_lr_ratio)
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step."""
        return cosine(self.position(real_step), self.k_decay)


class CosineRestartsLr(CurveLr):
    """A cosine within each cycle; cycle i lasts first_cycle * cycle_mult^i real steps, counted from the peak."""

    def sche_init(
        self,
        first_cycle: Duration,
        cycle_mult: float = 1.0,
        warmup_steps: Duration = 0,
        warmup_start: float = 0.0,
        warmup: str = "linear",
    ) -> None:
        """Take the cycles and the warm-up."""
        self.first_cycle, self.cycle_mult = first_cycle, check_number("cycle_mult", cycle_mult, above=0)
        if self.cycle_mult < 1:
            raise ConfigError(f"cycle_mult={cycle_mult}: cycles that grow shorter end at a point; expected at least 1.")
        self._cycle_time = check_duration("first_cycle", first_cycle)
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def settle(self) -> None:
        """Turn the first cycle into real steps too."""
        super().settle()
        self._cycle = real_steps("first_cycle", self._cycle_time, self.run_length, self.accum_grad)
        if self._cycle < 1:
            raise ConfigError(f"first_cycle={self.first_cycle!r} is {self._cycle} steps; expected at least 1.")

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the factor at a real step."""
        return cosine_restarts(self.after_peak(real_step), self._cycle, self.cycle_mult)
