"""What the schedules in `units.py` are made of: declared arguments, durations in real steps, warm-up, body, floor and length.

A schedule declares its arguments once, by `sche_init = takes(...)`: names, defaults and checks. For s < w the warm-up holds, the
peak is at s = w, once, and no update is made with a rate of zero. A schedule whose body depends on the length of the run takes
`total_steps`. Without it the length comes from `bind`.
"""

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from drivetrain.core.arguments import check_choice, check_fraction, check_number
from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time
from drivetrain.optim.positions import Duration, check_duration, real_steps
from drivetrain.optim.scheduler import OptimScheduler
from drivetrain.optim.schedules import WARMUP_SHAPES, body_position, warm_up, with_floor

REQUIRED: Any = Parameter.empty


class Argument(NamedTuple):
    """One argument of a schedule. `check` returns the value to keep, or raises a `ConfigError`."""

    name: str
    default: Any
    """The default; `REQUIRED` if a value must be given."""
    check: Callable[[str, Any], Any]
    least_steps: int | None = None
    """For a duration, the minimum number of real steps."""


def number(name: str, default: object) -> Argument:
    """Return an argument that is a number above 0."""
    return Argument(name, default, lambda name, value: check_number(name, value, above=0))


def choice(name: str, default: str, choices: Iterable[str]) -> Argument:
    """Return an argument that is one of a few words."""
    return Argument(name, default, lambda name, value: check_choice(name, value, choices))


def duration(name: str, default: object = REQUIRED, least_steps: int = 0) -> Argument:
    """Return an argument that is a number of real steps or a time."""
    return Argument(name, default, check_duration, least_steps)


WARMUP = (
    duration("warmup_steps", 0),
    Argument("warmup_start", 0.0, check_fraction),
    choice("warmup", "linear", WARMUP_SHAPES),
)
LENGTH = (duration("total_steps", None),)
FLOOR = (Argument("min_lr", None, lambda name, value: value), Argument("min_lr_ratio", 0.0, check_fraction))


def takes(*arguments: Argument) -> Callable[..., None]:
    """Return a `sche_init` with these arguments; each is checked and becomes an attribute of its name."""
    parameters = [Parameter(one.name, Parameter.POSITIONAL_OR_KEYWORD, default=one.default) for one in arguments]
    signature = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *parameters])

    def sche_init(self: "CurveLr", *args: object, **sche_conf: object) -> None:
        given = signature.bind(self, *args, **sche_conf)
        given.apply_defaults()
        self._times = {}
        for one in arguments:
            value = given.arguments[one.name]
            if one.least_steps is None:
                value = one.check(one.name, value)
            elif value is not None or one.default is not None:
                self._times[one.name] = (one.check(one.name, value), one.least_steps)
            setattr(self, one.name, value)
        self.check()

    sche_init.__signature__ = signature  # type: ignore[attr-defined]  # what keywords are checked against
    return sche_init


class CurveLr(OptimScheduler):
    """A warm-up, then a body that is a factor of the configured rate, above a floor.

    A leaf declares its arguments with `takes` and defines `factor`, or `update_lr` where the rate is not of this form. `steps` has
    the durations in real steps once the unit is settled.
    """

    decays = True

    total_steps: Duration | None
    warmup_steps: Duration = 0
    warmup_start: float = 0.0
    warmup: str = "linear"
    min_lr: float | None = None
    min_lr_ratio: float = 0.0
    steps: dict[str, int]
    _times: dict[str, tuple[Time, int]]
    _floor = 0.0
    _w = _total = 0

    def factor(self, real_step: int, epoch_num: int | None) -> float:
        """Return the body's factor of the base rate at a real step after the warm-up, before the floor is added."""
        raise NotImplementedError

    def check(self) -> None:
        """Check arguments against each other, and find the floor, which is a rate or a fraction of the configured one."""
        min_lr, base = self.min_lr, self.base_lrs[0]
        if min_lr is None:
            self._floor = self.min_lr_ratio
            return
        if self.min_lr_ratio != 0.0:
            raise ConfigError(
                f"min_lr={min_lr} and min_lr_ratio={self.min_lr_ratio} both set the lowest rate. Use one."
            )
        check_number("min_lr", min_lr, at_least=0, at_most=base, hint=", the configured rate")
        self._floor = min_lr / base if base else 0.0

    def settle(self) -> None:
        """Turn length and durations into real steps."""
        has_length = hasattr(self, "total_steps")  # whether the body depends on the length of the run
        if has_length:
            given = self._times.get("total_steps")
            total = self.run_length.total(self.accum_grad)
            if given is not None:
                total = real_steps("total_steps", given[0], self.run_length, self.accum_grad)
            if total is None:
                raise ConfigError(
                    f"unit {self.name!r}: {type(self).__name__} needs the length of the run. Give total_steps, or call "
                    "bind(total_steps=...) with the number of batches."
                )
            if total < 1:
                raise ConfigError(f"total_steps={self.total_steps!r} is {total} steps; a schedule needs at least 1.")
            self._total = total
        self.steps = {}
        for name, (time, least) in self._times.items():
            if name != "total_steps":
                count = self.steps[name] = self.count_steps(name, time)
                if count < least:
                    raise ConfigError(f"{name}={getattr(self, name)!r} is {count} steps; expected at least {least}.")
        self._w = self.steps.get("warmup_steps", 0)
        if has_length and self._w >= self._total:
            raise ConfigError(f"a warm-up of {self._w} steps is not shorter than the run of {self._total} steps.")

    def count_steps(self, name: str, time: Time) -> int:
        """Return a time in real steps; fractions are of the schedule's own length where it has one."""
        return real_steps(name, time, self.run_length, self.accum_grad, self._total or None)

    def position(self, real_step: int) -> float:
        """Return how much of the body is done at a real step, from 0 to 1."""
        return body_position(real_step, self._total, self._w)

    def after_peak(self, real_step: int) -> int:
        """Return the real steps since the peak."""
        return real_step - max(self._w, 1)

    def update_lr(self, real_step: int, epoch_num: int | None = None) -> float:
        if real_step < self._w:
            return self.base_lrs[0] * warm_up(real_step / self._w, self.warmup_start, self.warmup)
        return self.base_lrs[0] * self.lifted(self.factor(real_step, epoch_num))

    def lifted(self, factor: float) -> float:
        """Return the factor with the floor under it."""
        return with_floor(factor, self._floor) if self._floor else factor

    def extra_repr_fn(self) -> str:
        """Show the arguments that were given."""
        return ", ".join(f"{name}={value!r}" for name, value in self.sche_conf.items())
