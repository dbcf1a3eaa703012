"""How a running trial talks to its sweep: it reports how it is doing, and may be told that others do better."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drivetrain.experiment.running import TrialPruned

Channel = Callable[[float, int], bool]
"""Takes a value and its step and says whether the trial should be given up."""

_channel: Channel | None = None


def report(value: float, step: int) -> None:
    """Tell the sweep how the objective stands; ends a trial that is not worth finishing. Nothing outside a sweep.

    The end is a `TrialPruned` exception, so `finally` blocks run.
    """
    if _channel is not None and _channel(float(value), int(step)):
        raise TrialPruned(f"the sweep gave this trial up at step {step}, with the objective at {value}")


@contextmanager
def reporting_to(channel: Channel | None) -> Iterator[None]:
    """Send reports to a channel for a while."""
    global _channel
    before, _channel = _channel, channel
    try:
        yield
    finally:
        _channel = before
