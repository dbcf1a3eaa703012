"""Arguments that many algorithms share, rejected in the constructor with one sentence."""

from collections.abc import Sequence
from typing import Any

from drivetrain.context.state import State
from drivetrain.core.arguments import check_counts as check_whole
from drivetrain.core.arguments import check_fractions as check_fraction
from drivetrain.core.arguments import check_numbers as check_at_least
from drivetrain.core.errors import ConfigError, unknown_name

__all__ = ["check_at_least", "check_choice", "check_fraction", "check_whole", "elapsed_fraction"]


def check_choice(who: str, name: str, value: Any, valid: Sequence[str]) -> None:
    """Reject anything that is not one of the valid words."""
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
