"""The public name of `drivetrain.train.run_config`: the same module object."""

from typing import TYPE_CHECKING

from drivetrain.compat.doorway import open_doorway

if TYPE_CHECKING:
    from drivetrain.train.run_config import *  # noqa: F403

open_doorway(__name__, "drivetrain.train.run_config")
