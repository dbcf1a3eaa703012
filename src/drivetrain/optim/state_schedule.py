"""Learning rates as a function of the state: callables `(state, ssr=1.0) -> factor` on the rate each group was given."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from drivetrain.core.errors import ConfigError
from drivetrain.optim.positions import Position


@runtime_checkable
class StateSchedule(Protocol):
    """Anything that returns the factor on the learning rate for a state."""

    def __call__(self, state: object, ssr: float = 1.0) -> float:
        """Return the factor."""


def compile_state_schedule(scheduler: Callable[..., float], state: Any, ssr: float = 1.0) -> Any:
    """Return torch's LambdaLR for the state's optimizer that follows a scheduler; a tuple of them for several optimizers."""
    takes_ssr = _takes_ssr(scheduler)
    if not takes_ssr and ssr != 1.0:
        raise ConfigError(
            f"{_name(scheduler)} takes the state alone, so it cannot be scaled: expected ssr=1.0, given {ssr}. Give it a second argument, "
            "def scheduler(state, ssr=1.0)."
        )
    if not ssr > 0:
        raise ConfigError(f"ssr={ssr!r}: expected a number above 0; 1 leaves a schedule as it is.")
    arguments = (ssr,) if takes_ssr else ()
    moment = Position(state)

    def factor(updates: int) -> float:
        # Within an update the loop counts the batch last. What the rate is set for is the next batch.
        moment.ahead = max(0, updates - state.clock.step)
        return scheduler(moment, *arguments)

    optimizers = [one for one in state.optimizers if isinstance(one, Optimizer)]
    if not optimizers:
        raise ConfigError("compile_state_schedule: the state has no torch optimizer whose rate could be scheduled.")
    made = tuple(LambdaLR(optimizer, factor) for optimizer in optimizers)
    return made[0] if len(made) == 1 else made


def follows_state(schedule: object) -> bool:
    """Return whether a schedule is called with the state, rather than with the optimizer to make a scheduler for it."""
    return getattr(type(schedule), "follows_state", False) is True


def _name(scheduler: object) -> str:
    return getattr(scheduler, "__name__", type(scheduler).__name__)


def _takes_ssr(scheduler: Callable[..., float]) -> bool:
    try:
        inspect.signature(scheduler).bind(None, 1.0)
    except (TypeError, ValueError):
        return False
    return True
