"""One of several algorithms per batch: MixUp for this batch, CutMix for the next.

Algorithms that exclude each other in one batch can take turns. The choice is drawn when a batch (or an epoch) begins,
from a generator of the state, so that it is saved, restored and different on every rank.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from drivetrain.core.binding import subscribes
from drivetrain.core.errors import ConfigError, ConfigTypeError, StateError, did_you_mean
from drivetrain.core.event import Event
from drivetrain.core.plugin import Algorithm, Logger, Plugin, plugin_name
from drivetrain.core.types import StateDict


def _from_to(first: Event, last: Event) -> frozenset[Event]:
    events = list(Event)
    return frozenset(events[events.index(first) : events.index(last) + 1])


# The event at which the choice is made, and the events it governs; at all others every member acts.
_TURNS: Mapping[str, tuple[Event, frozenset[Event]]] = {
    "batch": (Event.AFTER_DATALOADER, _from_to(Event.AFTER_DATALOADER, Event.BATCH_CHECKPOINT)),
    "epoch": (Event.EPOCH_START, _from_to(Event.EPOCH_START, Event.EPOCH_CHECKPOINT)),
}


class OneOf(Algorithm):
    """Let exactly one member act per batch (or epoch), drawn with the given weights.

    Outside of its turn, at INIT or in evaluation, every member acts: each must be set up.
    """

    def __init__(
        self, *algorithms: Plugin, weights: Sequence[float] | None = None, per: Literal["batch", "epoch"] = "batch"
    ) -> None:
        if per not in _TURNS:
            raise ConfigError(f"per={per!r}: expected 'batch' or 'epoch'.{did_you_mean(per, _TURNS)}")
        self.members = _checked_members(algorithms, per)
        self.weights = _checked_weights(weights, len(algorithms))
        self.per = per
        self._draws_at, self._turn = _TURNS[per]
        self._bounds = list(accumulate(self.weights))
        self._chosen: int | None = None
        self._drawn_in_epoch: int | None = None
        self.events = frozenset(
            event for event in Event if event is self._draws_at or any(subscribes(one, event) for one in self.members)
        )
        self.reads = tuple(dict.fromkeys(name for member in self.members for name in member.reads))
        self.writes = tuple(dict.fromkeys(name for member in self.members for name in member.writes))
        self.tags = frozenset().union(*(member.tags for member in self.members))
        self.find_unused_parameters = any(getattr(one, "find_unused_parameters", False) for one in self.members)
        self.backwards_create_graph = any(getattr(one, "backwards_create_graph", False) for one in self.members)

    def apply(self, event: Event, state: object, logger: Logger) -> int | None:
        """Draw when a turn begins, then let the chosen member act, or every member outside of a turn."""
        acting = self.members
        if event in self._turn:
            if event is self._draws_at or self._chosen is None:
                self._chosen = self._draw(state)
            acting = (self.members[self._chosen],)
        exit_code = None
        for member in acting:
            if member.match(event, state):
                exit_code = member.apply(event, state, logger)
        return exit_code

    def state_dict(self) -> StateDict:
        """Return whose turn it is, and every member's state."""
        members = [member.state_dict() for member in self.members]
        return {"chosen": self._chosen, "epoch": self._drawn_in_epoch, "members": members}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back whose turn it is, and every member's state."""
        if len(state["members"]) != len(self.members):
            raise StateError(f"{self} has {len(self.members)} members, the saved one had {len(state['members'])}.")
        self._chosen, self._drawn_in_epoch = state["chosen"], state["epoch"]
        for member, saved in zip(self.members, state["members"]):
            member.load_state_dict(saved)

    def inference_weights(self, state: object) -> Mapping[str, object] | None:
        """Return the weights of the first member that has any."""
        offers = (member.inference_weights(state) for member in self.members)
        return next((weights for weights in offers if weights is not None), None)

    def close(self, state: object, logger: Logger) -> None:
        """Close every member."""
        for member in self.members:
            member.close(state, logger)

    def post_close(self) -> None:
        """Let every member release what it holds."""
        for member in self.members:
            member.post_close()

    def __str__(self) -> str:
        return f"OneOf({', '.join(map(plugin_name, self.members))})"

    def _draw(self, state: Any) -> int:
        """Return the member whose turn it is."""
        if self.per == "epoch":
            # A run resumed inside an epoch begins that epoch again; its choice was made and has been restored.
            if self._chosen is not None and self._drawn_in_epoch == state.clock.epoch:
                return self._chosen
            self._drawn_in_epoch = state.clock.epoch
        import torch

        rng = state.rng(str(self))
        point = torch.rand((), generator=rng, dtype=torch.float64, device=rng.device).item() * self._bounds[-1]
        return bisect_right(self._bounds, point)


def _checked_members(algorithms: tuple[Plugin, ...], per: str) -> tuple[Plugin, ...]:
    if len(algorithms) < 2:
        raise ConfigError(f"OneOf chooses between at least two algorithms, but was given {len(algorithms)}.")
    for member in algorithms:
        if not isinstance(member, Plugin) or type(member).apply is Plugin.apply:
            raise ConfigTypeError(f"OneOf was given {member!r}; algorithms must define apply(event, state, logger).")
        if per == "batch" and Event.BEFORE_DATALOADER in member.events:
            raise ConfigError(f"{member} acts at BEFORE_DATALOADER, before OneOf chooses. Use per='epoch'.")
    return algorithms


def _checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise ConfigError(f"OneOf has {count} algorithms and {len(weights)} weights; give one weight for each.")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise ConfigError(f"weights={tuple(weights)!r}: expected numbers that are not negative and not all zero.")
    return tuple(float(weight) for weight in weights)
