"""A large model of many equal blocks, understood from small ones: simulate a few blocks, one more, and continue the line.

Everything that a step holds or sends grows by the same amount with each block, at the same place of the step. So the largest moment of
each place (the first block's forward, the last but one's backward, the update) is continued by exact differences, and the largest of
them is the model's. Only families of blocks with the same shapes in one container are cut; anything else is simulated whole.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from drivetrain.module.blocks import BlockGroup, find_blocks
from drivetrain.strategy.profile.step_memory import Amounts, Record
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.value import Strategy

_ENDS = 2
"""How many blocks from either end of a family are places of their own, at least: gathering ahead makes the outermost ones differ."""

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """Equal blocks in one container."""

    container: str
    names: tuple[str, ...]
    """Their dotted names, in order."""

    def kept(self, count: int) -> tuple[str, ...]:
        """Return the names that remain when `count` blocks do."""
        return self.names[:count]


def find_cuttable(model: nn.Module, groups: Sequence[BlockGroup] | None = None) -> list[Family]:
    """Return the families that a smaller model can stand for."""
    families = []
    for group in find_blocks(model) if groups is None else groups:
        containers = {name.rpartition(".")[0] for name in group.names}
        shapes = {_shapes(member) for member in group.members}
        if not group.repeats or len(containers) != 1 or len(shapes) != 1:
            continue
        container = containers.pop()
        if isinstance(model.get_submodule(container), nn.ModuleList | nn.Sequential | nn.ModuleDict):
            families.append(Family(container, group.names))
    return families


def _shapes(module: nn.Module) -> Hashable:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)


def choose_counts(families: Sequence[Family], plan: Strategy) -> list[Counts]:
    """Return the numbers of blocks to simulate: a base, and for each family that is cut one more; empty where nothing is saved."""
    period = 1
    for name, config, _ in plan:
        repeats = find_method(name).period(config)
        if repeats is None:
            return []
        period = math.lcm(period, repeats)
    full = [len(family.names) for family in families]
    base = []
    for count in full:
        least = _ends(period) + 1
        least += (count - least) % period
        base.append(least if count > least + period else count)
    if base == full:
        return []
    cut = [index for index, count in enumerate(base) if count < full[index]]
    runs = [tuple(base)]
    runs += [tuple(count + period * (place == index) for place, count in enumerate(base)) for index in cut]
    return runs if sum(map(sum, runs)) < sum(full) else []


def _ends(period: int) -> int:
    return max(_ENDS, period)


def cut_model(model: nn.Module, families: Iterable[Family], counts: Counts) -> None:
    """Take all but the first blocks out of their containers; the names of the others stay."""
    for family, count in zip(families, counts):
        container = model.get_submodule(family.container)
        for name in family.names[count:]:
            del container._modules[name.rpartition(".")[2]]


def pinned(plan: Strategy, model: nn.Module, families: Sequence[Family], counts: Counts) -> Strategy:
    """Return the plan with "auto" replaced by names, because a smaller model may divide otherwise."""
    gone = {name for family, count in zip(families, counts) for name in family.names[count:]}
    groups = find_blocks(model)
    units = tuple(name for group in groups for name in group.names if name and name not in gone)
    repeated = tuple(name for group in groups if group.repeats for name in group.names if name not in gone)
    names = plan.opt_names()
    entries = [
        (name, pinned_config, tunable and name == entry)
        for entry, config, tunable in plan
        for name, pinned_config in find_method(entry).pinned(config, names, units, repeated)
    ]
    return replace(plan, opt_list=entries)


def places(segments: Mapping[Hashable, Amounts], counts: Counts, ends: int) -> dict[Hashable, Amounts]:
    """Return the largest moments by place, counted from either end of a family."""
    found: dict[Hashable, Amounts] = {}
    for segment, amounts in segments.items():
        for place in _places_of(segment, counts, ends):
            if place not in found or sum(amounts.values()) > sum(found[place].values()):
                found[place] = amounts
    return found


def _places_of(segment: Hashable, counts: Counts, ends: int) -> list[Hashable]:
    if not isinstance(segment, Segment):
        return [segment]
    index, count = segment.index, counts[segment.family]
    found = [index] if index < ends else []
    found += [index - count] if count - index <= ends else []
    return [replace(segment, index=place) for place in found]


@dataclass(frozen=True)
class Segment:
    """A part of a step that begins at a block."""

    what: str
    """ "forward", "after" it, or "backward"."""
    window: int
    family: int
    index: int


def continued(base: Record, others: Sequence[tuple[int, Record]], counts: Counts, full: Counts, period: int) -> Record:
    """Return the record of the full model from those of a base and of one with `period` more blocks in each family that is cut."""
    start = places(base.segments, counts, _ends(period))
    total = {place: dict(amounts) for place, amounts in start.items()}
    collectives = {part: dict(entries) for part, entries in base.collectives.items()}
    for index, record in others:
        times = (full[index] - counts[index]) / period
        grown = tuple(count + period * (place == index) for place, count in enumerate(counts))
        found = places(record.segments, grown, _ends(period))
        for place in list(total):
            if place not in found:
                del total[place]
                continue
            for kind in total[place]:
                total[place][kind] += times * (found[place][kind] - start[place][kind])
        for part in {*record.collectives, *base.collectives}:
            before, after = base.collectives.get(part, {}), record.collectives.get(part, {})
            entries = collectives.setdefault(part, {})
            for name in {*before, *after}:
                (count0, size0), (count1, size1) = before.get(name, (0, 0.0)), after.get(name, (0, 0.0))
                count, size = entries.get(name, (0, 0.0))
                entries[name] = (count + round(times * (count1 - count0)), size + times * (size1 - size0))
    return Record(total, collectives)


def watch_blocks(model: nn.Module, families: Sequence[Family], counts: Counts, tracker: Any, window: Any) -> list[Any]:
    """Let a tracker know when blocks are entered, left, and go backward; return what to remove afterwards."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    handles: list[Any] = []

    def watch(block: nn.Module, family: int, index: int) -> None:
        def enter(*_: Any) -> None:
            tracker.segment = Segment("forward", window(), family, index)

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            tracker.segment = Segment("after", window(), family, index)
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(back)

        def back(gradient: Any) -> None:
            tracker.segment = Segment("backward", window(), family, index)

        handles.append(block.register_forward_pre_hook(enter))
        handles.append(block.register_forward_hook(leave))

    for number, (family, count) in enumerate(zip(families, counts)):
        for index, name in enumerate(family.kept(count)):
            watch(model.get_submodule(name), number, index)
    return handles
