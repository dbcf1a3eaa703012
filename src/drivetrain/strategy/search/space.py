"""The space of a search: all combinations of what each part of a candidate may be, at one global batch."""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from drivetrain.core.errors import BatchSizeError, PlanInfeasible
from drivetrain.strategy.batching import plan_batch
from drivetrain.strategy.mesh import AXES
from drivetrain.strategy.method import Option
from drivetrain.strategy.resolve import conflict_between, resolve_plan
from drivetrain.strategy.search.candidates import Candidate, in_order, steps_of
from drivetrain.strategy.search.problem import PlanningProblem, Requests
from drivetrain.strategy.search.scope import Scope
from drivetrain.strategy.value import Strategy

_MOST_CANDIDATES = 60_000


@dataclass(frozen=True, kw_only=True)
class Space:
    """Candidates, and what turns them into plans."""

    candidates: tuple[Candidate, ...]
    plain: Candidate | None
    """The model as it is: no method but data parallelism; None where the batch does not divide like that."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Configurations that were requested and stay."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Configurations that are varied."""
    notes: tuple[str, ...] = ()

    def plan(self, candidate: Candidate) -> Strategy:
        """Return a candidate as a Strategy."""
        return candidate.plan(self.kept, self.base)


def build_space(problem: PlanningProblem) -> Space:
    """Return all candidates for a problem, or raise why there is none."""
    constraints = problem.constraints
    requests = Requests(problem)
    scope = Scope(problem, requests)
    found = list(itertools.islice(_candidates(scope), _MOST_CANDIDATES))
    plain = _plain(problem)
    notes = list(scope.notes)
    if len(found) == _MOST_CANDIDATES:
        notes.append(f"search: only the first {_MOST_CANDIDATES} candidates were compared")
    if requests.start is not None:
        found = [candidate_of(requests.start, problem), *found]
    elif plain is not None and plain not in found and requests.allows(plain) and not requests.keeps_searched:
        found.append(plain)
    if not found:
        _refuse(problem, requests)
    return Space(
        candidates=tuple(dict.fromkeys(found)),
        plain=found[0] if constraints.start is not None else plain,
        kept=requests.kept,
        base=requests.base,
        notes=tuple(notes),
    )


def _candidates(scope: Scope) -> Iterator[Candidate]:
    dimensions = scope.dimensions()
    for mesh in scope.meshes(dimensions):
        ranks = mesh.get("data", 1) * mesh.get("zero", 1)
        batch = _batch(scope.problem, ranks)
        if batch is None:
            continue
        for micro, accumulation in scope.splits(batch // ranks):
            sizes: dict[str, Any] = {**mesh, "micro": micro, "accumulation": accumulation}
            found = [Candidate(**sizes)]
            for options in scope.on_mesh(dimensions, mesh, micro, accumulation):
                found = [
                    larger
                    for one in found
                    for option in options
                    if (larger := _with(one, option, scope.device)) is not None
                ]
            for candidate in found:
                fits = all(method.fits(config, candidate) is None for method, config in candidate.steps)
                if fits and scope.requests.allows(candidate):
                    yield candidate


def _with(candidate: Candidate, option: Option, device: torch.device) -> Candidate | None:
    """Return a combination with one more option, or None where a method of it does not fit there or conflicts with another one."""
    if not option:
        return candidate
    larger = candidate.adding(option)
    if conflict_between(larger.configs, device) is not None:
        return None
    return larger if all(method.fits(config, larger) is None for method, config in steps_of(option)) else None


def candidate_of(plan: Strategy, problem: PlanningProblem) -> Candidate:
    """Return the candidate whose cost is the plan's; it keeps the plan as it was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is dropped is reported when the plan is applied
        resolved = resolve_plan(plan, model=problem.model, device=problem.device, world=problem.world)
    axes = {axis: dict(resolved.axes).get(axis, 1) for axis in AXES}
    if axes["zero"] == 1 and any(method.shards_axis is not None for _, method, _ in resolved.steps):
        axes["zero"], axes["data"] = axes["data"], 1
    ranks = axes["data"] * axes["zero"]
    batch = plan_batch(
        problem.global_batch, ranks, *resolved.batch_split, allow_rounding=problem.constraints.allow_batch_rounding
    )
    candidate = Candidate(
        **axes,
        micro=batch.micro,
        accumulation=batch.accumulation,
        methods=in_order({method.name: settings for _, method, settings in resolved.steps}),
        given=Strategy(
            [(name, settings) for name, settings, _ in plan],
            mesh=resolved.axes[::-1],
            batch=batch,
            dropped=resolved.dropped,
        ),
    )
    settled = tuple((method.name, method.settled(config, candidate)) for method, config in candidate.steps)
    return replace(candidate, methods=settled)


def _batch(problem: PlanningProblem, ranks: int) -> int | None:
    try:
        return plan_batch(
            problem.global_batch, ranks, allow_rounding=problem.constraints.allow_batch_rounding
        ).global_size
    except BatchSizeError:
        return None


def _plain(problem: PlanningProblem) -> Candidate | None:
    batch = _batch(problem, problem.world)
    if batch is None:
        return None
    return Candidate(data=problem.world, micro=batch // problem.world)


def _refuse(problem: PlanningProblem, requests: Requests) -> NoReturn:
    """Raise why there is no candidate at all."""
    plan_batch(problem.global_batch, problem.world, allow_rounding=problem.constraints.allow_batch_rounding)
    missing = [" or ".join(sorted(members)) for members in requests.wanted]
    raise PlanInfeasible(
        f"no plan for {problem.world} processes and a global batch of {problem.global_batch} has what was included: "
        f"{'; '.join(missing) or 'nothing'}. Include less, or use another number of processes."
    )
