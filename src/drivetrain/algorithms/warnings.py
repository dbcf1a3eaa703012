"""What an algorithm says when it does nothing, or is used for something it was not made for."""

from drivetrain.core.errors import DrivetrainWarning


class NoEffectWarning(DrivetrainWarning):
    """An algorithm was applied and changed nothing."""


class NotIntendedUseWarning(DrivetrainWarning):
    """An algorithm is used in a way that works, but not as it was meant."""
