"""When something that repeats is due, whether a moment of the run has come, and how long the run is."""

from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time, TimeUnit


def elapsed_fraction(state: State, who: str) -> float:
    """Return how much of the run lies behind, from 0 to 1; an algorithm that depends on it cannot do without."""
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ConfigError(
            f"{who} follows the course of the run, whose length is not known: give max_duration, such as '10ep'."
        )
    return float(elapsed.value)


def has_come(time: Time, state: State, who: str) -> bool:
    """Return whether the run has reached a time."""
    if time.unit is TimeUnit.DURATION:
        # Nine decimals forgive binary fractions, so that 0.3dur of 10 batches is reached at batch 3.
        return round(elapsed_fraction(state, who) - time.value, 9) >= 0
    return state.clock.get(time.unit).value >= time.value


def num_batches(state: State) -> int | None:
    """Return the batches of the whole run, or None where that cannot be counted."""
    end, per_epoch = state.max_duration, state.dataloader_len
    if end is None:
        return None
    if end.unit is TimeUnit.BATCH:
        return int(end.value)
    if end.unit is TimeUnit.STEP:
        return int(end.value) * state.accumulation_steps
    if end.unit is TimeUnit.EPOCH and per_epoch is not None:
        return int(end.value * per_epoch.value)
    return None


class Rhythm:
    """Is due once whenever its counter is at a multiple of the interval; what was done is saved, so a resumed run keeps it."""

    def __init__(self, every: Time):
        self.every = every
        self.done_at = 0

    def has_begun(self, state: State) -> bool:
        """Return whether its counter has counted anything yet."""
        return self._now(state) > 0

    def is_due(self, state: State) -> bool:
        """Return whether it is time; `tick` then notes that it was used."""
        now = self._now(state)
        return 0 < now != self.done_at and now % int(self.every.value) == 0

    def tick(self, state: State) -> None:
        """Note that what was due has been done."""
        self.done_at = self._now(state)

    def _now(self, state: State) -> int:
        return int(state.clock.get(self.every.unit).value)
