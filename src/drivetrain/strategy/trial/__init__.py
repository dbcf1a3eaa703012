"""Plans tried in processes of their own, which cannot hurt the run."""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".running": ["TrialPool", "run_trial"],
        ".report": ["TrialResult", "Yardstick"],
        ".process": ["refuse_inside_trial"],
    },
)
