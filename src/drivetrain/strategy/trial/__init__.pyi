# Written by `make stubs` from the lazy exports of this module.
from drivetrain.strategy.trial.running import TrialPool as TrialPool
from drivetrain.strategy.trial.report import TrialResult as TrialResult
from drivetrain.strategy.trial.report import ReferenceResults as ReferenceResults
from drivetrain.strategy.trial.process import reject_inside_trial as reject_inside_trial

__all__ = [
    "TrialPool",
    "TrialResult",
    "ReferenceResults",
    "reject_inside_trial",
]
