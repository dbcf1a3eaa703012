"""The space of a search: all combinations of what each part of a candidate may be, at one global batch."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from drivetrain.core.errors import BatchSizeError, PlanInfeasible
from drivetrain.strategy.batching import plan_batch
from drivetrain.strategy.method import Option
from drivetrain.strategy.search.candidates import Candidate, steps_of
from drivetrain.strategy.search.given import candidate_of
from drivetrain.strategy.search.place import Asked, Place
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
    """Configurations that were asked for and stay."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Configurations that are varied."""
    notes: tuple[str, ...] = ()

    def plan(self, candidate: Candidate) -> Strategy:
        """Return a candidate as a Strategy."""
        return candidate.plan(self.kept, self.base)


def build_space(place: Place) -> Space:
    """Return all candidates for a place, or raise why there is none."""
    wishes = place.wishes
    asked = Asked(place)
    scope = Scope(place, asked)
    found = list(itertools.islice(_candidates(scope), _MOST_CANDIDATES))
    plain = _plain(place)
    notes = list(scope.notes)
    if len(found) == _MOST_CANDIDATES:
        notes.append(f"search: only the first {_MOST_CANDIDATES} candidates were compared")
    if asked.start is not None:
        found = [candidate_of(asked.start, place), *found]
    elif plain is not None and plain not in found and asked.allows(plain) and not asked.keeps_searched:
        found.append(plain)
    if not found:
        _refuse(place, asked)
    return Space(
        candidates=tuple(dict.fromkeys(found)),
        plain=found[0] if wishes.start is not None else plain,
        kept=asked.kept,
        base=asked.base,
        notes=tuple(notes),
    )


def _candidates(scope: Scope) -> Iterator[Candidate]:
    dimensions = scope.dimensions()
    for mesh in scope.meshes(dimensions):
        ranks = mesh.get("data", 1) * mesh.get("zero", 1)
        batch = _batch(scope.place, ranks)
        if batch is None:
            continue
        for micro, accumulation in scope.splits(batch // ranks):
            sizes: dict[str, Any] = {**mesh, "micro": micro, "accumulation": accumulation}
            found = [Candidate(**sizes)]
            for options in scope.on_mesh(dimensions, mesh, micro, accumulation):
                found = [larger for one in found for option in options if (larger := _with(one, option)) is not None]
            for candidate in found:
                fits = all(method.fits(config, candidate) is None for method, config in candidate.steps)
                if fits and scope.asked.allows(candidate):
                    yield candidate


def _with(candidate: Candidate, option: Option) -> Candidate | None:
    """Return a combination with one more option, or None where a method of it has no place there."""
    if not option:
        return candidate
    larger = candidate.adding(option)
    return larger if all(method.fits(config, larger) is None for method, config in steps_of(option)) else None


def _batch(place: Place, ranks: int) -> int | None:
    try:
        return plan_batch(place.global_batch, ranks, allow_rounding=place.wishes.allow_batch_rounding).global_size
    except BatchSizeError:
        return None


def _plain(place: Place) -> Candidate | None:
    batch = _batch(place, place.world)
    if batch is None:
        return None
    return Candidate(data=place.world, micro=batch // place.world)


def _refuse(place: Place, asked: Asked) -> NoReturn:
    """Raise why there is no candidate at all."""
    plan_batch(place.global_batch, place.world, allow_rounding=place.wishes.allow_batch_rounding)
    missing = [" or ".join(sorted(members)) for members in asked.wanted]
    raise PlanInfeasible(
        f"no plan for {place.world} processes and a global batch of {place.global_batch} has what was included: "
        f"{'; '.join(missing) or 'nothing'}. Include less, or use another number of processes."
    )
