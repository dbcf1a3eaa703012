"""The end of a search: the chosen plan, and everything that is reported about it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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


def finished_plan(
    chosen: Scored,
    measurement: Measurement | None,
    space: SearchSpace,
    *,
    scored: Sequence[Scored],
    measurements: Sequence[Measurement],
    budget: float,
    evidence: Mapping[str, Evidence],
    notes: Sequence[str],
    report: Mapping[str, object],
) -> Strategy:
    """Return the chosen plan with its numbers, its reasons and the rejected plans."""
    plan = measurement.plan if measurement is not None else space.plan(chosen.candidate)
    predicted = _predicted(chosen, budget, evidence)
    hint = sensitivity(scored, chosen, budget)
    if hint is not None:
        predicted["sensitivity"] = hint
    return replace(
        plan,
        predicted=predicted,
        measured=None if measurement is None else measured_numbers(measurement.result),
        evidence="measured" if measurement is not None else evidence["memory"],
        reasons=tuple(notes),
        rejected=tuple(_rejected(chosen, measurement, scored, measurements, budget)),
        search=dict(report),
    )


def _predicted(item: Scored, budget: float, evidence: Mapping[str, Evidence]) -> dict[str, Any]:
    """Return the predicted cost as a plan stores it, without zeros."""
    return {
        "memory": {name: float(value) for name, value in item.cost.memory.items() if value},
        "time": {name: float(value) for name, value in item.cost.time.items() if value},
        "peak_bytes": float(item.peak),
        "step_seconds": float(item.seconds),
        "budget_bytes": float(budget),
        "evidence": dict(evidence),
    }


def measured_numbers(result: TrialResult) -> dict[str, Any]:
    """Return the results of a trial as a plan stores them."""
    values = asdict(result)
    return {name: values[name] for name in _KEPT if values[name] is not None}


_SHOWN = ("step_seconds", "steps", "peak_bytes", "reserved_bytes", "startup_seconds")
_KEPT = (*_SHOWN[:4], "loss", "plain_loss", "gradient_norm", "startup_seconds", "is_verified")


def _rejected(
    chosen: Scored,
    measurement: Measurement | None,
    scored: Sequence[Scored],
    measurements: Sequence[Measurement],
    budget: float,
) -> list[str]:
    """Return up to five plans that were not chosen: measured ones first, then what a reader would ask about."""
    lines = []
    for item in measurements:
        if measurement is not None and item.plan == measurement.plan:
            continue
        if item.is_usable and measurement is not None:
            change = (item.seconds / measurement.seconds - 1) * 100
            lines.append(f"{item.scored.label}: measured {item.seconds * 1e3:.4g} ms a step, {change:+.0f} %")
        elif not item.is_usable:
            lines.append(item.failure)
    tried = {item.candidate for item in measurements}
    more = contrasting(scored, chosen, budget, _MOST_REJECTED, lambda item: item.candidate in tried)
    lines += [rejection(item, chosen.seconds, budget) for item in more]
    return lines[:_MOST_REJECTED]


def infeasible_plan(
    scored: Sequence[Scored], space: SearchSpace, budget: float, report: Mapping[str, object]
) -> Strategy:
    """Return the plan that comes closest, marked as failed, with the memory that is missing."""
    misses = nearest_misses(scored, budget)
    nearest, shortfall = misses[0]
    message = (
        f"no plan fits: the smallest of {len(scored)} ({nearest.label}) needs {format_bytes(nearest.peak)}, the budget is "
        f"{format_bytes(budget)}; short by {format_bytes(shortfall)}. Raise memory_budget, use more processes, or a smaller model."
    )
    plan = space.plan(nearest.candidate)
    return replace(
        plan,
        predicted=_predicted(nearest, budget, {"memory": "modelled", "time": "modelled"}),
        evidence="modelled",
        rejected=tuple(
            f"{item.label}: needs {format_bytes(item.peak)} of {format_bytes(budget)}" for item, _ in misses
        ),
        failure=Failure(kind="infeasible", message=message, shortfall_bytes=int(shortfall), nearest=plan),
        search=dict(report),
    )


def failed_plan(measurements: Sequence[Measurement], report: Mapping[str, object]) -> Strategy:
    """Return the plan of a search in which every trial failed."""
    first = measurements[0]
    outcomes = "; ".join(item.failure for item in measurements)
    failure = Failure(kind=first.result.outcome, message=f"every plan that was tried failed: {outcomes}")
    rejected = tuple(outcomes.split("; ")[:_MOST_REJECTED])
    return replace(first.plan, failure=failure, rejected=rejected, search=dict(report))


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


def report_of(
    scored: Sequence[Scored],
    fitting: int,
    simulated: Sequence[Scored],
    measurements: Sequence[Measurement],
    seconds: Mapping[str, float],
    plain: Scored | None = None,
) -> dict[str, Any]:
    """Return the search as JSON values: counts, times, every trial, and points for a picture."""
    return {
        "candidates": len(scored),
        "fitting": fitting,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "simulated": [item.label for item in simulated],
        "measured": [
            {
                "plan": item.scored.label,
                "outcome": item.result.outcome,
                **({"message": _first_line(item.result.message)} if item.result.message else {}),
                "predicted_seconds": item.scored.seconds,
                "predicted_bytes": item.scored.peak,
                **{name: value for name, value in measured_numbers(item.result).items() if name in _SHOWN},
            }
            for item in measurements
        ],
        **({} if plain is None else {"plain": plain.label}),
        "points": points_of(scored),
    }


def points_of(scored: Sequence[Scored]) -> list[str]:
    """Return candidates as "seconds bytes kind", evenly thinned if there are very many."""
    step = max(1, -(-len(scored) // _MOST_POINTS))
    return [f"{item.seconds:.6g} {item.peak:.6g} {item.candidate.kind}" for item in scored[::step]]


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "no message"
    return line if len(line) <= 160 else line[:157] + "..."
