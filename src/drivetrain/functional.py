"""Every algorithm as a plain function, for loops of one's own; loaded when asked for."""

from drivetrain.algorithms.registry import FUNCTIONS, offered
from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, offered(FUNCTIONS))
