"""From a list of methods to what will be done: merged, checked for conflicts, fitted to the number of processes, in the order of
application.

This has no side effects. All ranks that call it with the same arguments get the same result or the same error.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.core.arguments import check_count
from drivetrain.core.errors import ConflictError, UnsupportedMethodError, warn
from drivetrain.module.ddp import check_embeddings
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.strategy.batching import BatchSplit, plan_batch
from drivetrain.strategy.mesh import DATA_AXES, Axes, fit_axes
from drivetrain.strategy.method import Method, Site, Stage
from drivetrain.strategy.registry import find_method, mesh_method

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan that is resolved for a model, a device and a number of processes."""

    steps: tuple[tuple[Stage, Method, Any], ...]
    """Stage, method and configuration, in the order of application."""
    axes: Axes
    site: Site
    rank_order: tuple[int, ...] | None = None
    dropped: tuple[tuple[str, str], ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def data_ranks(self) -> int:
        """The number of ranks that the samples of a batch are spread over."""
        return math.prod(self.site.axis(axis) for axis in DATA_AXES)

    @property
    def batch_split(self) -> tuple[int | None, int | None]:
        """The micro-batch and the accumulation that its methods set; None if they do not."""
        found = (method.batch_split(config) for _, method, config in self.steps)
        return next((split for split in found if split is not None), (None, None))

    @property
    def splitter(self) -> str | None:
        """The name of the method that splits batches, or None."""
        return next((one.name for _, one, config in self.steps if one.batch_split(config) is not None), None)

    def batch_of(self, plan: "Strategy", global_size: int) -> BatchSplit:
        """Return how a global batch is split: as the plan or its methods set it."""
        if plan.batch is not None and plan.batch.data_ranks == self.data_ranks:
            return plan.batch
        return plan_batch(global_size, self.data_ranks, *self.batch_split)

    def config(self, name: str) -> Any:
        """Return the configuration of a method, or None if it is not in the plan."""
        return next((config for _, method, config in self.steps if method.name == name), None)


def resolve_plan(
    plan: "Strategy",
    *,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    world: int | None = None,
    strict: bool = False,
) -> ResolvedPlan:
    """Resolve a plan for a model, a device and a number of processes, or raise why it cannot be applied."""
    world = get_num_processes() if world is None else check_count("world_size", world)
    place = choose_device(device)
    merged = _expanded(_merged(plan))
    parallel = merged.get(mesh_method().name)
    axes = fit_axes(parallel.axes if parallel is not None else (), world)
    site = Site(device=place, world=world, axes=dict(axes), names=frozenset(merged), model=model)
    if (conflict := conflict_between(merged, place)) is not None:
        raise ConflictError(conflict)
    dropped: list[tuple[str, str]] = []
    for name, config in list(merged.items()):
        method = find_method(name)
        reason = method.is_redundant(config, site) or method.requires(None, place, world)
        if reason is not None:
            if strict:
                raise UnsupportedMethodError(
                    f"{name} cannot be used on {place} with {world} processes: {reason}. Remove it, or pass strict=False."
                )
            dropped.append((name, reason))
            del merged[name]
    if dropped:
        warn("left out of the plan: " + "; ".join(f"{name}, because {reason}" for name, reason in dropped))
    site = replace(site, names=frozenset(merged))
    steps = []
    for name, config in merged.items():
        method = find_method(name)
        method.check(config, site)
        steps.append((method.stage_of(config, site), method, config))
    steps.sort(key=lambda step: (step[0], step[1].name))
    resolved = ResolvedPlan(
        steps=tuple(steps),
        axes=axes,
        site=site,
        rank_order=None if parallel is None else parallel.rank_order,
        dropped=(*plan.dropped, *dropped),
        reasons=tuple(f"{method.name}: {why}" for _, method, config in steps if (why := method.reason(config))),
    )
    if model is not None and resolved.data_ranks > 1:
        check_embeddings(model)
        _check_sparse(model, resolved)
    return resolved


def _check_sparse(model: nn.Module, plan: ResolvedPlan) -> None:
    """Reject embeddings whose gradients cannot be split."""
    shards = plan.site.axis("tensor") * plan.site.axis("pipe") > 1 or any(step[1].shards_axis for step in plan.steps)
    for name, module in model.named_modules():
        if shards and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedMethodError(
                f"the embedding {name!r} has sparse gradients, which cannot be sharded. Use sparse=False, or plain data parallelism."
            )


def _merged(plan: "Strategy") -> dict[str, Any]:
    """Return the configuration of each method; one method twice must mean the same twice."""
    merged: dict[str, Any] = {}
    for name, config, _ in plan:
        if name in merged and merged[name] != config:
            raise ConflictError(
                f"{name} is in the plan twice, with different settings: {merged[name]} and {config}. Keep one of them."
            )
        merged[name] = config
    return merged


def _expanded(merged: dict[str, Any]) -> dict[str, Any]:
    """Replace methods that combine others by those. An entry for one of them must have the same settings, or none."""
    for name, config in list(merged.items()):
        method = find_method(name)
        parts = method.expand(config)
        if parts is None:
            continue
        del merged[name]
        for other, remedy in method.conflicts.items():
            if other in merged:
                raise ConflictError(f"{name} and {other} cannot be used together. {remedy}")
        for part, setting in parts.items():
            parsed = find_method(part).parse(setting)
            if part in merged and setting is not None and merged[part] != parsed:
                raise ConflictError(
                    f"{name} includes {', '.join(parts)}, and {part} is also in the plan, with other settings. Keep one of them."
                )
            merged.setdefault(part, parsed)
    return merged


def conflict_between(configs: Mapping[str, object], device: torch.device) -> str | None:
    """Return why methods with these configurations cannot be in one plan, and what to do; None if they can.

    Loaded plans and the candidates of a search are held to the same rules.
    """
    found = (find_method(name).clash(config, configs, device) for name, config in configs.items())
    return _conflict_of_names(tuple(configs)) or next(filter(None, found), None)


@functools.lru_cache(4096)  # a search asks for thousands of candidates with few different sets of methods
def _conflict_of_names(names: tuple[str, ...]) -> str | None:
    methods = [find_method(name) for name in names]
    for group in dict.fromkeys(method.group for method in methods if method.is_alone_in_group):
        members = [method.name for method in methods if method.is_alone_in_group and method.group == group]
        if len(members) > 1:
            return f"{' and '.join(members)} cannot be used together: a plan has one method of the group {group!r}. Keep one of them."
    for method in methods:
        for other, remedy in method.conflicts.items():
            if other in names:
                return f"{method.name} and {other} cannot be used together. {remedy}"
    return None
