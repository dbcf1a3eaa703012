"""Trials of plans in separate processes, which cannot affect the run."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".running": ["TrialPool"],
        ".report": ["TrialResult", "ReferenceResults"],
        ".process": ["reject_inside_trial"],
    },
)
