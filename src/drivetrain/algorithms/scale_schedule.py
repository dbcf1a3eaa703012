"""Scale a run and its schedules by one ratio, under the name Composer once had for it."""

import warnings

from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError, DrivetrainDeprecationWarning
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Logger


class ScaleSchedule(Algorithm):
    """Makes a run `ratio` times as long; `Trainer(scale_schedule_ratio=ratio)` does the same and is preferred."""

    allow_multiple = False
    events = frozenset({Event.INIT})
    writes = ("timestamp", "schedulers")

    def __init__(self, ratio: float):
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio > 0:
            raise ConfigError(
                f"ScaleSchedule(ratio={ratio!r}): expected a number above 0, such as 0.5 for half the run."
            )
        self.ratio = float(ratio)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.scale_schedule_ratio = self.ratio  # type: ignore[attr-defined]  # not a field of every state
        warnings.warn(
            "ScaleSchedule is deprecated: use Trainer(scale_schedule_ratio=...) instead.",
            DrivetrainDeprecationWarning,
            stacklevel=2,
        )
