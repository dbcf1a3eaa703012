"""The run that an algorithm works on: how long it is and how far, and its optimizer, in whose place an algorithm may put another.

Algorithms do not import optimizers; the Trainer installs `state.make_optimizer(name, groups, **settings)` for them.
"""

from torch.optim import Optimizer

from drivetrain.algorithms.surgery import model_of
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, Event, Time, TimeUnit
from drivetrain.core.types import Settings
from drivetrain.module.wrapping import named_clean_parameters


def elapsed_fraction(state: State, who: str) -> float:
    """Return how much of the run is done, from 0 to 1; an algorithm that depends on it cannot do without."""
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ConfigError(
            f"{who} depends on the length of the run, which is unknown: set max_duration, such as '10ep'."
        )
    return float(elapsed.value)


def has_reached(time: Time, state: State, who: str) -> bool:
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


def own_optimizer(state: State, who: str, *, is_new: bool = False) -> Optimizer:
    """Return the only torch optimizer of the run, or raise an error that names what there is.

    With `is_new`, one that has taken steps is an error: replacing it would silently lose what it has learnt.
    """
    optimizers = state.optimizers
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        given = ", ".join(type(one).__name__ for one in optimizers) or "none"
        raise ConfigError(
            f"{who} works with a single torch optimizer; this run has {given}. Give the Trainer one optimizer, such as "
            "torch.optim.AdamW(model.parameters())."
        )
    if is_new and optimizers[0].state:
        raise ConfigError(
            f"{who} replaces the {type(optimizers[0]).__name__}, which has already taken steps. Give the Trainer a new one."
        )
    return optimizers[0]


def set_optimizer(state: State, name: str, groups: object, **settings: object) -> None:
    """Give the run a new optimizer of that name, from the factory that the Trainer installed."""
    if state.make_optimizer is None:
        raise ConfigError(
            f"there is no factory for the optimizer {name!r}: state.make_optimizer is set by the Trainer."
        )
    state.optimizers = (state.make_optimizer(name, groups, **settings),)


class OptimizerReplacement(Algorithm):
    """An algorithm that replaces the optimizer, at INIT and after all surgery; a run has only one of them."""

    allow_multiple = False
    events = frozenset({Event.INIT})
    writes: tuple[str, ...] = ("optimizers",)
    after = ("#surgery",)
    tags = frozenset({"optimizer"})
    exclusive = frozenset({"optimizer"})

    def replaced_groups(self, state: State) -> list[Settings]:
        """Return the groups of the optimizer to replace with the names of their parameters, and their other settings."""
        names = {id(parameter): name for name, parameter in named_clean_parameters(model_of(state, str(self)))}
        groups: list[Settings] = []
        for group in own_optimizer(state, str(self), is_new=True).param_groups:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            # Frozen parameters may be trained later, and the loss may have parameters of its own.
            others = (f"outside the model.{len(groups)}.{index}" for index, _ in enumerate(group["params"]))
            members = [(names.get(id(p), other), p) for p, other in zip(group["params"], others)]
            if members:
                groups.append({"params": members, **settings})
        return groups
