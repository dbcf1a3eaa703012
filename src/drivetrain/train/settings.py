"""What one call of `train()` asks for, checked before anything is built."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError, nearest_name
from drivetrain.core.time import Clock, Time, TimeUnit, ensure_time

EvalInterval = int | str | Time | Callable[..., bool]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The arguments of `Trainer.train` that shape the loop; `Trainer.train` says what each means."""

    num_epochs: int | None = None
    max_num_train_steps: int | None = None
    max_duration: Time | None = None
    per_device_batch_size: int = 8
    global_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    gradient_clip_value: float | None = None
    gradient_clip_norm: float | None = None
    microbatch_size: int | str | None = None
    eval_interval: EvalInterval = "1ep"
    scheduler_interval: str = "step"
    scheduler_metric: str = "eval_loss_epoch"
    resume_from: Any = None
    checkpoint_dir: Any = None
    checkpoint_every: str | int | None = "1ep"
    keep_checkpoints: int = 3
    async_checkpoint: bool = True
    limit_train_batches: int | float | None = None
    limit_eval_batches: int | float | None = None
    sanity_eval_batches: int = 0
    overfit_batches: int = 0
    fast_dev_run: bool | int = False

    def __post_init__(self) -> None:
        self._check_limits()
        _positive("gradient_accumulation_steps", self.gradient_accumulation_steps)
        _positive("per_device_batch_size", self.per_device_batch_size)
        if self.global_batch_size is not None:
            _positive("global_batch_size", self.global_batch_size)
        for name in ("gradient_clip_value", "gradient_clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r}: expected a number above 0, or None for no clipping.")
        if self.gradient_clip_value is not None and self.gradient_clip_norm is not None:
            raise ConfigError(
                f"gradient_clip_value={self.gradient_clip_value} and gradient_clip_norm={self.gradient_clip_norm}: both were "
                "given. Choose one: clipping by value clamps entries, clipping by norm scales the whole gradient."
            )
        if isinstance(self.microbatch_size, str) and self.microbatch_size != "auto":
            raise ConfigError(f"microbatch_size={self.microbatch_size!r}: expected a number of rows, 'auto' or None.")
        if isinstance(self.microbatch_size, int):
            _positive("microbatch_size", self.microbatch_size)
        if self.scheduler_interval not in ("step", "epoch"):
            near = nearest_name(self.scheduler_interval, ("step", "epoch"))
            raise ConfigError(
                f"scheduler_interval={self.scheduler_interval!r}: expected 'step' or 'epoch'."
                + (f" Did you mean {near!r}?" if near else "")
            )
        for name in ("limit_train_batches", "limit_eval_batches"):
            value = getattr(self, name)
            if isinstance(value, float) and not 0 < value <= 1:
                raise ConfigError(
                    f"{name}={value!r}: a float is a fraction in (0, 1]; give an int for a number of batches."
                )
            if isinstance(value, int) and value < 0:
                raise ConfigError(f"{name}={value!r}: expected a number of batches, at least 0.")
        for name in ("sanity_eval_batches", "overfit_batches"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a number of batches, at least 0.")
        if not callable(self.eval_interval):
            parse_time("eval_interval", self.eval_interval)
        if self.checkpoint_every is not None:
            parse_time("checkpoint_every", self.checkpoint_every)

    def _check_limits(self) -> None:
        ends = (self.num_epochs, self.max_num_train_steps, self.max_duration)
        if not self.fast_dev_run and all(end is None for end in ends):
            raise ConfigError(
                "train() was given no end. Pass num_epochs=, max_num_train_steps= or max_duration= (for example '10ep', "
                "'500ba', '2h'); the first one reached ends the run."
            )
        if self.num_epochs is not None:
            _positive("num_epochs", self.num_epochs)
        if self.max_num_train_steps is not None:
            _positive("max_num_train_steps", self.max_num_train_steps)
        if self.max_duration is not None and (
            self.max_duration.value <= 0 or self.max_duration.unit is TimeUnit.DURATION
        ):
            raise ConfigError(
                f"max_duration={str(self.max_duration)!r}: expected an amount above 0 of epochs, batches, steps, samples, "
                "tokens or time, such as '10ep', '500ba', '1e6sp', '1e9tok', '2h'."
            )

    def scaled(self, ratio: float) -> "TrainSettings":
        """Return settings for a run of `ratio` times the length, in whole epochs, updates, batches, samples or tokens."""
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio > 0:
            raise ConfigError(
                f"scale_schedule_ratio={ratio!r}: expected a number above 0, such as 0.5 for half the run."
            )
        lengths: dict[str, Any] = {
            name: int(value * ratio)
            for name in ("num_epochs", "max_num_train_steps")
            if (value := getattr(self, name)) is not None
        }
        if self.max_duration is not None:
            value, unit = self.max_duration.value * ratio, self.max_duration.unit
            lengths["max_duration"] = Time(value if unit is TimeUnit.SECOND else int(value), unit)
        return replace(self, **lengths)

    def for_development(self) -> "TrainSettings":
        """Return settings for a first look: a few batches, one epoch, no files."""
        batches = 1 if self.fast_dev_run is True else int(self.fast_dev_run)
        return replace(
            self,
            num_epochs=1,
            max_num_train_steps=None,
            max_duration=None,
            limit_train_batches=batches,
            limit_eval_batches=batches,
            eval_interval="1ep",
            checkpoint_dir=None,
            resume_from=None,
            sanity_eval_batches=0,
        )

    @property
    def epochs(self) -> int | None:
        """The number of epochs as far as it is given, by itself or as a duration."""
        given = [] if self.num_epochs is None else [self.num_epochs]
        if self.max_duration is not None and self.max_duration.unit is TimeUnit.EPOCH:
            given.append(math.ceil(self.max_duration.value))
        return min(given, default=None)

    @property
    def eval_time(self) -> Time | None:
        """How often to evaluate; None when a callable decides."""
        return None if callable(self.eval_interval) else parse_time("eval_interval", self.eval_interval)


class RunLimits:
    """Tells when a run has reached one of its ends."""

    def __init__(self, settings: TrainSettings):
        ends: list[Time] = []
        if settings.num_epochs is not None:
            ends.append(Time(settings.num_epochs, TimeUnit.EPOCH))
        if settings.max_num_train_steps is not None:
            ends.append(Time(settings.max_num_train_steps, TimeUnit.STEP))
        if settings.max_duration is not None:
            ends.append(settings.max_duration)
        self.ends = tuple(ends)
        self._inside_epoch = tuple(end for end in ends if end.unit is not TimeUnit.EPOCH)
        self.end_inside_epochs = bool(self._inside_epoch)
        self.planned: Time | None = None
        """The state's `max_duration` that this run follows; another one there is a change to `adopt`."""
        self._changed: tuple[Time, ...] = ()

    def adopt(self, ends: Sequence[Time | None], state: State) -> None:
        """Follow ends that guests have set (`state.stop_training()`) on some of the ranks; all ranks must agree on the list."""
        new = [end for end in ends if end is not None]
        if new:
            state.max_duration = next((end for end in new if state.clock.reached(end)), new[0])
        self.planned, self._changed = state.max_duration, tuple(new)

    def reached(self, clock: Clock) -> bool:
        """Whether any end has come."""
        return any(clock.reached(end) for end in (*self.ends, *self._changed))

    def reached_inside_epoch(self, clock: Clock) -> bool:
        """Whether an end has come that does not wait for the epoch; what the loop asks after every batch."""
        return any(clock.reached(end) for end in (*self._inside_epoch, *self._changed))

    def duration(self, updates_per_epoch: int | None) -> Time:
        """Return the length of the run as one time: the end that comes first, as far as that can be known."""
        self.planned = self._first_end(updates_per_epoch)
        return self.planned

    def _first_end(self, updates_per_epoch: int | None) -> Time:
        epochs = next((end for end in self.ends if end.unit is TimeUnit.EPOCH), None)
        steps = next((end for end in self.ends if end.unit is TimeUnit.STEP), None)
        if epochs is not None and steps is not None and updates_per_epoch is not None:
            return steps if steps.value < epochs.value * updates_per_epoch else epochs
        return next((end for end in self.ends if end.unit is not TimeUnit.EPOCH), None) or self.ends[0]


def parse_time(name: str, value: Any, unit: TimeUnit = TimeUnit.EPOCH) -> Time:
    """Read a time the user wrote; an int counts epochs unless another unit is given."""
    try:
        return ensure_time(value, unit)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}={value!r}: {error}") from error


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1.")
