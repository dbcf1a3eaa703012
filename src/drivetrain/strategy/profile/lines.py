"""Straight lines through two batch sizes, and the upper edge of many of them."""

from collections.abc import Sequence

from drivetrain.strategy.profile.depth import DeeperTimeline
from drivetrain.strategy.profile.tracker import MemoryTimeline

Line = tuple[float, float]
"""Fixed part and part per sample."""


def line_through(sizes: Sequence[int], values: Sequence[float]) -> Line:
    """Return the line through two points.

    >>> line_through((2, 4), (10.0, 16.0))
    (4.0, 3.0)
    """
    each = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[0] - sizes[0] * each, each


def upper_edge(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that are the highest somewhere from one sample upwards, flattest first.

    >>> upper_edge([(10.0, 1.0), (0.0, 2.0), (5.0, 1.0), (4.0, 1.4)])
    [(10.0, 1.0), (0.0, 2.0)]
    """
    edge: list[Line] = []
    for line in sorted(set(lines), key=lambda line: (line[1], line[0])):
        if edge and edge[-1][1] == line[1]:
            edge.pop()
        while edge and edge[-1][0] + edge[-1][1] <= line[0] + line[1]:
            edge.pop()  # lower at one sample already, and flatter
        while len(edge) > 1 and _crossing(edge[-2], line) <= _crossing(edge[-2], edge[-1]):
            edge.pop()
        edge.append(line)
    return edge


def _crossing(flat: Line, steep: Line) -> float:
    return (flat[0] - steep[0]) / (steep[1] - flat[1])


def steepest(lines: Sequence[Line]) -> Line:
    """Return the line that wins for large batches."""
    return max(lines, key=lambda line: line[1])


def upper_lines(
    sizes: Sequence[int], timelines: Sequence[MemoryTimeline | DeeperTimeline]
) -> tuple[list[Line], dict[str, Line]]:
    """Return the moments of a step that can be its peak, as lines in the batch size, and the steepest one by category.

    Runs that did not allocate in the same order give one line through their peaks, and no categories.
    """
    moments = [
        [(index, total) for index, total in enumerate(timeline.totals()) if timeline.events[index].size > 0]
        for timeline in timelines
    ]
    if len(moments[0]) != len(moments[1]):
        return [line_through(sizes, [max(total for _, total in each) for each in moments])], {}
    lines = [line_through(sizes, [small, large]) for (_, small), (_, large) in zip(*moments)]
    edge = upper_edge(lines)
    place = lines.index(steepest(edge))
    small, large = (timeline.parts_at(each[place][0]) for timeline, each in zip(timelines, moments))
    parts = {name: line_through(sizes, [small.get(name, 0), large.get(name, 0)]) for name in {*small, *large}}
    return edge, parts
