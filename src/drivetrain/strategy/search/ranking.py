"""From thousands of predictions to the few that are worth a simulation or a measurement.

Candidates that do not fit are dropped, with their shortfall. Of the rest only the Pareto front counts: no other candidate is at
once as fast, as small and as simple. The result of a trial rules out candidates that must fail in the same way.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from drivetrain.core.display import format_bytes
from drivetrain.strategy.profile.values import MachineProfile, ModelProfile
from drivetrain.strategy.search.candidates import Candidate, label_of
from drivetrain.strategy.search.cost import Cost, predict_memory, predict_time

TIE = 0.02
"""Times this close count as equal; then the plan with fewer methods wins."""
_FAR_KIND, _FAR = 4.0, 2.0
"""Candidates that are predicted to take so many times as long as the best are not looked at; of other kinds, about which less is known."""


@dataclass(frozen=True)
class Scored:
    """A candidate and its predicted cost."""

    candidate: Candidate
    cost: Cost

    @property
    def seconds(self) -> float:
        """Predicted time of one update."""
        return self.cost.step_seconds

    @property
    def peak(self) -> float:
        """Predicted peak, including what a process needs in addition."""
        return self.cost.peak_bytes

    @property
    def methods(self) -> int:
        """The number of its methods."""
        return len(self.candidate.names())

    @property
    def label(self) -> str:
        """The candidate in a few words."""
        return label_of(self.candidate)

    def with_memory(self, memory: dict[str, float]) -> "Scored":
        """Return the candidate with a better prediction of its memory."""
        return replace(self, cost=Cost(memory, self.cost.time))


def predict(candidate: Candidate, profile: ModelProfile, machine: MachineProfile) -> Scored:
    """Return a candidate with its predicted cost. Methods that define `estimate` change it last."""
    effects = candidate.effects
    cost = Cost(predict_memory(effects, profile, machine), predict_time(effects, profile, machine))
    for method, config in candidate.steps:
        cost = method.estimate(cost, config)
    return Scored(candidate, cost)


def order(scored: Iterable[Scored]) -> list[Scored]:
    """Return candidates, fastest first. Among equals the simpler, then the smaller comes first."""
    return sorted(scored, key=lambda item: (item.seconds, item.methods, item.peak))


def preferred(scored: Iterable[Scored]) -> list[Scored]:
    """Return candidates in the order of choice without a trial: of those that tie with the fastest, the simplest first.

    Methods that are simple make nothing less simple.
    """
    ranked = order(scored)
    ties = [item for item in ranked if item.seconds <= ranked[0].seconds * (1 + TIE)]

    def place(item: Scored) -> tuple[int, float, float]:
        simple = sum(method.is_simple for method, _ in item.candidate.steps)
        return item.methods - simple, item.seconds, item.peak

    return [*sorted(ties, key=place), *ranked[len(ties) :]]


def pareto_front(scored: Iterable[Scored]) -> list[Scored]:
    """Return, fastest first, the candidates that no other one equals or beats in time, memory and simplicity at once."""
    front: list[Scored] = []
    for item in order(scored):
        if not any(other.peak <= item.peak and other.methods <= item.methods for other in front):
            front.append(item)
    return front


def promising(
    scored: Sequence[Scored], count: int, is_valid: Callable[[Candidate], bool] = lambda candidate: True
) -> list[Scored]:
    """Return the few candidates to examine, fastest first: the best of each kind, then more of the front.

    Two candidates are of one kind when the same kernels run. Closed forms know batch arithmetic, sharding and checkpoints well, and
    kernels badly, so a wrong constant must not hide a better kind. What is predicted to take much longer than the best is left out.
    """
    ranked = order(scored)
    chosen: list[Scored] = []
    kinds: set[str] = set()
    for item in ranked:
        if chosen and item.seconds > _FAR_KIND * chosen[0].seconds:
            break
        if item.candidate.kind not in kinds and is_valid(item.candidate):
            kinds.add(item.candidate.kind)
            chosen.append(item)
    chosen = chosen[:count]
    for item in pareto_front(ranked):
        if len(chosen) == count or (chosen and item.seconds > _FAR * chosen[0].seconds):
            break
        if not any(are_alike(item.candidate, other.candidate) for other in chosen) and is_valid(item.candidate):
            chosen.append(item)
    return order(chosen)


def are_alike(candidate: Candidate, other: Candidate) -> bool:
    """Return whether two candidates differ only in details, so that measuring both would show nothing new."""
    one, two = (c.without(method.name for method, _ in c.steps if method.is_minor) for c in (candidate, other))
    return one == two


def nearest_misses(scored: Iterable[Scored], budget: float, count: int = 3) -> list[tuple[Scored, float]]:
    """Return the candidates that need the least memory, each with the memory that is missing."""
    found = sorted(scored, key=lambda item: (item.peak, item.seconds))[:count]
    return [(item, item.peak - budget) for item in found if item.peak > budget]


def is_ruled_out(candidate: Candidate, failed: Iterable[Candidate]) -> bool:
    """Return whether a candidate must run out of memory, because one that needs no more did."""
    return any(_needs_at_least(candidate, other) for other in failed)


def _needs_at_least(candidate: Candidate, other: Candidate) -> bool:
    """Return whether a candidate is another one with a larger micro-batch, less checkpointing or less sharding, or several of these."""
    if _without_amounts(candidate) != _without_amounts(other):
        return False
    return (
        candidate.micro >= other.micro
        and all(amount <= other.amounts.get(dimension, 0) for dimension, amount in candidate.amounts.items())
        and (candidate.zero <= other.zero or not candidate.is_sharded)
    )


def _without_amounts(candidate: Candidate) -> Candidate:
    rest = candidate.without(method.name for method, config in candidate.steps if method.amount(config))
    return replace(rest, micro=1, accumulation=1, data=candidate.data_ranks, zero=1)


def rejection(item: Scored, chosen: float, budget: float) -> str:
    """Return why a candidate was not chosen, with its numbers."""
    if item.peak > budget:
        return f"{item.label}: needs {format_bytes(item.peak)} of {format_bytes(budget)}"
    change = round((item.seconds / chosen - 1) * 100)
    text = f"{item.label}: predicted {item.seconds * 1e3:.4g} ms a step, {change:+} %"
    return text if change >= 0 else f"{text}, but not tried"


def contrasting(
    scored: Sequence[Scored], chosen: Scored, budget: float, count: int, skip: Callable[[Scored], bool]
) -> list[Scored]:
    """Return candidates that differ in kind from the chosen one: those a reader would ask about first."""

    def kind(item: Scored) -> tuple[str, frozenset[tuple[str, int]]]:
        return item.candidate.kind, frozenset(item.candidate.amounts.items())

    found: dict[object, Scored] = {}
    for item in order(scored):
        if kind(item) != kind(chosen) and not skip(item):
            kept = found.get(kind(item))
            if kept is None or (kept.peak > budget >= item.peak):
                found[kind(item)] = item
    near = sorted(found.values(), key=lambda item: (_differences(item.candidate, chosen.candidate), item.seconds))
    return near[:count]


def _differences(candidate: Candidate, other: Candidate) -> int:
    names, others = set(candidate.names()), set(other.names())
    amounts = {*candidate.amounts, *other.amounts}
    return len(names ^ others) + sum(candidate.amounts.get(name) != other.amounts.get(name) for name in amounts)


def sensitivity(scored: Iterable[Scored], chosen: Scored, budget: float) -> str | None:
    """Return what a little more memory would gain, or None if nothing is faster."""
    faster = [item for item in scored if item.peak > budget and item.seconds < 0.98 * chosen.seconds]
    if not faster:
        return None
    found = min(faster, key=lambda item: (item.peak, item.seconds))
    gain = (1 - found.seconds / chosen.seconds) * 100
    return f"{format_bytes(found.peak - budget)} more would allow {found.label}: -{gain:.0f} % step time (predicted)"
