"""How ranks agree in a search: rank 0 finds out and decides, the others are told.

Numbers differ from rank to rank (free memory, clocks), and a plan must not. An error of rank 0 reaches all, so that nobody waits.
"""

from collections.abc import Callable
from typing import TypeVar

from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.ranks import is_master

T = TypeVar("T")


def master_does(function: Callable[[], T]) -> T:
    """Return what a function returns on rank 0, or raise there what it raises and elsewhere the same in words; all must call this."""
    value: T | None = None
    failure: BaseException | None = None
    if is_master():
        try:
            value = function()
        except Exception as error:  # whatever it is, the other ranks are waiting
            failure = error
    is_user_error = isinstance(failure, ConfigError)
    told, value, is_user_error = broadcast_from_master(
        (None if failure is None else f"{type(failure).__name__}: {failure}", value, is_user_error)
    )
    if failure is not None:
        raise failure
    if told is not None:
        raise (ConfigError if is_user_error else DrivetrainError)(f"rank 0: {told}")
    return value
