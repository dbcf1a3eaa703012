"""What a search knows of model and machine: at first what every candidate's prediction reads, then what the few that matter read beside.

Capturing a compiled graph takes longer than everything else that is found out about a model, so nobody asks for one in vain. Without it
a compiled plan is predicted to keep what eager mode keeps, which is more; time does not depend on it. So a candidate that fits without
being known better fits, and one that does not is looked at closely only if it would be among the fastest.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.strategy.profile.model import ModelProfiler
from drivetrain.strategy.profile.values import MachineProfile, ModelProfile
from drivetrain.strategy.search.agreement import master_does
from drivetrain.strategy.search.candidates import Candidate
from drivetrain.strategy.search.measure import Clock
from drivetrain.strategy.search.memory import parts_read
from drivetrain.strategy.search.ranking import Scored, order, predict


@dataclass
class Known:
    """Model and machine; all ranks know the same, and rank 0 finds it out."""

    profile: ModelProfile
    machine: MachineProfile
    clock: Clock
    """The search's time."""
    seconds: float
    """What is left of it for finding out about the model."""
    profiler: ModelProfiler | None
    """None on other ranks."""
    excluded: frozenset[str] = frozenset()
    """Parts that nobody will ask for."""
    asked: set[str] = field(default_factory=set)

    def predicted(self, candidates: Iterable[Candidate]) -> list[Scored]:
        """Return candidates with their predicted cost, from the fastest on."""
        return order(predict(candidate, self.profile, self.machine) for candidate in candidates)

    def missing(self, items: Iterable[Scored]) -> set[str]:
        """Return the parts that the predictions of some candidates read, and nobody has asked for."""
        read = set().union(*(parts_read(item.candidate.effects) for item in items), set())
        return read - self.asked - self.excluded

    def find_out(self, parts: set[str]) -> None:
        """Ask for parts of the profile, in the time that is left for it; what does not come in time is named in its notes."""
        self.asked |= parts
        profiler = self.profiler
        begin = time.monotonic()
        limit = max(0.0, min(self.seconds, self.clock.left() / 2))  # late in a search there is less

        def found() -> ModelProfile:
            assert profiler is not None
            return profiler.profile(parts, time_limit=limit)

        self.profile = master_does(found)
        self.seconds -= time.monotonic() - begin

    def again(self, scored: Sequence[Scored], parts: set[str]) -> list[Scored]:
        """Return candidates with the cost of those predicted again that read some parts."""
        return order(
            predict(item.candidate, self.profile, self.machine) if parts & parts_read(item.candidate.effects) else item
            for item in scored
        )

    def completed(self, item: Scored) -> Scored:
        """Return a candidate with its memory predicted from all that its prediction reads."""
        parts = self.missing([item])
        if not parts:
            return item
        before = predict(item.candidate, self.profile, self.machine).cost.memory
        self.find_out(parts)
        now = predict(item.candidate, self.profile, self.machine)
        is_simulated = item.cost.memory != before
        found = with_compilation(now, item.cost.memory, self.machine) if is_simulated else now.cost.memory
        return item.with_memory(dict(found))


def with_compilation(item: Scored, memory: Mapping[str, float], machine: MachineProfile) -> dict[str, float]:
    """Return simulated memory with the reserve, and for a compiled plan with the activations that compilation leaves."""
    found = {name: float(value) for name, value in memory.items()}
    if item.candidate.is_compiled:
        predicted = item.cost.memory.get("activations", 0.0)
        found["activations"] = min(found.get("activations", 0.0), predicted)
        if item.candidate.effects.compiled == "model":  # else head and loss run as they are
            found["temporary"] = min(found.get("temporary", 0.0), item.cost.memory.get("temporary", 0.0))
    found.pop("reserve", None)
    found["reserve"] = machine.reserve_bytes + machine.reserve_share * sum(found.values())
    return found


def doubtful(scored: Sequence[Scored], top: Sequence[Scored], budget: float) -> list[Scored]:
    """Return candidates that do not fit as far as is known, and would be among the top if they did."""
    slowest = top[-1].seconds if top else float("inf")
    return [item for item in scored if item.peak > budget and item.seconds <= slowest]
