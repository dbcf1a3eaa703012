"""What most schedules share: a warm-up, a body that is a factor of the configured rate, a floor and a length.

For s < w the warm-up holds, the peak is at s = w, once, and no update is made with a rate of zero. A schedule whose body
depends on the length of the run takes `total_steps`; left out, it comes from `bind`.
"""

from abc import abstractmethod

from drivetrain.core.arguments import check_choice, check_fraction
from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time
from drivetrain.optim.durations import Duration, check_duration, real_steps
from drivetrain.optim.scheduler import OptimScheduler
from drivetrain.optim.schedules import WARMUP_SHAPES, body_position, warm_up, with_floor


class CurveLr(OptimScheduler):
    """The base of the schedules below; a leaf defines `sche_init` and `factor`."""

    decays = True

    has_length = False
    """Whether the body depends on the length of the run."""

    @abstractmethod
    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the body's factor of the base rate at a real step after the warm-up, before the floor is added."""

    def set_warmup(self, steps: Duration, start: float, shape: str) -> None:
        """Take the warm-up's length, the fraction of the rate it starts from, and its shape."""
        self.warmup_steps, self.warmup_start, self.warmup = steps, check_fraction("warmup_start", start), shape
        check_choice("warmup", shape, WARMUP_SHAPES)
        self._warmup_time = check_duration("warmup_steps", steps)

    def set_length(self, total_steps: Duration | None) -> None:
        """Take the length of the schedule; None waits for the length of the run."""
        self.has_length = True
        self.total_steps = total_steps
        self._total_time = None if total_steps is None else check_duration("total_steps", total_steps)

    def set_floor(self, min_lr: float | None, min_lr_ratio: float) -> None:
        """Take the lowest rate, as a rate or as a fraction of the configured one."""
        self.min_lr, self.min_lr_ratio = min_lr, check_fraction("min_lr_ratio", min_lr_ratio)
        if min_lr is None:
            self._floor = self.min_lr_ratio
            return
        if min_lr_ratio != 0.0:
            raise ConfigError(
                f"min_lr={min_lr} and min_lr_ratio={min_lr_ratio} both say how low the rate may fall. Give one."
            )
        base = self.base_lrs[0]
        if isinstance(min_lr, bool) or not isinstance(min_lr, (int, float)) or not 0 <= min_lr <= base:
            raise ConfigError(f"min_lr={min_lr!r}: expected a rate from 0 to the configured {base}.")
        self._floor = min_lr / base if base else 0.0

    _warmup_time = Time(0, "st")
    _floor = 0.0
    _w = _total = 0

    def settle(self) -> None:
        """Turn warm-up and length into real steps."""
        if self.has_length:
            self._total = self._length()
        total = self._total or None
        self._w = real_steps("warmup_steps", self._warmup_time, self.run_length, self.accum_grad, total)
        if self.has_length and self._w >= self._total:
            raise ConfigError(f"a warm-up of {self._w} steps is not shorter than the run of {self._total} steps.")

    def _length(self) -> int:
        if self._total_time is not None:
            total = real_steps("total_steps", self._total_time, self.run_length, self.accum_grad)
        else:
            known = self.run_length.total(self.accum_grad)
            if known is None:
                raise ConfigError(
                    f"unit {self.name!r}: {type(self).__name__} needs to know the length of the run. Give total_steps, or call "
                    "bind(total_steps=...) with the number of batches."
                )
            total = known
        if total < 1:
            raise ConfigError(f"total_steps={self.total_steps!r} is {total} steps; a schedule needs at least 1.")
        return total

    def position(self, real_step: int) -> float:
        """Return how much of the body lies behind a real step, from 0 to 1."""
        return body_position(real_step, self._total, self._w)

    def after_peak(self, real_step: int) -> int:
        """Return the real steps since the peak."""
        return real_step - max(self._w, 1)

    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        """Return the rate of a real step."""
        if real_step < self._w:
            return self.base_lrs[0] * warm_up(real_step / self._w, self.warmup_start, self.warmup)
        return self.base_lrs[0] * self.lifted(self.factor(real_step, epoch_num))

    def lifted(self, factor: float) -> float:
        """Return the factor with the floor under it."""
        return with_floor(factor, self._floor) if self._floor else factor

    def extra_repr_fn(self) -> str:
        """Show the arguments that were given."""
        return ", ".join(f"{name}={value!r}" for name, value in self.sche_conf.items())
