"""How long: turns `400`, `"3ep"`, `"500st"`, `"1000ba"` or `"0.05dur"` into a number of a unit's real steps.

A real step is one window of `accum_grad` batches. Epochs and fractions can be counted only when the length of the run is
known; the Trainer passes it to `bind`, in batches.
"""

import math
from dataclasses import dataclass

from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time, TimeUnit, ensure_time

Duration = int | str | Time

_UNITS = (TimeUnit.STEP, TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION)


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """The length of a run as the loader sees it."""

    total_batches: int | None = None
    """Batches of the whole run, or None while that is unknown."""
    batches_per_epoch: int | None = None
    """Batches of one epoch, or None while that is unknown."""

    def windows(self, batches: int, accum_grad: int) -> int:
        """Return the real steps in so many batches; windows end with their epoch, so each epoch may have a short one."""
        if self.batches_per_epoch is None:
            return math.ceil(batches / accum_grad)
        epochs, rest = divmod(batches, self.batches_per_epoch)
        return epochs * math.ceil(self.batches_per_epoch / accum_grad) + math.ceil(rest / accum_grad)

    def total(self, accum_grad: int) -> int | None:
        """Return the real steps of the whole run, or None while that is unknown."""
        return None if self.total_batches is None else self.windows(self.total_batches, accum_grad)


def check_duration(name: str, value: object) -> Time:
    """Return the duration as a Time, or raise an error; a bare whole number counts real steps."""
    if isinstance(value, bool) or not isinstance(value, (int, str, Time)):
        raise ConfigError(
            f"{name}={value!r}: expected a whole number of steps or a time such as '3ep', '500st', '0.05dur'."
        )
    try:
        time = ensure_time(value, TimeUnit.STEP)
    except (ValueError, TypeError) as problem:
        raise ConfigError(f"{name}: {problem}") from None
    if time.unit not in _UNITS:
        raise ConfigError(
            f"{name}={value!r}: a schedule counts in st (steps), ba (batches), ep (epochs) or dur, not in {time.unit}."
        )
    if time.value < 0:
        raise ConfigError(f"{name}={value!r}: expected at least 0.")
    return time


def real_steps(name: str, time: Time, run: RunLength, accum_grad: int, total: int | None = None) -> int:
    """Return a duration in real steps; `total` overrides the run's own length for fractions."""
    if time.unit is TimeUnit.STEP:
        return int(time.value)
    if time.unit is TimeUnit.BATCH:
        return run.windows(int(time.value), accum_grad)
    if time.unit is TimeUnit.EPOCH:
        if run.batches_per_epoch is None:
            raise ConfigError(
                f"{name}={str(time)!r} counts epochs, but the number of batches in an epoch is not known. Call "
                "bind(total_steps=..., steps_per_epoch=...) before training, or give a number of steps."
            )
        return run.windows(int(time.value) * run.batches_per_epoch, accum_grad)
    total = total if total is not None else run.total(accum_grad)
    if total is None:
        raise ConfigError(
            f"{name}={str(time)!r} is a fraction of the run, whose length is not known. Give total_steps, or call "
            "bind(total_steps=...) before training."
        )
    return int(round(time.value * total, 9))  # nine decimals forgive binary fractions: 0.29 of 100 is 29
