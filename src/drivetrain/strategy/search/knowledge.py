"""What a search knows about model and machine, what it finds out for the few candidates that matter, and what it learns from trials.

Capturing a compiled graph takes longer than everything else that is computed about a model, so it is done only for plans that
need it. Without it, a compiled plan is predicted to keep what eager mode keeps, which is more; the predicted time does not depend
on it. So a candidate that fits by this prediction fits, and one that does not is examined only if it would be among the fastest.

Numbers such as free memory and clocks differ between ranks, and a plan must not. So rank 0 measures and decides.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.runtime.collectives import broadcast_from_master
from drivetrain.runtime.ranks import is_master
from drivetrain.strategy.effects import Effects
from drivetrain.strategy.profile.machine import COMPILATION, Prediction, learn, learnt
from drivetrain.strategy.profile.model import ModelProfiler
from drivetrain.strategy.profile.values import FUSED, MachineProfile, ModelProfile
from drivetrain.strategy.search.candidates import Candidate
from drivetrain.strategy.search.cost import Cost, compiled_ratio, parts_read
from drivetrain.strategy.search.decision import Measurement
from drivetrain.strategy.search.measure import SearchTime
from drivetrain.strategy.search.ranking import Scored, order, predict


@dataclass
class Knowledge:
    """Model and machine. All ranks have the same values, which rank 0 finds."""

    profile: ModelProfile
    machine: MachineProfile
    clock: SearchTime
    """The search's time."""
    seconds: float
    """What is left of it for finding out about the model."""
    profiler: ModelProfiler | None
    """None on other ranks."""
    excluded: frozenset[str] = frozenset()
    """Parts that will not be needed."""
    asked: set[str] = field(default_factory=set)
    learned: MachineProfile = field(init=False)
    """The machine as the trials of this search have corrected it. All ranks learn the same from the same results."""

    def __post_init__(self) -> None:
        self.learned = self.machine

    def predicted(self, candidates: Iterable[Candidate]) -> list[Scored]:
        """Return candidates with their predicted cost, fastest first."""
        return order(predict(candidate, self.profile, self.machine) for candidate in candidates)

    def missing(self, items: Iterable[Scored]) -> set[str]:
        """Return the profile parts that the predictions of some candidates read and that have not been requested."""
        read = set().union(*(parts_read(item.candidate.effects) for item in items), set())
        return read - self.asked - self.excluded

    def find_out(self, parts: set[str]) -> None:
        """Request parts of the profile within the remaining time. The notes name what was not finished in time."""
        self.asked |= parts
        begin = time.monotonic()
        limit = max(0.0, min(self.seconds, self.clock.left() / 2))  # late in a search there is less
        # Other ranks have no profiler and do not call this.
        self.profile = run_on_master(lambda: self.profiler.profile(parts, time_limit=limit))  # type: ignore[union-attr]
        self.seconds -= time.monotonic() - begin

    def again(self, scored: Sequence[Scored], parts: set[str]) -> list[Scored]:
        """Return candidates, with the cost of those that read some parts predicted again."""
        return order(
            predict(item.candidate, self.profile, self.machine) if parts & parts_read(item.candidate.effects) else item
            for item in scored
        )

    def completed(self, item: Scored) -> Scored:
        """Return a candidate with its memory predicted from all parts that its prediction reads."""
        parts = self.missing([item])
        if not parts:
            return item
        is_simulated = item.cost.memory != predict(item.candidate, self.profile, self.machine).cost.memory
        self.find_out(parts)
        now = predict(item.candidate, self.profile, self.machine)
        if is_simulated:
            return self.with_simulated(now, item.cost.memory)
        return item.with_memory(dict(now.cost.memory))

    def with_simulated(self, item: Scored, memory: Mapping[str, float]) -> Scored:
        """Return a candidate with simulated memory, the reserve and, if compiled, the activations that compilation saves or adds."""
        found = {name: float(value) for name, value in memory.items()}
        effects = item.candidate.effects
        if effects.is_compiled:
            predicted, simulated = item.cost.memory.get("activations", 0.0), found.get("activations", 0.0)
            more = compiled_ratio(effects, self.profile)
            found["activations"] = min(simulated, predicted) if more <= 1 else max(simulated * more, predicted)
            if effects.compiled == "model":  # else head and loss run as they are
                found["temporary"] = min(found.get("temporary", 0.0), item.cost.memory.get("temporary", 0.0))
        found.pop("reserve", None)
        found["reserve"] = self.machine.reserve_bytes + self.machine.reserve_share * sum(found.values())
        return item.with_memory(found)

    # From trials.

    def learn(self, one: Measurement) -> None:
        """Update predictions from the result of a trial."""
        if not one.is_usable:
            return
        candidate, plain = one.candidate, replace(self.learned, corrections={})
        expected = predict(candidate, self.profile, plain).seconds
        if expected < _LEARNT_FROM:
            return
        prediction = Prediction(
            kind=candidate.kind,
            step_seconds=expected,
            peak_bytes=one.scored.peak - one.scored.cost.memory.get("reserve", 0.0),
            compile_seconds=compile_seconds(candidate.effects, self.profile, plain),
        )
        self.learned = (learn if is_master() else learnt)(self.learned, prediction, one.result)

    def compile_seconds(self, item: Scored) -> float:
        """Return the expected compile time of a candidate."""
        return compile_seconds(item.candidate.effects, self.profile, self.learned)

    def corrected(self, item: Scored) -> Scored:
        """Return a candidate with its time predicted again. Its memory, which may be simulated, is unchanged."""
        return replace(item, cost=Cost(item.cost.memory, predict(item.candidate, self.profile, self.learned).cost.time))


