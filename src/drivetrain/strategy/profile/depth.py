"""Run a deep model with fewer of its blocks: what one block adds is the difference between two depths, and the rest is a straight line.

For the memory of a step four blocks are enough. Say there were more, between the second and the third: while the third one runs, each of
them would hold what the second one keeps when it has been left behind, and in backward, when the second one's turn has come, what the
third one leaves behind. That is exact where the second and the third allocate alike, which is looked at.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.module.blocks import BlockGroup
from drivetrain.strategy.profile.few_blocks import find_cuttable
from drivetrain.strategy.profile.tracker import Event, MemoryTimeline

BLOCKS_RUN = 4
"""The first and the last may differ from the others; the two between them must not."""


def shortened_container(model: nn.Module, groups: Sequence[BlockGroup]) -> nn.ModuleList | nn.Sequential | None:
    """Return the list that holds all repeated blocks and nothing else, if they are of one shape; None where there is no such list."""
    families = find_cuttable(model, groups)
    if len(families) != 1 or sum(group.repeats for group in groups) != 1:
        return None
    container = model.get_submodule(families[0].container)
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) != len(families[0].names):
        return None
    return container


@contextmanager
def with_depth(container: nn.Module, depth: int) -> Iterator[None]:
    """Leave only the first blocks of a list for a while."""
    blocks = dict(container._modules)
    for name in list(blocks)[depth:]:
        del container._modules[name]
    try:
        yield
    finally:
        container._modules.clear()
        container._modules.update(blocks)


class BlockMarks:
    """Where in a timeline each of four blocks begins, forward and backward."""

    def __init__(self, timeline: MemoryTimeline, blocks: Sequence[nn.Module]):
        self._timeline = timeline
        self.forward: list[int] = []
        self.backward: list[int] = []
        """In the order in which they happen: the last block first."""
        self._handles = [block.register_forward_pre_hook(self._enter) for block in blocks]
        self._handles += [block.register_forward_hook(self._leave) for block in blocks]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.forward.append(len(self._timeline.events))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._return_to)
                break

    def _return_to(self, gradient: Tensor) -> None:
        self.backward.append(len(self._timeline.events))

    def remove(self) -> None:
        """Take the hooks off the blocks."""
        for handle in self._handles:
            handle.remove()


class DeeperTimeline:
    """The timeline of four blocks as it would be with `more` of them between the second and the third."""

    def __init__(self, timeline: MemoryTimeline, marks: BlockMarks, more: int):
        self.events, self._labels, self._more = timeline.events, timeline.labels, more
        self._second = range(*marks.forward[1:3])
        self._third = range(*marks.forward[2:4])
        self._third_back = range(*marks.backward[1:3])
        self._second_back = range(*marks.backward[2:4])

    @staticmethod
    def made_of(timeline: MemoryTimeline, marks: BlockMarks, more: int) -> "DeeperTimeline | None":
        """Return the timeline with more blocks, or None where the two in the middle do not allocate alike."""
        if len(marks.forward) != BLOCKS_RUN or len(marks.backward) != BLOCKS_RUN:
            return None
        deeper = DeeperTimeline(timeline, marks, more)
        is_alike = deeper._sizes(deeper._second) == deeper._sizes(deeper._third)
        is_alike = is_alike and deeper._sizes(deeper._third_back) == deeper._sizes(deeper._second_back)
        return deeper if is_alike and all(a <= b for a, b in pairwise(marks.forward + marks.backward)) else None

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

    def _with_repeated(self) -> Iterator[tuple[Event, dict[int, int]]]:
        """Yield each event with the storages, by key, that every further block holds at that moment."""
        kept = self._alive(self._third.stop, self._second)
        left = self._alive(self._second_back.stop, self._third, self._third_back)
        held: dict[int, int] = {}
        left_held: dict[int, int] = {}
        for index, event in enumerate(self.events):
            if event.size < 0:
                left_held.pop(event.key, None)
                if index not in self._third_back:  # there only the block next to the third one gives something back
                    held.pop(event.key, None)
            elif event.key in kept:
                held[event.key] = event.size
            elif event.key in left:
                left_held[event.key] = event.size
            if index < self._second.stop:
                yield event, {}
            else:
                yield event, (held if index < self._second_back.start else left_held)

    def totals(self) -> list[int]:
        """Return the bytes in use after each event."""
        total, totals = 0, []
        for event, repeated in self._with_repeated():
            total += event.size
            totals.append(total + self._more * sum(repeated.values()))
        return totals

    def parts_at(self, index: int) -> dict[str, int]:
        """Return the bytes in use after an event, by label."""
        parts: dict[str, int] = defaultdict(int)
        for place, (event, repeated) in enumerate(self._with_repeated()):
            parts[self._labels[event.key]] += event.size
            if place == index:
                for key, size in repeated.items():
                    parts[self._labels[key]] += self._more * size
                break
        return dict(parts)
