"""Speed-ups that compose: one file per idea, first a plain function, then a thin class that says when to call it.

The functions are collected in `drivetrain.functional`; here are the classes for the Trainer, and the layers and transforms
they put in place. Everything loads on first use.
"""

from drivetrain.algorithms.registry import ALGORITHMS, PARTS, offered
from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "drivetrain.core.one_of": ["OneOf"],
        **offered(ALGORITHMS, PARTS),
        "drivetrain.core.errors": ["NoEffectWarning", "NotIntendedUseWarning"],
    },
)
