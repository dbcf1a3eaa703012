"""The end of a search: the chosen plan, and everything that is reported about it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from drivetrain.core.display import format_bytes, format_duration
from drivetrain.core.errors import warn
from drivetrain.runtime.ranks import get_num_processes, is_master
from drivetrain.strategy.registry import mesh_method
from drivetrain.strategy.search.candidates import Candidate
from drivetrain.strategy.search.ranking import TIE, Scored, contrasting, nearest_misses, rejection, sensitivity
from drivetrain.strategy.search.space import SearchSpace
from drivetrain.strategy.trial.report import TrialResult
from drivetrain.strategy.value import Evidence, Failure, Strategy

_MOST_POINTS = 500
_MOST_REJECTED = 5


@dataclass(frozen=True)
class Measurement:
    """One tried plan."""

    scored: Scored
    plan: Strategy
    result: TrialResult

    @property
    def candidate(self) -> Candidate:
        """The plan as a candidate."""
        return self.scored.candidate

    @property
    def seconds(self) -> float:
        """Measured time of one update."""
        assert self.result.step_seconds is not None
        return self.result.step_seconds

    @property
    def is_usable(self) -> bool:
        """Whether the plan ran correctly and in time."""
        return self.result.outcome == "ok" and self.result.step_seconds is not None

    @property
    def failure(self) -> str:
        """The plan in a few words, and why it did not work."""
        return f"{self.scored.label}: {self.result.outcome} ({_first_line(self.result.message)})"


def choose(measurements: Sequence[Measurement], tie: float = TIE) -> Measurement | None:
    """Return the fastest plan that worked. Among ties, return the one with the fewest methods."""
    usable = [item for item in measurements if item.is_usable]
    if not usable:
        return None
    fastest = min(item.seconds for item in usable)
    ties = [item for item in usable if item.seconds <= fastest * (1 + tie)]
    return min(ties, key=lambda item: (len(item.plan), item.seconds))


@dataclass
class Comparison:
    """What a search compared, and the plans and reports that are made from it."""

    space: SearchSpace
    budget: float
    """Bytes that a plan may need."""
    scored: Sequence[Scored]
    """All candidates as they were predicted, fastest first."""
    simulated: Sequence[Scored] = ()
    measurements: Sequence[Measurement] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each part of the search took."""

    @cached_property
    def fitting(self) -> list[Scored]:
        """The candidates that fit by prediction."""
        return [item for item in self.scored if item.peak <= self.budget]

    @cached_property
    def plain(self) -> Scored | None:
        """The plain model, if it fits."""
        return next((item for item in self.fitting if item.candidate == self.space.plain), None)

    def all_failed(self) -> bool:
        """Return whether trials showed that training itself fails: the simplest plan that fits was among them, and none ran out of time."""
        found, plain = self.measurements, self.plain
        is_plain_tried = plain is None or any(one.candidate == plain.candidate for one in found)
        return bool(found) and is_plain_tried and all(one.result.outcome != "timeout" for one in found)

    def chosen_plan(self, chosen: Scored, best: Measurement | None, notes: Sequence[str]) -> Strategy:
        """Return the chosen plan with its numbers, its reasons and the rejected plans; `best` is its measurement, if it has one."""
        is_simulated = any(item.candidate == chosen.candidate for item in self.simulated)
        memory: Evidence = "simulated" if is_simulated else "modelled"
        predicted = self._predicted(chosen, memory)
        if (hint := sensitivity(self.scored, chosen, self.budget)) is not None:
            predicted["sensitivity"] = hint
        return replace(
            self.space.plan(chosen.candidate) if best is None else best.plan,
            predicted=predicted,
            measured=None if best is None else measured_numbers(best.result),
            evidence=memory if best is None else "measured",
            reasons=tuple(notes),
            rejected=tuple(self._rejected(chosen, best)),
            search=self.report(),
        )

    def _predicted(self, item: Scored, memory: Evidence) -> dict[str, Any]:
        """Return the predicted cost as a plan stores it, without zeros."""
        return {
            "memory": {name: float(value) for name, value in item.cost.memory.items() if value},
            "time": {name: float(value) for name, value in item.cost.time.items() if value},
            "peak_bytes": float(item.peak),
            "step_seconds": float(item.seconds),
            "budget_bytes": float(self.budget),
            "evidence": {"memory": memory, "time": "modelled"},
        }

    def _rejected(self, chosen: Scored, best: Measurement | None) -> list[str]:
        """Return up to five plans that were not chosen: measured ones first, then what a reader would ask about."""
        lines = []
        for item in self.measurements:
            if not item.is_usable:
                lines.append(item.failure)
            elif best is not None and item.plan != best.plan:
                change = (item.seconds / best.seconds - 1) * 100
                lines.append(f"{item.scored.label}: measured {item.seconds * 1e3:.4g} ms a step, {change:+.0f} %")
        tried = {item.candidate for item in self.measurements}
        more = contrasting(self.scored, chosen, self.budget, _MOST_REJECTED, lambda item: item.candidate in tried)
        lines += [rejection(item, chosen.seconds, self.budget) for item in more]
        return lines[:_MOST_REJECTED]

    def infeasible_plan(self) -> Strategy:
        """Return the plan that comes closest, marked as failed, with the memory that is missing."""
        misses = nearest_misses(self.scored, self.budget)
        nearest, shortfall = misses[0]
        budget = format_bytes(self.budget)
        message = (
            f"no plan fits: the smallest of {len(self.scored)} ({nearest.label}) needs {format_bytes(nearest.peak)}, the budget is "
            f"{budget}; short by {format_bytes(shortfall)}. Raise memory_budget, use more processes, or a smaller model."
        )
        plan = self.space.plan(nearest.candidate)
        return replace(
            plan,
            predicted=self._predicted(nearest, "modelled"),
            evidence="modelled",
            rejected=tuple(f"{item.label}: needs {format_bytes(item.peak)} of {budget}" for item, _ in misses),
            failure=Failure(kind="infeasible", message=message, shortfall_bytes=int(shortfall), nearest=plan),
            search=self.report(),
        )

    def failed_plan(self) -> Strategy:
        """Return the plan of a search in which every trial failed."""
        first = self.measurements[0]
        outcomes = "; ".join(item.failure for item in self.measurements)
        failure = Failure(kind=first.result.outcome, message=f"every plan that was tried failed: {outcomes}")
        rejected = tuple(outcomes.split("; ")[:_MOST_REJECTED])
        return replace(first.plan, failure=failure, rejected=rejected, search=self.report())

    def report(self) -> dict[str, Any]:
        """Return the search as JSON values: counts, times, every trial, and points for a picture."""
        return {
            "candidates": len(self.scored),
            "fitting": len(self.fitting),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "simulated": [item.label for item in self.simulated],
            "measured": [
                {
                    "plan": item.scored.label,
                    "outcome": item.result.outcome,
                    **({"message": _first_line(item.result.message)} if item.result.message else {}),
                    "predicted_seconds": item.scored.seconds,
                    "predicted_bytes": item.scored.peak,
                    **{name: value for name, value in measured_numbers(item.result).items() if name in _SHOWN},
                }
                for item in self.measurements
            ],
            **({} if self.plain is None else {"plain": self.plain.label}),
            "points": points_of(self.scored),
        }