def likely_mispredicted(scored: Sequence[Scored], top: Sequence[Scored], budget: float) -> list[Scored]:
    """Return candidates that do not fit by the present prediction and would be among the fastest if they did."""
    slowest = top[-1].seconds if top else float("inf")
    return [item for item in scored if item.peak > budget and item.seconds <= slowest]


_LEARNT_FROM = 5e-3
"""Steps that are predicted to be shorter than this many seconds teach nothing: what they take is not the device's."""


_COMPILING, _EACH_KERNEL, _EACH_KIND = 6.0, 0.015, 0.2
"""Seconds to compile anything, for each kernel of a graph, and for each that is different. 16 cores next to an H200 took 0.7 to 1.5 times
as long for eight models (torch 2.11). What a machine takes is learnt from its trials."""
_UNKNOWN_KERNELS, _UNKNOWN_KINDS = 500.0, 80.0


def compile_seconds(e: Effects, profile: ModelProfile, machine: MachineProfile) -> float:
    """Return the expected compile time before the first step. Blocks of one kind are compiled once."""
    if not e.is_compiled:
        return 0.0
    works = profile.work.get(e.arithmetic + FUSED, ())
    kernels, kinds = sum(work.count for work in works) or _UNKNOWN_KERNELS, float(len(works)) or _UNKNOWN_KINDS
    if e.compiled == "block":
        blocks = max(1, sum(unit.count for unit in profile.blocks))
        inside = [work for work in works if work.in_block]
        kernels = (sum(work.count for work in inside) or kernels) / blocks
        kinds = float(len(inside)) or kinds / 2
    return machine.corrections.get(COMPILATION, 1.0) * (_COMPILING + kernels * _EACH_KERNEL + kinds * _EACH_KIND)


T = TypeVar("T")


def run_on_master(function: Callable[[], T]) -> T:
    """Run a function on rank 0 and return its result on all ranks. An error raises on all ranks. All must call this."""
    value: T | None = None
    failure: BaseException | None = None
    if is_master():
        try:
            value = function()
        except Exception as error:  # whatever it is, the other ranks are waiting
            failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    text, value, is_user_error = broadcast_from_master((text, value, isinstance(failure, ConfigError)))
    if failure is not None:
        raise failure
    if text is not None:
        raise (ConfigError if is_user_error else DrivetrainError)(f"rank 0: {text}")
    return value
