"""The public name of `drivetrain.module.surgery`: the same module object."""

from typing import TYPE_CHECKING

from drivetrain.compat.registry import open_doorway

if TYPE_CHECKING:
    from drivetrain.module.surgery import *  # noqa: F403

open_doorway(__name__, "drivetrain.module.surgery")
