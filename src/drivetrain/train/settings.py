"""The settings of one call of `train()`, checked before anything is built."""

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.context.state import State
from drivetrain.core.arguments import (
    LARGEST_COUNT,
    check_callable,
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_path,
    naming,
)
from drivetrain.core.containers import map_items
from drivetrain.core.errors import ConfigError, ConfigTypeError
from drivetrain.core.time import Clock, Time, TimeLike, TimeUnit, ensure_time
from drivetrain.core.types import Settings
from drivetrain.module.accumulation import Count
from drivetrain.module.finite import NonFinitePolicy
from drivetrain.module.precision import Precision

if TYPE_CHECKING:
    from drivetrain.train.hooks import TrainerHooks

AnyPath = str | os.PathLike[str]
EvalInterval = int | str | Time | Callable[..., bool]


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The constructor's options that runs look up: how they compute, and defaults of `train()`."""

    device: torch.device | str | None = None
    precision: str | Precision | None = None
    ddp: Mapping[str, bool] = field(default_factory=dict)
    """Settings of DDP that are switched on."""
    count_items: Callable[..., Count] | str | None = None
    generate: Mapping[str, object] | None = None
    train_dataset: object = None
    eval_dataset: object = None
    max_duration: int | str | Time | None = None
    eval_interval: EvalInterval | None = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The arguments of `Trainer.train` that shape the loop; `Trainer.train` documents each one."""

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
    log_every: int | str | Time | None = 50
    scheduler_interval: str = "step"
    scheduler_metric: str = "eval_loss_epoch"
    resume_from: AnyPath | None = None
    checkpoint_dir: AnyPath | None = None
    checkpoint_every: str | int | None = "1ep"
    keep_checkpoints: int | None = 3
    async_checkpoint: bool = True
    overwrite_checkpoints: bool = False
    nonfinite: NonFinitePolicy = field(default_factory=NonFinitePolicy)
    hang_timeout: Time | None = None
    limit_train_batches: int | float | None = None
    limit_eval_batches: int | float | None = None
    sanity_eval_batches: int = 0
    overfit_batches: int = 0
    fast_dev_run: bool | int = False

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], options: TrainerOptions) -> "TrainSettings":
        """Return the settings among the arguments of `train()`, with the Trainer's defaults where nothing was given."""
        given = {item.name: arguments[item.name] for item in fields(cls)}
        if given["max_duration"] is None and given["num_epochs"] is None:
            given["max_duration"] = options.max_duration
        if given["max_duration"] is not None:
            given["max_duration"] = parse_time("max_duration", given["max_duration"])
        if given["eval_interval"] is None:
            given["eval_interval"] = "1ep" if options.eval_interval is None else options.eval_interval
        if arguments["max_grad_norm"] is not None:  # transformers' name
            norm = check_number("max_grad_norm", arguments["max_grad_norm"], above=0, infinite=True)
            given["gradient_clip_norm"] = norm if given["gradient_clip_norm"] is None else given["gradient_clip_norm"]
        if given["hang_timeout"] is not None:
            given["hang_timeout"] = parse_time("hang_timeout", given["hang_timeout"], TimeUnit.SECOND)
        return cls(**{**given, "nonfinite": NonFinitePolicy.of(given["nonfinite"])})

    def __post_init__(self) -> None:
        if not isinstance(self.fast_dev_run, bool):
            check_count("fast_dev_run", self.fast_dev_run, at_least=0, hint=" batches, True or False")
        self._check_limits()
        for name in ("gradient_accumulation_steps", "per_device_batch_size"):
            check_count(name, getattr(self, name))
        for name in ("sanity_eval_batches", "overfit_batches"):
            check_count(name, getattr(self, name), at_least=0)
        for name in ("global_batch_size", "keep_checkpoints"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), hint=", or None")
        for name in ("limit_train_batches", "limit_eval_batches"):
            check_limit(name, getattr(self, name))
        for name in ("async_checkpoint", "overwrite_checkpoints"):
            check_flag(name, getattr(self, name))
        self._check_clipping()
        if self.microbatch_size not in (None, "auto"):
            check_count("microbatch_size", self.microbatch_size, hint=", 'auto' or None")
        check_choice("scheduler_interval", self.scheduler_interval, ("step", "epoch"))
        if not isinstance(self.scheduler_metric, str) or not self.scheduler_metric:
            raise ConfigError(f"scheduler_metric={self.scheduler_metric!r}: expected a name such as 'eval_loss_epoch'.")
        check_eval_interval(self.eval_interval)
        if self.log_time.value < 0:
            raise ConfigError(
                f"log_every={self.log_every!r}: expected a number of updates, a time such as '100ba' or '0.01dur', or None for never."
            )
        self._check_checkpoints()
        hang = self.hang_timeout
        if hang is not None and (hang.unit is not TimeUnit.SECOND or not 0 <= hang.value < math.inf):
            raise ConfigError(
                f"hang_timeout={str(hang)!r}: expected a time such as '30m' or '90s', a number of seconds, 0 to wait forever, or None."
            )

    def _check_clipping(self) -> None:
        for name in ("gradient_clip_value", "gradient_clip_norm"):
            value = getattr(self, name)
            if value is not None:  # an infinite norm measures without clipping
                infinite = name == "gradient_clip_norm"
                number = check_number(name, value, above=0, infinite=infinite, hint=", or None for no clipping")
                object.__setattr__(self, name, number)
        if self.gradient_clip_value is not None and self.gradient_clip_norm is not None:
            raise ConfigError(
                f"gradient_clip_value={self.gradient_clip_value} and gradient_clip_norm={self.gradient_clip_norm}: both are "
                "set. Choose one: clipping by value clamps entries, clipping by norm scales the whole gradient."
            )

    def _check_checkpoints(self) -> None:
        if self.checkpoint_dir is not None:
            check_path("checkpoint_dir", self.checkpoint_dir)
        if self.checkpoint_every is not None:
            every = parse_time("checkpoint_every", self.checkpoint_every)
            if not every.value > 0:
                raise ConfigError(
                    f"checkpoint_every={self.checkpoint_every!r}: expected a time above 0, such as '1ep' or '500ba', or None for a "
                    "checkpoint only when one is requested."
                )
        if isinstance(self.resume_from, bool):
            raise ConfigTypeError(f"resume_from={self.resume_from}: expected 'auto', a path, or None for a new run.")
        if self.resume_from is not None:
            check_path("resume_from", self.resume_from)

    def _check_limits(self) -> None:
        ends = (self.num_epochs, self.max_num_train_steps, self.max_duration)
        if not self.fast_dev_run and all(end is None for end in ends):
            raise ConfigError(
                "train() has no limit. Pass num_epochs=, max_num_train_steps= or max_duration= (for example '10ep', "
                "'500ba', '2h'); the first one reached ends the run."
            )
        for name in ("num_epochs", "max_num_train_steps"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.max_duration is not None and (
            self.max_duration.value <= 0 or self.max_duration.unit is TimeUnit.DURATION
        ):
            raise ConfigError(
                f"max_duration={str(self.max_duration)!r}: expected an amount above 0 of epochs, batches, steps, samples, "
                "tokens or time, such as '10ep', '500ba', '1e6sp', '1e9tok', '2h'."
            )

    def limits(self) -> "RunLimits":
        """Return the ends of the run. The first one reached counts."""
        counts = ((self.num_epochs, TimeUnit.EPOCH), (self.max_num_train_steps, TimeUnit.STEP))
        ends = [Time(count, unit) for count, unit in counts if count is not None]
        return RunLimits(*ends, *([] if self.max_duration is None else [self.max_duration]))

    def scaled(self, ratio: float, report: Callable[[str], None]) -> "TrainSettings":
        """Return settings for a run of `ratio` times the length, in whole epochs, updates, batches, samples or tokens."""
        if ratio == 1.0:
            return self
        check_number("scale_schedule_ratio", ratio, above=0, hint=", such as 0.5 for half the run")
        ends = ("num_epochs", "max_num_train_steps", "max_duration")
        lengths: Settings = {name: end for name in ends if (end := getattr(self, name)) is not None}
        for name, end in lengths.items():
            if isinstance(end, Time):
                value = end.value * ratio
                lengths[name] = Time(value if end.unit is TimeUnit.SECOND else int(value), end.unit)
            else:
                lengths[name] = int(end * ratio)
        with naming("scale_schedule_ratio", ratio):
            scaled = replace(self, **lengths)
        changes = ", ".join(f"{name} {getattr(self, name)} → {length}" for name, length in lengths.items())
        report(f"scale_schedule_ratio={ratio}: {changes}")
        return scaled

    def for_development(self) -> "TrainSettings":
        """Return settings for a quick test: a few batches, one epoch, no files."""
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
        """The number of epochs if it is given, directly or as a duration."""
        given = [] if self.num_epochs is None else [self.num_epochs]
        if self.max_duration is not None and self.max_duration.unit is TimeUnit.EPOCH:
            given.append(math.ceil(self.max_duration.value))
        return min(given, default=None)

    @property
    def eval_time(self) -> Time | None:
        """How often to evaluate; None if a function decides."""
        return None if callable(self.eval_interval) else parse_time("eval_interval", self.eval_interval)

    @property
    def log_time(self) -> Time:
        """How often losses are logged; 0 is never."""
        return parse_time("log_every", 0 if self.log_every is None else self.log_every, TimeUnit.STEP)


class RunLimits:
    """The ends of a run. The first one reached counts."""

    def __init__(self, *ends: Time):
        self.ends = ends
        self._inside_epoch = tuple(end for end in ends if end.unit is not TimeUnit.EPOCH)
        self.end_inside_epochs = bool(self._inside_epoch)
        self.planned: Time | None = None
        """The state's `max_duration` that this run follows; another one there is a change to `adopt`."""
        self._changed: tuple[Time, ...] = ()

    def adopt(self, ends: Sequence[Time | None], state: State) -> None:
        """Adopt ends that plugins have set (`state.stop_training()`) on some of the ranks. All ranks must agree on the list."""
        new = [end for end in ends if end is not None]
        if new:
            reached = next((end for end in new if state.clock.reached(end)), None)
            if reached is None:
                state.max_duration = new[0]
            else:
                state.stop_at(reached)
        self.planned, self._changed = state.max_duration, tuple(new)

    def reached(self, clock: Clock) -> bool:
        """Return whether any end is reached."""
        return any(clock.reached(end) for end in (*self.ends, *self._changed))

    def reached_inside_epoch(self, clock: Clock) -> bool:
        """Return whether an end is reached that does not wait for the epoch. The loop checks this after every batch."""
        return any(clock.reached(end) for end in (*self._inside_epoch, *self._changed))

    def duration(self, updates_per_epoch: int | None) -> Time:
        """Return the length of the run as one time: the end that comes first, as far as it is known."""
        epochs = next((end for end in self.ends if end.unit is TimeUnit.EPOCH), None)
        steps = next((end for end in self.ends if end.unit is TimeUnit.STEP), None)
        if epochs is not None and steps is not None and updates_per_epoch is not None:
            self.planned = steps if steps.value < epochs.value * updates_per_epoch else epochs
        else:
            self.planned = next(iter(self._inside_epoch), self.ends[0])
        return self.planned


def parse_time(name: str, value: TimeLike, unit: TimeUnit = TimeUnit.EPOCH) -> Time:
    """Read a time from the user. An int counts epochs unless another unit is given."""
    try:
        time = ensure_time(value, unit)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{name}={value!r}: {error}") from None
    if abs(time.value) > LARGEST_COUNT:
        raise ConfigError(f"{name}={value!r}: expected at most {LARGEST_COUNT:.0e}.")
    return time


def check_eval_interval(value: EvalInterval) -> None:
    """Check how often to evaluate: a time of at least 0 ('0ep' is never), or a function of state and event."""
    if callable(value):
        check_callable("eval_interval", value, "a function of (state, event), or a time such as '1ep'", 2)
    elif parse_time("eval_interval", value).value < 0:
        raise ConfigError(f"eval_interval={value!r}: expected a time such as '1ep' or '500ba', or '0ep' for never.")


def check_limit(name: str, value: object) -> None:
    """Check a number of batches (an int), or a fraction of them (a float)."""
    if isinstance(value, float):
        hint = ": a float is a fraction in (0, 1]; give an int for a number of batches"
        check_number(name, value, above=0, at_most=1, hint=hint)
    elif value is not None:
        check_count(name, value, at_least=0, hint=" batches, or a fraction in (0, 1]")


@dataclass(frozen=True)
class TrainerRunConfig:
    """The settings of `train()` and the values derived from them."""

    num_epochs: int | None
    train_per_device_batch_size: int | None
    train_dl_kwargs: Settings | None
    """The arguments the training loader was built with; None when the user built it."""
    eval_per_device_batch_size: int | None
    eval_dl_kwargs: Settings | None
    """The arguments the evaluation loader was built with; None without one."""
    gradient_accumulation_steps: int
    gradient_clip_value: float | None
    train_total_batch_size: int | None
    """Samples per optimizer update, over all processes."""
    eval_total_batch_size: int | None
    num_update_steps_per_epoch: int | None
    """Updates of an epoch counted over all processes; None when the loader has no length."""
    num_local_update_steps_per_epoch: int | None
    """Updates that happen in an epoch: what a schedule counts in."""
    max_num_train_steps: int | None
    is_local_process_zero: bool
    is_world_process_zero: bool
    is_distributed: bool
    mixed_precision: str
    num_processes: int
    gradient_clip_norm: float | None = None
    max_duration: str | None = None
    microbatch_size: int | str | None = None
    precision: str | None = None
    seed: int | None = None

    def to_dict(self) -> dict[str, object]:
        """Return all fields. Containers are copied, their contents (a generator, a sampler) are not."""
        return {field.name: _copy_containers(getattr(self, field.name)) for field in fields(self)}


def count_update_steps(num_batches: int, num_processes: int, gradient_accumulation_steps: int) -> tuple[int, int]:
    """Return the updates of an epoch over all processes and on each, for this many batches per process.

    >>> count_update_steps(20, num_processes=4, gradient_accumulation_steps=1)
    (80, 20)
    """
    steps = num_batches / gradient_accumulation_steps
    return math.ceil(num_batches * num_processes / gradient_accumulation_steps), math.ceil(steps)


def _copy_containers(value: object) -> object:
    return map_items(value, _copy_containers) if isinstance(value, dict | list) else value


# ---------------------------------------------------------------------- placeholders
# Numbers that are known only when training starts, for the arguments of a scheduler. Arithmetic with a placeholder builds a small tree, and
# the Trainer replaces trees by numbers just before it makes the scheduler. No text is evaluated anywhere.
#
#     create_scheduler_fn = partial(OneCycleLR, max_lr=0.1, total_steps=P.NUM_EPOCHS * P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH)

_SYMBOLS: dict[str, Callable[..., object]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
}  # fmt: skip


def _methods(symbol: str) -> tuple[Callable[..., "PlaceholderExpression"], Callable[..., "PlaceholderExpression"]]:
    """Return the methods of an operator for a placeholder on its left and on its right."""
    make = lambda left, right: PlaceholderExpression(symbol, left, right)
    return make, lambda right, left: make(left, right)


class _Arithmetic:
    """Gives a class `+ - * / //` on either side, each of which makes an expression."""

    __add__, __radd__ = _methods("+")
    __sub__, __rsub__ = _methods("-")
    __mul__, __rmul__ = _methods("*")
    __truediv__, __rtruediv__ = _methods("/")
    __floordiv__, __rfloordiv__ = _methods("//")


class PlaceholderExpression(_Arithmetic):
    """One operation on two values, at least one of which is a placeholder or an expression."""

    def __init__(self, symbol: str, left: object, right: object):
        self.symbol, self.left, self.right = symbol, left, right

    def evaluate(self, trainer: "TrainerHooks") -> object:
        """Return the number, computed with the trainer's values."""
        return _SYMBOLS[self.symbol](_replace(trainer, self.left), _replace(trainer, self.right))

    def __repr__(self) -> str:
        return f"({self.left} {self.symbol} {self.right})"


class TrainerPlaceholderValues(_Arithmetic, Enum):
    """Values of the current run."""

    NUM_EPOCHS = "num_epochs"
    NUM_UPDATE_STEPS_PER_EPOCH = "num_update_steps_per_epoch"
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = "num_local_update_steps_per_epoch"
    TRAIN_DATALOADER_LEN = "_train_dataloader"
    EVAL_DATALOADER_LEN = "_eval_dataloader"

    @classmethod
    def placeholder_set(cls) -> "set[TrainerPlaceholderValues]":
        """Return all placeholders."""
        return set(cls)

    def evaluate(self, trainer: "TrainerHooks") -> int:
        """Return the number that this placeholder represents in a run that has its loaders and configuration."""
        if self.value.startswith("_"):
            loader = getattr(trainer, self.value, None)
            try:
                return len(loader)  # type: ignore[arg-type]
            except TypeError:
                reason = "there is no such loader" if loader is None else "the loader has no length"
        else:
            if (number := getattr(trainer.run_config, self.value, None)) is not None:
                return number
            reason = f"run_config.{self.value} is not known in this run"
        raise ConfigError(
            f"{self} has no value: {reason}. Give the scheduler a number instead, or train with num_epochs and a loader that has a length."
        )


RunNumber = int | float | TrainerPlaceholderValues | PlaceholderExpression
"""A number, or one that is known only when training starts."""


def replace_trainer_placeholder_values(trainer: "TrainerHooks", instance: object) -> Any:
    """Return a `functools.partial` with every placeholder in its arguments replaced, also in nested containers and partials.

    Other values are returned unchanged.
    """
    return _replace(trainer, instance) if isinstance(instance, partial) else instance


def _replace(trainer: "TrainerHooks", value: object) -> Any:
    if isinstance(value, (TrainerPlaceholderValues, PlaceholderExpression)):
        return value.evaluate(trainer)
    if isinstance(value, partial):
        arguments = [_replace(trainer, item) for item in value.args]
        keywords = {key: _replace(trainer, item) for key, item in value.keywords.items()}
        return partial(_replace(trainer, value.func), *arguments, **keywords)
    is_container = isinstance(value, tuple | list) or type(value) is dict
    return map_items(value, partial(_replace, trainer)) if is_container else value
