"""The schedule of the Transformer (Vaswani et al., 2017): linear warm-up, then the inverse square root of the step."""

from drivetrain.core.arguments import check_count
from drivetrain.optim.durations import Duration, check_duration, real_steps
from drivetrain.optim.scheduler import OptimScheduler
from drivetrain.optim.schedules import noam


class NoamLr(OptimScheduler):
    """lr = init * min(s^-0.5, s * w^-1.5); with `d_model` init is d_model^-0.5, else the configured rate is the peak."""

    decays = True

    def sche_init(self, d_model: int | None = None, warmup_steps: Duration = 4000) -> None:
        """Take the width of the model, if it shall set the rate, and the length of the warm-up."""
        self.d_model = d_model if d_model is None else check_count("d_model", d_model)
        self.warmup_steps = warmup_steps
        self._warmup_time = check_duration("warmup_steps", warmup_steps)
        if not self._warmup_time.value:
            check_count("warmup_steps", warmup_steps)

    def settle(self) -> None:
        """Count the warm-up in real steps."""
        self._w = max(1, real_steps("warmup_steps", self._warmup_time, self.run_length, self.accum_grad))
        self._init = self.base_lrs[0] * self._w**0.5 if self.d_model is None else self.d_model**-0.5

    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        """Return the rate of a real step."""
        return self._init * noam(real_step, self._w)

    def extra_repr_fn(self) -> str:
        """Show both arguments."""
        return f"d_model={self.d_model}, warmup_steps={self.warmup_steps}"


Noamlr = NoamLr
