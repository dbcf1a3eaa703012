"""What an algorithm says when it does nothing, or is used for something it was not made for."""


class NoEffectWarning(UserWarning):
    """An algorithm was applied and changed nothing."""


class NotIntendedUseWarning(UserWarning):
    """An algorithm is used in a way that works, but not as it was meant."""
