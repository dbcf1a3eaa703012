"""Exponential decay, once per epoch or once per real step."""

from drivetrain.core.arguments import check_choice, check_number
from drivetrain.core.errors import ConfigError
from drivetrain.optim.scheduler import OptimScheduler
from drivetrain.optim.schedules import exponential


class ExponentDecayLr(OptimScheduler):
    """lr = base * decay_factor^(epoch - 1), or of the real step with `per="step"`."""

    decays = True

    def sche_init(self, decay_factor: float = 0.999, per: str = "epoch") -> None:
        """Take the factor and what it is applied once per."""
        self.decay_factor = check_number("decay_factor", decay_factor, above=0)
        self.per = check_choice("per", per, ("epoch", "step"))

    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        """Return the rate of an epoch or real step."""
        if self.per == "step":
            return self.base_lrs[0] * exponential(real_step - 1, self.decay_factor)
        if epoch_num is None:
            raise ConfigError(f"unit {self.name!r} decays per epoch: pass epoch_num (from 1), or set per='step'.")
        return self.base_lrs[0] * exponential(epoch_num - 1, self.decay_factor)

    def extra_repr_fn(self) -> str:
        """Show both arguments."""
        return f"decay_factor={self.decay_factor}, per={self.per!r}"
