"""The run that an algorithm works on: how long it is and how far, and its optimizer, in whose place an algorithm may put another.

Algorithms do not import optimizers; the Trainer installs `state.make_optimizer(name, groups, **settings)` for them.
"""

from torch import nn
from torch.optim import Optimizer

from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Time, TimeUnit
from drivetrain.core.types import Settings
from drivetrain.module.params import named_trainable


def elapsed_fraction(state: State, who: str) -> float:
    """Return how much of the run is done, from 0 to 1; an algorithm that depends on it cannot do without."""
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ConfigError(
            f"{who} depends on the length of the run, which is unknown: set max_duration, such as '10ep'."
        )
    return float(elapsed.value)


def has_come(time: Time, state: State, who: str) -> bool:
    """Return whether the run has reached a time."""
    if time.unit is TimeUnit.DURATION:
        # Nine decimals forgive binary fractions, so that 0.3dur of 10 batches is reached at batch 3.
        return round(elapsed_fraction(state, who) - time.value, 9) >= 0
    return state.clock.get(time.unit).value >= time.value


def progress_to(end: Time, state: State, who: str) -> float:
    """Return how much of the way from the start of the run to a time lies behind, from 0 to 1."""
    if end.value <= 0:
        return 1.0
    is_share = end.unit is TimeUnit.DURATION
    done = elapsed_fraction(state, who) if is_share else float(state.clock.get(end.unit).value)
    return min(1.0, done / end.value)


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


def own_optimizer(state: State, who: str) -> Optimizer:
    """Return the only torch optimizer of the run, or raise an error that names what there is."""
    optimizers = state.optimizers
    if len(optimizers) == 1 and isinstance(optimizers[0], Optimizer):
        return optimizers[0]
    given = ", ".join(type(one).__name__ for one in optimizers) or "none"
    raise ConfigError(
        f"{who} works with a single torch optimizer; this run has {given}. Give the Trainer one optimizer, such as "
        "torch.optim.AdamW(model.parameters())."
    )


def make_optimizer(state: State, name: str, groups: object, **settings: object) -> Optimizer:
    """Return a new optimizer of that name from the factory that the Trainer installed."""
    if state.make_optimizer is None:
        raise ConfigError(
            f"there is no factory for the optimizer {name!r}: state.make_optimizer is set by the Trainer."
        )
    return state.make_optimizer(name, groups, **settings)


def named_groups(optimizer: Optimizer, model: nn.Module) -> list[Settings]:
    """Return the groups of an optimizer with the names of their parameters, and their other settings."""
    names = {id(parameter): name for name, parameter in named_trainable(model)}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        members = [(names[id(p)], p) for p in group["params"] if id(p) in names]
        if members:
            groups.append({"params": members, **settings})
    return groups


def reject_begun(optimizer: Optimizer, who: str) -> None:
    """Reject replacing an optimizer that has taken steps: what it has learnt would be lost silently."""
    if optimizer.state:
        raise ConfigError(
            f"{who} replaces the {type(optimizer).__name__}, which has already taken steps. Give the Trainer a new one."
        )
