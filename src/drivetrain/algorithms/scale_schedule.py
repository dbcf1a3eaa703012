"""Scale a run and its schedules by one ratio, under the name Composer once had for it."""

from drivetrain.context.state import State
from drivetrain.core import Algorithm, DrivetrainDeprecationWarning, Event, Logger
from drivetrain.core.arguments import check_number
from drivetrain.core.errors import warn


class ScaleSchedule(Algorithm):
    """Makes a run `ratio` times as long; `Trainer(scale_schedule_ratio=ratio)` does the same and is preferred."""

    allow_multiple = False
    events = frozenset({Event.INIT})
    writes = ("timestamp", "schedulers")

    def __init__(self, ratio: float):
        hint = ", such as 0.5 for half the run"
        self.ratio = check_number("ratio", ratio, above=0, owner="ScaleSchedule", hint=hint)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.scale_schedule_ratio = self.ratio  # not a field of every state
        warn(
            "ScaleSchedule is deprecated: use Trainer(scale_schedule_ratio=...) instead.", DrivetrainDeprecationWarning
        )
