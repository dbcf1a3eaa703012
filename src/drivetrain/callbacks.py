"""The public name of `drivetrain.train.callbacks`: the same module object."""

from typing import TYPE_CHECKING

from drivetrain.compat.registry import open_doorway

if TYPE_CHECKING:
    from drivetrain.train.callbacks import *  # noqa: F403

open_doorway(__name__, "drivetrain.train.callbacks")
