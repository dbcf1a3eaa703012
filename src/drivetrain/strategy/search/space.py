"""The space of a search: all combinations of options at one global batch.

Each method lists its own options. A method that is not registered, is excluded, or rejects the device or the model is not
enumerated.
"""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from drivetrain.core.errors import BatchSizeError, ConfigError, PlanInfeasible
from drivetrain.strategy.batching import BatchSplit, plan_batch
from drivetrain.strategy.mesh import AXES, DATA_AXES, fit_axes
from drivetrain.strategy.method import Method, Option, Site
from drivetrain.strategy.profile.values import MachineProfile, ModelProfile
from drivetrain.strategy.registry import all_methods, find_method, mesh_method
from drivetrain.strategy.resolve import conflict_between, resolve_plan
from drivetrain.strategy.search.candidates import Candidate, in_order, is_implied, steps_of
from drivetrain.strategy.search.constraints import NUMERICS, SearchConstraints, budget_bytes
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.value import Strategy

_MOST_CANDIDATES = 60_000


@dataclass(kw_only=True, eq=False)
class SearchScope:
    """What plans are made for, and what the caller requests of them: what methods may read when they list their options."""

    task: TrainingTask
    constraints: SearchConstraints
    profile: ModelProfile
    machine: MachineProfile
    device: torch.device
    """The device of this machine; when planning for another machine, the CPU."""
    world: int
    local: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """By method: configurations that rank 0 offers, because they depend on a process; see `Method.local_candidates`."""

    def __post_init__(self) -> None:
        constraints, machine = self.constraints, self.machine
        self.is_cpu = machine.kind == "cpu"
        """Whether plans are for a CPU."""
        self.is_here = constraints.spec is None
        """Whether plans are for this machine."""
        self.has_blocks = any(unit.path for unit in self.profile.units)
        self.budget = budget_bytes(constraints.memory_budget, machine.free)
        """Bytes that a plan may need on one rank."""
        self.notes: list[str] = []
        self._axis_methods = [method for method in all_methods() if method.axis is not None]
        self._read_requests()

    def _read_requests(self) -> None:
        """Set which methods and configurations the caller's constraints leave open."""
        constraints, start = self.constraints, self.constraints.start
        self.unwanted, self.wanted = constraints.unwanted(), constraints.wanted()
        self.fixed: dict[str, Any] = constraints.configured()
        """Configurations that were requested and stay."""
        self.varied: dict[str, Any] = {}
        """Configurations that are varied."""
        self.only: frozenset[str] | None = None
        if start is not None:
            tunable = {entry.name for entry in start if entry.tunable} or set(start.opt_names())
            for name, config, _ in start:
                (self.varied if name in tunable else self.fixed).setdefault(name, config)
            names = set(start.opt_names()) | set().union(*self.wanted, set())
            self.only = frozenset(names | ({mesh_method().name} if self.world > 1 else set()))
            self.wanted = [*self.wanted, *(frozenset({name}) for name in start.opt_names())]
        alone = [next(iter(members)) for members in self.wanted if len(members) == 1]
        if self.world == 1:  # they are dropped with a reason when the plan is applied
            groups = [members for members in self.wanted if all(find_method(name).needs_processes for name in members)]
            alone += [min(members) for members in groups]
        idle = [name for name in alone if find_method(name).stays_idle]
        for name in [name for name in alone if self._has_no_option(name)] + idle:
            if name not in self.varied:
                (self.varied if name in idle else self.fixed).setdefault(name, find_method(name).parse(None))
        written = {*self.fixed, *self.varied}
        self.here = frozenset(name for name in written if find_method(name).stays_idle or self._has_no_option(name))
        """Methods that every candidate's plan has."""

    def _has_no_option(self, name: str) -> bool:
        """Return whether no option of the space represents a method; on one process some are dropped when the plan is applied."""
        method = find_method(name)
        return not method.is_searched or (self.world == 1 and method.needs_processes)

    def may(self, name: str) -> bool:
        """Return whether a candidate may have a method."""
        return name not in self.unwanted and (self.only is None or name in self.only)

    def must(self, name: str) -> bool:
        """Return whether every candidate has this method."""
        return any(members == {name} for members in self.wanted) or name in self.fixed

    def allows(self, candidate: Candidate) -> bool:
        """Return whether a candidate has everything that was requested and nothing that was excluded."""
        names = set(candidate.names())
        return all(map(self.may, names)) and all(members & (names | self.here) for members in self.wanted)

    def batch_for(self, ranks: int, *given: int | None) -> BatchSplit:
        """Return the batch split on some data ranks, or raise; `given` are micro-batch and accumulation."""
        rounding = self.constraints.allow_batch_rounding
        return plan_batch(self.task.global_batch_size, ranks, *given, allow_rounding=rounding)

    def global_batch(self, ranks: int) -> int | None:
        """Return the global batch on some data ranks, or None where it does not divide over them."""
        try:
            return self.batch_for(ranks).global_size
        except BatchSizeError:
            return None

    def needs_dimension(self, dimension: str) -> bool:
        """Return whether every candidate has some method of a dimension."""
        names = {method.name for method in all_methods() if dimension_of(method) == dimension}
        return any(members <= names for members in self.wanted)

    def kept(self, name: str) -> list[Any]:
        """Return the fixed configuration of a method, if there is one."""
        return [self.fixed[name]] if name in self.fixed else []

    def base(self, name: str) -> list[Any]:
        """Return the configuration that is varied, if there is one."""
        return [self.varied[name]] if name in self.varied else []

    def config(self, method: Method, **changes: object) -> Any:
        """Return the configuration to start from, with changes."""
        found = [*self.kept(method.name), *self.base(method.name)] or [method.parse(None)]
        return replace(found[0], **changes)

    def note(self, text: str) -> None:
        """Add a remark to the resulting plan."""
        if text not in self.notes:
            self.notes.append(text)

    def usable(self, method: Method, axes: Mapping[str, int] | None = None) -> bool:
        """Return whether a method may be used and accepts the device and the model."""
        if not self.may(method.name):
            return False
        if method.numerics not in NUMERICS[self.constraints.numerics] and not self.must(method.name):
            return False
        along = {other.name for other in self._axis_methods if other.axis in (axes or {})}
        names = frozenset({method.name, *along})
        site = Site(device=self.device, world=self.world, axes=dict(axes or {}), names=names, model=self.task.model)
        config = self.kept(method.name) if axes else []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self.is_here and method.requires(self.profile, self.device, self.world) is not None:
                    return False
                method.check(config[0] if config else method.parse(None), site)
        except (ConfigError, RuntimeError):
            return False
        return True

    def dimensions(self) -> dict[str, list[Option]]:
        """Return the options of each dimension, in the order of the registry. Those of an axis depend on the mesh and are empty
        here.
        """
        members: dict[str, list[Method]] = {}
        for method in all_methods():
            if method.is_searched:
                members.setdefault(dimension_of(method), []).append(method)
        return {name: self._dimension(name, methods) for name, methods in members.items()}

    def _dimension(self, name: str, methods: list[Method]) -> list[Option]:
        open_ones = [method for method in methods if method.name not in self.here and method.axis is None]
        found = [option for method in open_ones if self.may(method.name) for option in method.options(self)]
        required = [method.name for method in open_ones if self.must(method.name) and not is_implied(method)]
        for one in required:
            found = [option for option in found if one in dict(option)]
        is_fixed = bool(required) or any(not method.may_be_left_out(self) for method in open_ones)
        return found if found and (is_fixed or self.needs_dimension(name)) else [(), *found]

    def splits(self, per_rank: int) -> list[tuple[int, int]]:
        """Return pairs of micro-batch and accumulation."""
        for method in all_methods():
            found = method.splits(self, per_rank)
            if found is not None:
                return found
        return [(per_rank, 1)]

    def on_mesh(
        self, dimensions: Mapping[str, list[Option]], mesh: Mapping[str, int], micro: int, accumulation: int
    ) -> list[list[Option]]:
        """Return the options of each dimension on a mesh. Methods that shard along an axis are used exactly where the mesh has it."""
        found = dict(dimensions)
        for name, options in dimensions.items():
            if any(map(shards_axis, options)):
                found[name] = [option for option in options if _shards_along(option, mesh)]
        for method in self._axis_methods:
            size = mesh.get(str(method.axis), 1)
            if size > 1:
                found[dimension_of(method)] = method.axis_options(self, size, micro, accumulation)
        return list(found.values())

    def meshes(self, dimensions: Mapping[str, list[Option]]) -> Iterator[dict[str, int]]:
        """Yield sizes of axes whose product is the number of processes."""
        has_shards = any(shards_axis(option) for options in dimensions.values() for option in options)
        has_whole = all(any(not shards_axis(option) for option in options) for options in dimensions.values())
        for inner in self._inner_meshes():
            if "data" in inner or "zero" in inner:
                yield inner
            else:
                yield from self._data_splits(inner, has_whole, has_shards)

    def _inner_meshes(self) -> Iterator[dict[str, int]]:
        """Yield sizes of the axes that divide the model or a sample; with all axes where the mesh is given."""
        world, name = self.world, mesh_method().name
        given = next((config for config in (*self.kept(name), *self.base(name)) if config.axes), None)
        if given is not None:
            fixed = dict(fit_axes(given.axes, world))
            if name in self.fixed:
                yield {"data": 1, **fixed}
            else:
                yield {axis: size for axis, size in fixed.items() if axis not in DATA_AXES}
            return
        methods = self._axis_methods
        for sizes in itertools.product(*map(self._sizes, methods)):
            used = {method.name: method for method, size in zip(methods, sizes) if size > 1}
            clash = any(other in used for method in used.values() for other in method.conflicts)
            if world % math.prod(sizes) == 0 and not clash:
                yield {str(method.axis): size for method, size in zip(methods, sizes)}

    def _sizes(self, method: Method) -> list[int]:
        """Return the sizes of an axis that its method accepts."""
        is_wanted = any(method.name in members for members in self.wanted)
        if self.world == 1 or (self.is_cpu and not is_wanted) or self.task.loss_func is None:
            return [1]
        axis = str(method.axis)
        possible = (size for size in method.axis_sizes(self) if self.world % size == 0)
        sizes = [size for size in possible if self.usable(method, {axis: size})]
        return sizes if self.must(method.name) else [1, *sizes]

    def _data_splits(self, inner: dict[str, int], has_whole: bool, has_shards: bool) -> Iterator[dict[str, int]]:
        """Yield how data ranks share parameters: not at all, all of them, or those of one node and smaller groups."""
        ranks, per_node = self.world // math.prod(inner.values()), self.machine.per_node
        if has_whole:
            yield {**inner, "data": ranks, "zero": 1}
        if ranks > 1 and has_shards:
            inside = inner.get("tensor", 1) * inner.get("sequence", 1)
            nodes = {per_node // inside} if per_node > inside else set()
            for zero in sorted({ranks, *nodes, 2 * per_node, 8 * per_node}, reverse=True):
                if 1 < zero <= ranks and ranks % zero == 0:
                    yield {**inner, "data": ranks // zero, "zero": zero}


def shards_axis(option: Option) -> str | None:
    """Return the axis along which an option shards the state of data ranks, or None."""
    return next((method.shards_axis for method, _ in steps_of(option) if method.shards_axis is not None), None)


def _shards_along(option: Option, mesh: Mapping[str, int]) -> bool:
    axis = shards_axis(option)
    sharded = {str(method.shards_axis) for method in all_methods() if method.shards_axis is not None}
    return all((mesh.get(name, 1) > 1) == (name == axis) for name in sharded)


def dimension_of(method: Method) -> str:
    """Return the name of a method's dimension."""
    return method.dimension or method.name


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Candidates, and what turns them into plans."""

    scope: SearchScope
    candidates: tuple[Candidate, ...]
    plain: Candidate | None
    """The model as it is: no method but data parallelism; None where the batch does not divide like that."""

    def plan(self, candidate: Candidate) -> Strategy:
        """Return a candidate as a Strategy."""
        return candidate.plan(self.scope.fixed, self.scope.varied)


def build_space(scope: SearchScope) -> SearchSpace:
    """Return all candidates, or raise why there are none."""
    found, world, start = (
        list(itertools.islice(_candidates(scope), _MOST_CANDIDATES)),
        scope.world,
        scope.constraints.start,
    )
    batch = scope.global_batch(world)
    plain = None if batch is None else Candidate(data=world, micro=batch // world)
    if len(found) == _MOST_CANDIDATES:
        scope.note(f"search: only the first {_MOST_CANDIDATES} candidates were compared")
    if start is not None:
        plain = candidate_of(start, scope)
        found = [plain, *found]
    elif plain is not None and plain not in found and scope.allows(plain):
        # The plain model has none of these.
        keeps_searched = any(find_method(name).is_searched for name in scope.fixed)
        found += [] if keeps_searched else [plain]
    if not found:
        scope.batch_for(world)  # raises if the batch is the reason
        missing = [" or ".join(sorted(members)) for members in scope.wanted]
        raise PlanInfeasible(
            f"no plan for {world} processes and a global batch of {scope.task.global_batch_size} contains what was included: "
            f"{'; '.join(missing) or 'nothing'}. Include less, or use another number of processes."
        )
    return SearchSpace(scope=scope, candidates=tuple(dict.fromkeys(found)), plain=plain)


def _candidates(scope: SearchScope) -> Iterator[Candidate]:
    dimensions = scope.dimensions()
    for mesh in scope.meshes(dimensions):
        ranks = mesh.get("data", 1) * mesh.get("zero", 1)
        batch = scope.global_batch(ranks)
        if batch is None:
            continue
        for micro, accumulation in scope.splits(batch // ranks):
            sizes: dict[str, Any] = {**mesh, "micro": micro, "accumulation": accumulation}
            found = [Candidate(**sizes)]
            for options in scope.on_mesh(dimensions, mesh, micro, accumulation):
                larger = (_with(one, option, scope.device) for one in found for option in options)
                found = [one for one in larger if one is not None]
            for candidate in found:
                fits = all(method.fits(config, candidate) is None for method, config in candidate.steps)
                if fits and scope.allows(candidate):
                    yield candidate


def _with(candidate: Candidate, option: Option, device: torch.device) -> Candidate | None:
    """Return a combination with one more option, or None where a method of it does not fit there or conflicts with another one."""
    if not option:
        return candidate
    larger = candidate.adding(option)
    if conflict_between(larger.configs, device) is not None:
        return None
    return larger if all(method.fits(config, larger) is None for method, config in steps_of(option)) else None


def candidate_of(plan: Strategy, scope: SearchScope) -> Candidate:
    """Return the candidate with the plan's cost. It keeps the plan as it was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is dropped is reported when the plan is applied
        resolved = resolve_plan(plan, model=scope.task.model, device=scope.device, world=scope.world)
    axes = {axis: dict(resolved.axes).get(axis, 1) for axis in AXES}
    if axes["zero"] == 1 and any(method.shards_axis is not None for _, method, _ in resolved.steps):
        axes["zero"], axes["data"] = axes["data"], 1
    ranks = axes["data"] * axes["zero"]
    batch = scope.batch_for(ranks, *resolved.batch_split)
    candidate = Candidate(
        **axes,
        micro=batch.micro,
        accumulation=batch.accumulation,
        methods=in_order({method.name: settings for _, method, settings in resolved.steps}),
        given=Strategy([entry[:2] for entry in plan], mesh=resolved.axes[::-1], batch=batch, dropped=resolved.dropped),
    )
    settled = tuple((method.name, method.settled(config, candidate)) for method, config in candidate.steps)
    return replace(candidate, methods=settled)
