"""A learning rate that is any function of the step."""

import inspect
from collections.abc import Callable

from drivetrain.core.errors import ConfigError
from drivetrain.optim.building import import_dotted
from drivetrain.optim.curve import CurveLr
from drivetrain.optim.durations import Duration


class LambdaLr(CurveLr):
    """f = fn(s) or fn(s, epoch); `fn` is a callable or the dotted path of one."""

    decays = False

    def sche_init(
        self,
        fn: Callable[..., float] | str,
        warmup_steps: Duration = 0,
        warmup_start: float = 0.0,
        warmup: str = "linear",
    ) -> None:
        """Take the function and the warm-up."""
        found = import_dotted(fn, "fn") if isinstance(fn, str) else fn
        if not callable(found):
            raise ConfigError(f"fn={fn!r}: expected a function of the step, or of step and epoch.")
        self.fn: Callable[..., float] = found
        required = [
            p
            for p in inspect.signature(found).parameters.values()
            if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD
        ]
        if not 1 <= len(required) <= 2:
            raise ConfigError(f"fn={fn!r} needs {len(required)} arguments; expected fn(step) or fn(step, epoch).")
        self._wants_epoch = len(required) == 2
        self.set_warmup(warmup_steps, warmup_start, warmup)

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return what the function says."""
        return self.fn(real_step, epoch_num) if self._wants_epoch else self.fn(real_step)
