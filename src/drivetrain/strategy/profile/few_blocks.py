"""Extrapolate a large model of many equal blocks from a few of them. Other models are run in full.

A plan (`simulate`): everything that a step holds or sends grows by the same amount with each block, at the same position of the
step. So the largest moment at each position (the first block's forward, the last but one's backward, the update) is extrapolated
from exact differences between a few blocks and one more, and the largest of them is the model's peak. Only families of blocks
with the same shapes in one container are reduced.

The plain model (`model`), where every moment of a step is needed: four blocks are enough. Additional blocks would be between the
second and the third. While the third one runs, each additional block would hold what the second one keeps after its forward, and
in backward, when the second one runs, what the third one leaves. This is exact if the second and the third allocate alike, which
is checked.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain.module.blocks import BlockGroup, find_blocks
from drivetrain.strategy.profile.operations import tensors_of
from drivetrain.strategy.profile.step_memory import Amounts, Record, StepMemory
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.value import Strategy

_ENDS = 2
"""How many blocks from either end of a family are places of their own, at least: gathering ahead makes the outermost ones differ."""

Counts = tuple[int, ...]


@dataclass(frozen=True)
class BlockFamily:
    """Equal blocks in one container."""

    container: str
    names: tuple[str, ...]
    """Their dotted names, in order."""


def find_cuttable(model: nn.Module, groups: Sequence[BlockGroup] | None = None) -> list[BlockFamily]:
    """Return the families that a smaller model can represent."""
    families = []
    for group in find_blocks(model) if groups is None else groups:
        containers = {name.rpartition(".")[0] for name in group.names}
        shapes = {_shapes(member) for member in group.members}
        if not group.repeats or len(containers) != 1 or len(shapes) != 1:
            continue
        container = containers.pop()
        if isinstance(model.get_submodule(container), nn.ModuleList | nn.Sequential | nn.ModuleDict):
            families.append(BlockFamily(container, group.names))
    return families


def _shapes(module: nn.Module) -> Hashable:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)


def choose_counts(families: Sequence[BlockFamily], plan: Strategy) -> list[Counts]:
    """Return the numbers of blocks to simulate: a base, and one more for each family that is reduced; empty if nothing is saved."""
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


def cut_model(model: nn.Module, families: Iterable[BlockFamily], counts: Counts) -> None:
    """Remove all but the first blocks from their containers. The names of the others do not change."""
    for family, count in zip(families, counts):
        container = model.get_submodule(family.container)
        for name in family.names[count:]:
            del container._modules[name.rpartition(".")[2]]


def pinned(plan: Strategy, model: nn.Module, families: Sequence[BlockFamily], counts: Counts) -> Strategy:
    """Return the plan with "auto" replaced by names, because a smaller model may be divided differently."""
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
    """Return the largest moments by position, counted from both ends of a family."""
    found: dict[Hashable, Amounts] = {}
    for segment, amounts in segments.items():
        positions: list[Hashable] = [segment]
        if isinstance(segment, Segment):
            index, count = segment.index, counts[segment.family]
            numbers = ((index, index), (index - count, count - index - 1))  # each with its distance from that end
            from_ends = [number for number, distance in numbers if distance < ends]
            positions = [replace(segment, index=number) for number in from_ends]
        for place in positions:
            if place not in found or sum(amounts.values()) > sum(found[place].values()):
                found[place] = amounts
    return found


@dataclass(frozen=True)
class Segment:
    """A part of a step that begins at a block."""

    what: str
    """ "forward", "after" it, or "backward"."""
    window: int
    family: int
    index: int


def continued(base: Record, others: Sequence[tuple[int, Record]], counts: Counts, full: Counts, period: int) -> Record:
    """Return the record of the full model, extrapolated from a base and one with `period` more blocks in each reduced family."""
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


def watch_blocks(
    model: nn.Module, families: Sequence[BlockFamily], counts: Counts, tracker: StepMemory
) -> list[RemovableHandle]:
    """Report to a tracker when blocks are entered, left, and run backward. Return the hooks to remove afterwards."""
    handles: list[RemovableHandle] = []
    for number, (family, count) in enumerate(zip(families, counts)):
        for index, name in enumerate(family.names[:count]):
            handles += watch_block(model.get_submodule(name), tracker, index, number)
    return handles


def watch_block(block: nn.Module, tracker: StepMemory, index: int, family: int = 0) -> list[RemovableHandle]:
    """Report to a tracker when one block is entered, left, and runs backward."""

    def begin(what: str) -> None:
        tracker.segment = Segment(what, tracker.window, family, index)

    def leave(module: nn.Module, inputs: object, outputs: object) -> None:
        begin("after")
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: begin("backward"))

    return [block.register_forward_pre_hook(lambda *_: begin("forward")), block.register_forward_hook(leave)]


BLOCKS_RUN = 4
"""The first and the last may differ from the others; the two between them must not."""


@contextmanager
def with_depth(container: nn.Module, depth: int) -> Iterator[None]:
    """Keep only the first blocks of a list inside a context."""
    blocks = dict(container._modules)
    for name in list(blocks)[depth:]:
        del container._modules[name]
    try:
        yield
    finally:
        container._modules.clear()
        container._modules.update(blocks)


class DeeperTimeline:
    """The timeline of four watched blocks extended by `more` blocks between the second and the third."""

    def __init__(self, timeline: StepMemory, more: int, forward: Sequence[int], backward: Sequence[int]):
        """`forward` and `backward` are the first events of each block, in the order in which they happen."""
        self.events, self.operations, self._more = timeline.events, timeline.operations, more
        self._second, self._third = range(*forward[1:3]), range(*forward[2:4])
        self._third_back, self._second_back = range(*backward[1:3]), range(*backward[2:4])

    @staticmethod
    def made_of(timeline: StepMemory, more: int) -> "DeeperTimeline | None":
        """Return the timeline with more blocks, or None if the two in the middle do not allocate alike."""
        first: dict[Hashable, int] = {}
        for place, event in enumerate(timeline.events):
            first.setdefault(event.segment, place)
        begins = [(segment.what, place) for segment, place in first.items() if isinstance(segment, Segment)]
        forward, backward = ([place for kind, place in begins if kind == what] for what in ("forward", "backward"))
        if len(forward) != BLOCKS_RUN or len(backward) != BLOCKS_RUN:
            return None
        deeper = DeeperTimeline(timeline, more, forward, backward)
        is_alike = deeper._sizes(deeper._second) == deeper._sizes(deeper._third)
        return deeper if is_alike and deeper._sizes(deeper._third_back) == deeper._sizes(deeper._second_back) else None

    def _sizes(self, part: range) -> list[int]:
        """Return allocations in order, and the sum of what is released between two of them, whose order means nothing."""
        sizes = [0]
        for index in part:
            size = self.events[index].size
            if size < 0 and sizes[-1] < 0:
                sizes[-1] += size
            else:
                sizes.append(size)
        return sizes

    def _alive(self, at: int, *parts: range) -> set[int]:
        """Return the storages that were allocated in some parts and are there before an event."""
        alive = set()
        for index, event in enumerate(self.events[:at]):
            if event.size < 0:
                alive.discard(event.key)
            elif any(index in part for part in parts):
                alive.add(event.key)
        return alive

    def totals(self) -> list[int]:
        """Return the bytes in use after each event."""
        kept = self._alive(self._third.stop, self._second)
        left = self._alive(self._second_back.stop, self._third, self._third_back)
        totals = []
        total = held = left_held = 0  # in all, and what every further block holds in forward and in backward
        for index, event in enumerate(self.events):
            total += event.size
            if event.key in kept:
                # In the third block's backward only the block next to it releases something.
                if event.size > 0 or index not in self._third_back:
                    held += event.size
            elif event.key in left:
                left_held += event.size
            repeated = held if index < self._second_back.start else left_held
            totals.append(total + self._more * (repeated if index >= self._second.stop else 0))
        return totals
