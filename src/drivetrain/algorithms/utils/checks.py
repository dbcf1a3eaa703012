"""Arguments that many algorithms share, refused in the constructor with one sentence."""

from collections.abc import Sequence
from typing import Any

from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError, unknown_name


def check_fraction(who: str, **values: float) -> None:
    """Refuse anything that is no number from 0 to 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(f"{who}({name}={value!r}): expected a number from 0 to 1.")


def check_at_least(who: str, lowest: float, **values: float) -> None:
    """Refuse anything that is no number of at least `lowest`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= lowest:
            raise ConfigError(f"{who}({name}={value!r}): expected a number of at least {lowest}.")


def check_whole(who: str, lowest: int, **values: Any) -> None:
    """Refuse anything that is no whole number of at least `lowest`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(f"{who}({name}={value!r}): expected a whole number of at least {lowest}.")


def check_choice(who: str, name: str, value: Any, valid: Sequence[str]) -> None:
    """Refuse anything that is not one of the valid words."""
    if value not in valid:
        raise ConfigError(unknown_name(name, value, valid, where=who))


def elapsed_fraction(state: State, who: str) -> float:
    """Return how much of the run lies behind, from 0 to 1; an algorithm that depends on it cannot do without."""
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ConfigError(
            f"{who} follows the course of the run, whose length is not known: give max_duration, such as '10ep'."
        )
    return float(elapsed.value)
