"""A length of training: a number with a unit, such as `"10ep"`, `"500ba"`, `"0.5dur"` or `"2h"`.

`ba` counts batches taken from the loader, `st` counts optimizer steps; the two are equal without gradient accumulation.
"""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import total_ordering
from typing import Any, Union

from drivetrain.core.errors import ConfigError, ConfigTypeError, TimeUnitError, nearest_name, unknown_name


class TimeUnit(StrEnum):
    """What is counted; the value is the suffix in a time string."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    STEP = "st"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"

    __hash__ = str.__hash__

    @classmethod
    def _missing_(cls, value: object) -> "TimeUnit":
        if isinstance(value, str) and (folded := value.strip().lower()) in cls._value2member_map_:
            return cls(folded)
        raise ConfigError(unknown_name("time unit", value, [unit.value for unit in cls]))


REAL_UNITS = frozenset({TimeUnit.DURATION, TimeUnit.SECOND})
"""Units that need not be whole."""

_DIGITS = r"\d+(?:_\d+)*"
_NUMBER = rf"[+-]?(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:e[+-]?\d+)?"
_COUNT_FORM = re.compile(rf"({_NUMBER})\s*([a-z]+)")
_PART = r"(\d+(?:\.\d+)?)"
_CLOCK_FORM = re.compile(rf"(?:{_PART}h)?(?:{_PART}m)?(?:{_PART}s)?")
_LARGEST_EXPONENT = 18  # a count beyond 1e18 is a slip of the keyboard, and int() of a huge exponent would not end

TimeLike = Union["Time", str, int, float, timedelta]


@total_ordering
@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Time:
    """A number of one unit; counts are whole, `dur` (a fraction of the run) and `sec` are real.

    >>> Time(100, "ba") * Time(0.29, "dur")
    Time(29, TimeUnit.BATCH)
    >>> Time.from_timestring("1h20m40s")
    Time(4840, TimeUnit.SECOND)
    """

    value: int | float
    unit: TimeUnit

    def __init__(self, value: int | float, unit: TimeUnit | str) -> None:
        unit = TimeUnit(unit)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "value", _checked(value, unit))

    @classmethod
    def from_iteration(cls, iteration: int) -> "Time":
        """Return so many iterations."""
        return cls(iteration, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, epoch: int) -> "Time":
        """Return so many epochs."""
        return cls(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: int) -> "Time":
        """Return so many batches taken from the loader."""
        return cls(batch, TimeUnit.BATCH)

    @classmethod
    def from_step(cls, step: int) -> "Time":
        """Return so many optimizer steps."""
        return cls(step, TimeUnit.STEP)

    @classmethod
    def from_sample(cls, sample: int) -> "Time":
        """Return so many samples."""
        return cls(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: int) -> "Time":
        """Return so many tokens."""
        return cls(token, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, duration: float) -> "Time":
        """Return a fraction of the whole run."""
        return cls(duration, TimeUnit.DURATION)

    @classmethod
    def from_timedelta(cls, duration: timedelta | str) -> "Time":
        """Return wall-clock seconds, from a `timedelta` or a string such as `"90m"`."""
        if isinstance(duration, timedelta):
            return cls(duration.total_seconds(), TimeUnit.SECOND)
        time = cls.from_timestring(duration)
        if time.unit is not TimeUnit.SECOND:
            raise ConfigError(f"{duration!r} is not a wall-clock time, such as '30sec', '90m' or '1h20m'.")
        return time

    @classmethod
    def from_timestring(cls, timestring: str) -> "Time":
        """Read `"10ep"`, `"3e4tok"`, `"30_000tok"`, `"0.5dur"`, `"30sec"`, `"1h20m40s"`, `"90m"`."""
        text = timestring.strip().lower()
        if text and (parts := _CLOCK_FORM.fullmatch(text)):
            hours, minutes, seconds = (Decimal(part or 0) for part in parts.groups())
            count, unit = hours * 3600 + minutes * 60 + seconds, "sec"
        else:
            form = _COUNT_FORM.fullmatch(text)
            if form is None:
                raise ConfigError(f"{timestring!r} is not a time. {_FORMS}")
            number, unit = form.groups()
            if unit not in TimeUnit._value2member_map_:
                near = nearest_name(unit, TimeUnit._value2member_map_)
                hint = f" Did you mean {number + near!r}?" if near else ""
                raise ConfigError(f"{timestring!r} has an unknown time unit {unit!r}.{hint} {_FORMS}")
            try:
                count = Decimal(number)
            except InvalidOperation:
                raise ConfigError(f"{timestring!r} is not a time. {_FORMS}") from None
        if count and count.adjusted() > _LARGEST_EXPONENT:
            raise ConfigError(f"{timestring!r} is larger than 1e{_LARGEST_EXPONENT}, the limit.")
        return cls(_number(count), unit)

    @classmethod
    def from_input(cls, value: TimeLike, default_int_unit: TimeUnit | str | None = None) -> "Time":
        """Turn a `Time`, a time string, a `timedelta` or (with a default unit) a number into a `Time`."""
        if isinstance(value, Time):
            return value
        if isinstance(value, str):
            return cls.from_timestring(value)
        if isinstance(value, timedelta):
            return cls.from_timedelta(value)
        if default_int_unit is None:
            raise ConfigTypeError(f"{value!r} is not a time: a bare number has no unit. {_FORMS}")
        return cls(value, default_int_unit)

    def to_timestring(self) -> str:
        """Return the shortest string that reads back as this time."""
        return f"{self.value}{self.unit}"

    def __str__(self) -> str:
        return self.to_timestring()

    def __repr__(self) -> str:
        return f"Time({self.value}, TimeUnit.{self.unit.name})"

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def _same_unit(self, other: object) -> "int | float | None":
        """Return the number in `other` if it can be compared with this time, None if it is not a time."""
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if isinstance(other, Time):
            if other.unit is not self.unit:
                raise TimeUnitError(
                    f"{self} and {other} have different units and cannot be compared or added. "
                    "Convert one of them first, for example through the number of batches in an epoch."
                )
            return other.value
        return other if _is_number(other) else None  # type: ignore[return-value]

    def _compared(self, other: object, how: Callable[[Any, Any], bool]) -> bool:
        number = self._same_unit(other)
        return NotImplemented if number is None else how(self.value, number)

    def __eq__(self, other: object) -> bool:
        return self._compared(other, operator.eq)

    def __lt__(self, other: object) -> bool:
        return self._compared(other, operator.lt)

    def __add__(self, other: object) -> "Time":
        number = self._same_unit(other)
        return NotImplemented if number is None else Time(self.value + number, self.unit)

    __radd__ = __add__

    def __sub__(self, other: object) -> "Time":
        number = self._same_unit(other)
        return NotImplemented if number is None else Time(self.value - number, self.unit)

    def __rsub__(self, other: object) -> "Time":
        number = self._same_unit(other)
        return NotImplemented if number is None else Time(number - self.value, self.unit)

    def __mod__(self, other: object) -> "Time":
        number = self._same_unit(other)
        return NotImplemented if number is None else Time(self.value % number, self.unit)

    def __neg__(self) -> "Time":
        return Time(-self.value, self.unit)

    def __mul__(self, other: object) -> "Time":
        if isinstance(other, Time):
            if other.unit is TimeUnit.DURATION:
                return self._rounded(self.value * other.value)
            if self.unit is TimeUnit.DURATION:
                return other._rounded(self.value * other.value)
            raise TimeUnitError(f"{self} * {other}: only a number or a fraction of the run ('0.5dur') scales a time.")
        return self._rounded(self.value * other) if _is_number(other) else NotImplemented  # type: ignore[operator]

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> "Time":
        if isinstance(other, Time | str):
            number = self._same_unit(other)
            assert number is not None
            return Time(self.value / number, TimeUnit.DURATION)
        return self._rounded(self.value / other) if _is_number(other) else NotImplemented  # type: ignore[operator]

    def _rounded(self, number: int | float) -> "Time":
        """Return a time of the same unit, whole if it is a count."""
        if self.unit not in REAL_UNITS and isinstance(number, float):
            number = int(round(number, 9))  # nine decimals forgive binary fractions: 0.29 * 100 is 28.999999999999996
        return Time(number, self.unit)


_FORMS = (
    "Write a number and a unit: "
    + ", ".join(f"{unit.value} ({unit.name.lower()})" for unit in TimeUnit)
    + "; or hours, minutes and seconds, such as '1h20m40s', '90m'."
)


def ensure_time(maybe_time: TimeLike, int_unit: TimeUnit | str) -> Time:
    """Return `maybe_time` as a `Time`; a bare number counts in `int_unit`.

    >>> ensure_time(10, "ep"), ensure_time("1e3ba", "ep")
    (Time(10, TimeUnit.EPOCH), Time(1000, TimeUnit.BATCH))
    """
    return Time.from_input(maybe_time, int_unit)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(value: int | float, unit: TimeUnit) -> int | float:
    """Return the number a `Time` may hold, or raise an error."""
    try:
        number: int | float = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        if not isinstance(value, float):
            raise ConfigTypeError(f"a time needs a number, not {value!r} ({type(value).__name__}).") from None
        number = value
    if isinstance(value, bool) or not -math.inf < number < math.inf:
        raise ConfigTypeError(f"a time needs a finite number, not {value!r}.")
    if isinstance(number, float) and unit not in REAL_UNITS:
        if not number.is_integer():
            whole = f"'{math.floor(number)}{unit}' or '{math.ceil(number)}{unit}'"
            raise ConfigTypeError(f"'{number}{unit}' is not whole. {unit.name.lower()} is a count: write {whole}.")
        number = int(number)
    return number


def _number(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)
