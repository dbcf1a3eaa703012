"""Checks of arguments: numbers, counts, flags and words. The one home of such checks for all folders.

Each check returns the value, or raises a `ConfigError` that names the argument, what was given and what was expected. A bool is not a
number here, text is not a flag, and NaN or infinity is a mistake unless a caller allows it. The plural forms at the end check several
arguments of one owner: `check_counts("SAM", 1, interval=interval)`.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, ConfigTypeError, DrivetrainError, unknown_name

LARGEST_COUNT = 10**18  # a larger count is a slip of the keyboard


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    owner: str = "",
    hint: str = "",
) -> float:
    """Return a number within limits; it must be finite unless `infinite` is set.

    >>> check_number("lr", 0.1, above=0)
    0.1
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    is_inside = is_number and (
        (infinite or math.isfinite(value))
        and (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    )
    if not is_inside:
        wanted = _range(at_least, above, at_most, below)
        kind = "number" if infinite or not is_number or math.isfinite(value) else "finite number"
        raise ConfigError(f"{_given(name, value, owner)}: expected a {kind}{wanted}{hint}.")
    return float(value)


def check_count(
    name: str,
    value: object,
    *,
    at_least: int = 1,
    owner: str = "",
    hint: str = "",
    error: type[ConfigError] = ConfigError,
) -> int:
    """Return a whole number of at least `at_least`; a bool, a float or text is an error.

    >>> check_count("num_epochs", 3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise error(f"{_given(name, value, owner)}: expected a whole number of at least {at_least}{hint}.")
    if int(value) > LARGEST_COUNT:
        raise error(f"{_given(name, value, owner)}: expected at most {LARGEST_COUNT:.0e}.")
    return int(value)


def check_flag(name: str, value: object, *, owner: str = "") -> bool:
    """Return a bool; text such as "false" would count as true, so it is an error."""
    if not isinstance(value, bool):
        raise ConfigError(f"{_given(name, value, owner)}: expected True or False.")
    return value


def check_choice(name: str, value: object, choices: Iterable[str], *, owner: str = "") -> str:
    """Return one of the choices, or name the nearest."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(unknown_name("value", value, choices, where=f"{owner}({name})" if owner else name))
    return value


def check_fraction(name: str, value: object, *, owner: str = "") -> float:
    """Return a number from 0 to 1."""
    return check_number(name, value, at_least=0, at_most=1, owner=owner, hint=", a fraction")


def check_path(name: str, value: object) -> Path:
    """Return a path from text or a path object.

    >>> check_path("checkpoint_dir", "runs/a").name
    'a'
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigTypeError(f"{_given(name, value)}: expected a path, such as 'runs/a'.")
    return Path(text)


def check_callable(name: str, value: object, example: str, num_arguments: int = 1, *, classes: bool = False) -> None:
    """Reject what cannot be called with so many positional arguments; `example` shows what can.

    A class is rejected unless `classes` is set: where a function is expected, an instance was probably meant.
    """
    if not callable(value) or (isinstance(value, type) and not classes):
        what = "is a class" if isinstance(value, type) else "is not callable"
        raise ConfigTypeError(f"{_given(name, value)} {what}. Expected {example}.")
    try:  # of a module, the arguments are those of its forward
        inspect.signature(getattr(value, "forward", value)).bind(*[None] * num_arguments)
    except TypeError as error:
        count = f"{num_arguments} argument{'s' * (num_arguments != 1)}"
        raise ConfigTypeError(
            f"{_given(name, value)} cannot be called with {count}: {error}. Expected {example}."
        ) from None
    except ValueError:
        return  # a built-in without a signature


def only_begins(function: object) -> bool:
    """Return whether a call runs nothing yet, because the function is a generator or async."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in kinds)


def accepted_names(function: Callable[..., object]) -> list[str] | None:
    """Return the names of the arguments that a function takes, None where it takes any or that is not known."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else list(parameters)


@contextmanager
def naming(name: str, value: object) -> Iterator[None]:
    """Name the argument in errors that reading its value raises.

    Our own errors keep their class. A built-in error means that the value has the wrong type or form.
    """
    try:
        yield
    except DrivetrainError as error:
        if name not in str(error):
            error.args = (f"{name}: {error}",)
        raise
    except FileNotFoundError as error:
        raise error if name in str(error) else FileNotFoundError(f"{name}: {error}") from error
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as error:
        raise ConfigTypeError(f"{_given(name, value)}: {error}") from error


def check_numbers(owner: str, at_least: float = 0.0, below: float | None = None, **values: object) -> None:
    """Check several numbers of one owner against the same limits."""
    for name, value in values.items():
        check_number(name, value, at_least=at_least, below=below, owner=owner)


def check_counts(owner: str, at_least: int, **values: object) -> None:
    """Check several whole numbers of one owner."""
    for name, value in values.items():
        check_count(name, value, at_least=at_least, owner=owner)


def check_fractions(owner: str, **values: object) -> None:
    """Check several fractions of one owner."""
    for name, value in values.items():
        check_fraction(name, value, owner=owner)


def _given(name: str, value: object, owner: str = "") -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return f"{owner}({name}={shown})" if owner else f"{name}={shown}"


def _range(at_least: float | None, above: float | None, at_most: float | None, below: float | None) -> str:
    lowest = f"{at_least:g}" if at_least is not None else f"above {above:g}" if above is not None else ""
    if at_most is not None or below is not None:
        highest = f"{at_most:g}" if at_most is not None else f"below {below:g}"
        return f" from {lowest} to {highest}" if lowest else f" up to {highest}"
    if at_least is not None:
        return f" of at least {lowest}"
    return f" {lowest}" if lowest else ""
