"""The public name of `drivetrain.compat.pytorch_accelerated_utils`: the same module object."""

from typing import TYPE_CHECKING

from drivetrain.compat.registry import open_doorway

if TYPE_CHECKING:
    from drivetrain.compat.pytorch_accelerated_utils import *  # noqa: F403

open_doorway(__name__, "drivetrain.compat.pytorch_accelerated_utils")
