"""Cautious updates (Liang et al., 2024, arXiv 2411.16085): skip update entries that point against the current gradient."""

from drivetrain.algorithms.utils.run import own_optimizer, set_optimizer
from drivetrain.context.state import State
from drivetrain.core import Algorithm, Event, Logger
from drivetrain.core.arguments import check_numbers


class Cautious(Algorithm):
    """Wraps the optimizer, so that of each update only entries that agree with the gradient are kept and scaled up."""

    allow_multiple = False
    events = frozenset({Event.INIT})
    writes = ("optimizers",)
    after = ("#surgery", "#optimizer", "FastDefaults")
    conflicts = {"ScheduleFree": "its weights are an average, not the starting point of an update. Use one of them"}

    def __init__(self, eps: float = 1e-3):
        check_numbers("Cautious", 0, eps=eps)
        self.eps = eps

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        set_optimizer(state, "Cautious", own_optimizer(state, str(self), is_new=True), eps=self.eps)
