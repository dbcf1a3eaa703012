"""The space of a search: all combinations of what each part of a candidate may be, at one global batch."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from drivetrain.core.errors import BatchSizeError, PlanInfeasible
from drivetrain.strategy.batching import plan_batch
from drivetrain.strategy.mesh import AXES
from drivetrain.strategy.search.candidates import Candidate
from drivetrain.strategy.search.dimensions import Dimensions
from drivetrain.strategy.search.given import candidate_of
from drivetrain.strategy.search.place import SEARCHED, Asked, Place
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
    dimensions = Dimensions(place, asked)
    found = list(itertools.islice(_candidates(place, dimensions, asked), _MOST_CANDIDATES))
    plain = _plain(place)
    notes = list(dimensions.notes)
    if len(found) == _MOST_CANDIDATES:
        notes.append(f"search: only the first {_MOST_CANDIDATES} candidates were compared")
    if asked.start is not None:
        found = [candidate_of(asked.start, place), *found]
    elif plain is not None and plain not in found and asked.allows(plain) and not set(asked.kept) & SEARCHED:
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


def _candidates(place: Place, d: Dimensions, asked: Asked) -> Iterator[Candidate]:
    for mesh in d.meshes():
        ranks = mesh.get("data", 1) * mesh.get("zero", 1)
        batch = _batch(place, ranks)
        if batch is None:
            continue
        for micro, accumulation in d.micros(batch // ranks):
            yield from _of_mesh(mesh, micro, accumulation, d, asked)


def _of_mesh(mesh: dict[str, int], micro: int, accumulation: int, d: Dimensions, asked: Asked) -> Iterator[Candidate]:
    sizes: dict[str, Any] = {axis: mesh.get(axis, 1) for axis in AXES}
    pipe, tensor = sizes["pipe"], sizes["tensor"]
    is_alone = all(size == 1 for size in sizes.values())
    parts = _pipeline_parts(micro, pipe)
    if pipe > 1 and (not parts or accumulation > 1):
        return
    for sharding, threads in itertools.product(d.shardings, d.threads):
        if not _fits_mesh(sharding, sizes):
            continue
        by_block = sharding in ("zero2", "fsdp") or tensor > 1 or pipe > 1 or sizes["sequence"] > 1
        for precision, checkpoint, compile_, graphs, chunked, fused, last, offload, extra, part in itertools.product(
            d.precisions, d.checkpoints, d.compiles, d.graphs, d.chunked, d.fused, d.channels_last, d.offload, d.extras, parts,
        ):  # fmt: skip
            if by_block and compile_ == "model":
                continue
            if graphs and (compile_ != "model" or not is_alone or offload or checkpoint != "none"):
                continue
            if chunked and (tensor > 1 or pipe > 1):
                continue
            if precision == "half" and (tensor > 1 or pipe > 1 or chunked):
                continue
            if precision in ("half", "float16") and offload:
                continue
            if last and compile_ == "block":
                continue
            candidate = Candidate(
                **sizes, sharding=sharding, precision=precision, checkpoint=checkpoint, micro=micro, accumulation=accumulation,
                microbatches=part, compile=compile_, graphs=graphs, chunked_loss=chunked, fused=fused, channels_last=last,
                cpu_offload=offload, threads=threads, extra=extra,
            )  # fmt: skip
            if asked.allows(candidate):
                yield candidate


def _fits_mesh(sharding: str, sizes: Mapping[str, int]) -> bool:
    """Say whether a kind of sharding makes sense on a mesh: what is sharded is sharded along `zero`."""
    if sharding in ("zero2", "fsdp"):
        return sizes["zero"] > 1
    if sizes["zero"] > 1:
        return False
    beside = sizes["tensor"] > 1 or sizes["pipe"] > 1
    if sharding == "zero1":
        return sizes["data"] > 1 and not beside and sizes["sequence"] == 1
    return not (sizes["tensor"] > 1 and sizes["data"] > 1)  # DDP cannot hold tensor-parallel parameters


def _pipeline_parts(micro: int, pipe: int) -> list[int]:
    """Return into how many micro-batches a pipeline may cut a pass: at least as many as stages, so that all are busy."""
    if pipe == 1:
        return [1]
    return [parts for parts in (pipe, 2 * pipe, 4 * pipe, 8 * pipe) if parts <= micro and micro % parts == 0]


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
