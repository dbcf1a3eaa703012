"""What a plan is predicted to cost on one rank: memory at its peak by category, and one update's time by part.

A user's method changes it in `estimate(cost, config)` and returns the new one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MEMORY = ("params", "grads", "optimizer", "activations", "gathered", "temporary", "reserve")
TIME = ("compute", "recompute", "communication", "bubble", "transfer", "optimizer")


@dataclass(frozen=True)
class Cost:
    """Bytes and seconds; the categories of memory are those of the moment at which most is held, so they add up to the peak.

    >>> cost = Cost({"params": 4.0, "activations": 8.0}, {"compute": 2.0})
    >>> cost.scaled(activations=0.5, compute=1.25).peak_bytes
    8.0
    """

    memory: Mapping[str, float] = field(default_factory=dict)
    time: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float:
        """The largest number of bytes held at once."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        """The time of one update, with all its forward passes."""
        return sum(self.time.values())

    def scaled(self, **factors: float) -> "Cost":
        """Return the cost with categories of memory or parts of time multiplied."""
        unknown = [name for name in factors if name not in (*MEMORY, *TIME)]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no part of a cost. Parts: {', '.join((*MEMORY, *TIME))}.")

        def change(parts: Mapping[str, float]) -> dict[str, float]:
            return {name: value * factors.get(name, 1.0) for name, value in parts.items()}

        return Cost(change(self.memory), change(self.time))  # "optimizer" is both: state and update shrink together
