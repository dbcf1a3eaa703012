"""When something that repeats is due, and whether a moment of the run has come."""

from drivetrain.algorithms.utils.checks import elapsed_fraction
from drivetrain.context.state import State
from drivetrain.core.time import Time, TimeUnit


def has_come(time: Time, state: State, who: str) -> bool:
    """Say whether the run has reached a time."""
    if time.unit is TimeUnit.DURATION:
        # Nine decimals forgive binary fractions, so that 0.3dur of 10 batches is reached at batch 3.
        return round(elapsed_fraction(state, who) - time.value, 9) >= 0
    return state.clock.get(time.unit).value >= time.value


class Rhythm:
    """Is due once whenever its counter is at a multiple of the interval; what was done is saved, so a resumed run keeps it."""

    def __init__(self, every: Time):
        self.every = every
        self.done_at = 0

    def is_due(self, state: State) -> bool:
        """Say whether it is time; `tick` then notes that it was used."""
        now = int(state.clock.get(self.every.unit).value)
        return 0 < now != self.done_at and now % int(self.every.value) == 0

    def tick(self, state: State) -> None:
        """Note that what was due has been done."""
        self.done_at = int(state.clock.get(self.every.unit).value)
