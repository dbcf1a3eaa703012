"""Lookahead (Zhang et al., 2019, arXiv 1907.08610): k fast steps forward, one slow step towards where they led.

The cubic schedule is the one of the CIFAR-10 speed records (Jordan, 2024, arXiv 2404.00498): the slow weights follow at once in the
beginning and ever more slowly towards the end.
"""

from collections.abc import Mapping
from typing import Any, Literal

from drivetrain.algorithms.surgery import model_of
from drivetrain.algorithms.utils.run import elapsed_fraction
from drivetrain.context.state import State
from drivetrain.core import Algorithm, Event, Logger
from drivetrain.core.arguments import check_choice, check_counts, check_fractions
from drivetrain.core.types import StateDict
from drivetrain.module.average import AveragedWeights


def cubic_decay(progress: float) -> float:
    """Return the share of the slow weights that stays in an update at a point of the run.

    >>> round(cubic_decay(1.0), 4), cubic_decay(0.0)
    (0.7738, 0.0)
    """
    return 0.95**5 * progress**3


class Lookahead(Algorithm):
    """After every k-th step moves slow weights by `alpha` towards the fast ones, and the fast ones there.

    With `schedule="cubic"` the move is 1 - 0.95^5 (t/T)^3 instead of `alpha`, and the run ends with the slow weights. Floating
    buffers take part. The slow weights are taken when the run starts.
    """

    allow_multiple = False
    events = frozenset({Event.FIT_START, Event.AFTER_STEP, Event.FIT_END})
    writes = ("model",)
    tags = frozenset({"average"})

    def __init__(self, k: int = 5, alpha: float = 0.5, schedule: Literal["cubic"] | None = None):
        check_counts("Lookahead", 1, k=k)
        check_fractions("Lookahead", alpha=alpha)
        if schedule is not None:
            check_choice("schedule", schedule, ("cubic",), owner="Lookahead")
        self.k, self.alpha, self.schedule = k, alpha, schedule
        self._slow: AveragedWeights | None = None
        self._restored: StateDict | None = None
        self._steps = 0

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model = model_of(state, str(self))
        if event is Event.FIT_START or self._slow is None:
            self._steps = 0 if self._restored is None else self._steps
            self._slow = AveragedWeights(model)
            if self._restored is not None:
                # A layer may have made buffers of whole numbers after the run had started, as GyroDropout does.
                late = {name: value for name, value in self._slow.named_tensors() if not value.is_floating_point()}
                self._slow.load_state_dict({**self._restored, "shadow": {**late, **self._restored["shadow"]}})
            self._restored = None
        if event is Event.AFTER_STEP:
            self._steps += 1
            if self._steps % self.k == 0:
                done, move = state.clock.batch, self.alpha
                if self.schedule is not None:  # at the share of the run that lies behind once this batch is counted
                    share = min(1.0, elapsed_fraction(state, str(self)) * (done + 1) / done) if done else 0.0
                    move = 1 - cubic_decay(share)
                self._slow.update_lerp(model, move)
                self._slow.copy_to(model)
        elif event is Event.FIT_END and self.schedule is not None:
            self._slow.copy_to(model)

    def state_dict(self) -> StateDict:
        return {"slow": self._restored if self._slow is None else self._slow.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # The slow weights are applied when the run starts.
        self._slow, self._restored, self._steps = None, state["slow"], state["steps"]