def measured_numbers(result: TrialResult) -> dict[str, Any]:
    """Return the results of a trial as a plan stores them."""
    values = asdict(result)
    return {name: values[name] for name in _KEPT if values[name] is not None}


_SHOWN = ("step_seconds", "steps", "peak_bytes", "reserved_bytes", "startup_seconds")
_KEPT = (*_SHOWN[:4], "loss", "plain_loss", "gradient_norm", "startup_seconds", "is_verified")


def summary(plan: Strategy) -> list[str]:
    """Return a found plan in at most six lines; `plan.explain()` has all of it."""
    if plan.failure is not None:
        return [f"no plan: {plan.failure.message}"]
    batch = f", batch {plan.batch}" if plan.batch else ""
    lines = [f"plan: {', '.join(plan.opt_names()) or 'the unchanged model'}{batch}"]
    predicted, measured, search = plan.predicted or {}, plan.measured or {}, plan.search or {}
    trials = search.get("measured", ())
    numbers, kind = (measured, "measured") if measured.get("step_seconds") else (predicted, "predicted, not measured")
    if "step_seconds" in numbers:
        plain = next((one for one in trials if one["plan"] == search.get("plain") and "step_seconds" in one), None)
        gain = ""
        if plain is not None and measured:
            gain = f", {plain['step_seconds'] / numbers['step_seconds']:.2f} x the plain model"
        memory = f"{format_bytes(predicted['peak_bytes'])} of {format_bytes(predicted['budget_bytes'])} predicted"
        lines.append(f"  step {format_duration(numbers['step_seconds'])} ({kind}{gain}); memory {memory}")
    if search:
        tried = f"{len(trials)} were tried, in {sum(search['seconds'].values()):.0f} s"
        lines.append(f"  of {search['candidates']} plans {search['fitting']} fit and {tried}")
    failed = [one for one in trials if one["outcome"] != "ok"]
    if failed:
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        lines.append(f"  failed: {failed[0]['plan']}: {failed[0]['outcome']} ({failed[0].get('message', '')}){more}")
    said = [text.removeprefix("search: ") for text in plan.reasons if text.startswith("search: ")]
    lines += [f"  {text}" for text in said[:1] + said[1:][-1:]]
    return lines


def plain_plan(cause: str, failed: Strategy | None = None) -> Strategy:
    """Return the plan that changes nothing, for a training run that continues although its search failed, and warn once."""
    if is_master():
        text = (
            f"The search found no plan, so the model trains without one: {cause} strict=True raises an error instead."
        )
        warn(text)
    methods = [mesh_method().name] if get_num_processes() > 1 else []
    rejected, search = ((), None) if failed is None else (failed.rejected, failed.search)
    reason = f"search: no plan was found, so nothing is changed: {cause}"
    return Strategy(methods, reasons=(reason,), rejected=rejected, search=search)


def points_of(scored: Sequence[Scored]) -> list[str]:
    """Return candidates as "seconds bytes kind", evenly thinned if there are very many."""
    step = max(1, -(-len(scored) // _MOST_POINTS))
    return [f"{item.seconds:.6g} {item.peak:.6g} {item.candidate.kind}" for item in scored[::step]]


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "no message"
    return line if len(line) <= 160 else line[:157] + "..."
