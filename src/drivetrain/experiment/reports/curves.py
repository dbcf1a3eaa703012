"""The metrics of a run as a page draws them: curves of few points. A long run needs no more memory than a short one.

A curve keeps the smallest, the largest and the mean value of each stretch of rows. When it has too many stretches, each two become
one. So every spike stays where it was, and a moving mean is that of all values.
"""

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from drivetrain.experiment.summaries import MetricsSummary, TagSummary, finite_only

MOST_POINTS = 2000
"""Points of one curve; up to so many values it is exact."""
MOST_HISTOGRAMS, MOST_BINS = 60, 2048
"""Histograms of one tag, and counts of one histogram."""
MOST_KNOTS = 512
"""Pairs of step and time of a run."""
LONGEST_TEXT = 20_000
EXACT_IN_FLOAT = 1e-3
"""Values whose range is a smaller share of their size are written as doubles."""


class CurveSegment(NamedTuple):
    """What is kept of some consecutive values; `low` is infinite where none is finite."""

    low: float
    low_step: int
    high: float
    high_step: int
    total: float
    num_finite: int
    bad_step: int | None
    """The first step with a value that is not finite."""

    @property
    def mean(self) -> float:
        """The mean of the finite values; the middle of the range where their sum is too large for a float."""
        return self.total / self.num_finite if math.isfinite(self.total) else self.low / 2 + self.high / 2

    def joined(self, other: "CurveSegment") -> "CurveSegment":
        """Return this stretch and the next one as one."""
        low, high = (self if self.low <= other.low else other), (self if self.high >= other.high else other)
        return CurveSegment(
            low.low,
            low.low_step,
            high.high,
            high.high_step,
            self.total + other.total,
            self.num_finite + other.num_finite,
            other.bad_step if self.bad_step is None else self.bad_step,
        )


def make_segment(steps: Sequence[int], values: Sequence[float]) -> CurveSegment:
    """Return what is kept of consecutive values, at least one."""
    finite_steps, finite = finite_only(steps, values)
    bad = None
    if len(finite) < len(values):
        bad = next(step for step, value in zip(steps, values) if not math.isfinite(value))
        if not finite:
            return CurveSegment(math.inf, steps[0], -math.inf, steps[0], 0.0, 0, bad)
    low, high = min(finite), max(finite)
    low_step, high_step = finite_steps[finite.index(low)], finite_steps[finite.index(high)]
    return CurveSegment(low, low_step, high, high_step, sum(finite), len(finite), bad)


class Curve(TagSummary):
    """One metric: its summary, and at most about `MOST_POINTS` points."""

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[CurveSegment] = []
        self.size = 1
        """Values in each stretch but the last."""
        self._missing = 0  # values that the last stretch still takes
        self.bad_step: int | None = None
        """The first step with a value that is not finite."""
        self.is_ordered = True
        """No value was recorded at an earlier step than the one before it."""

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take the next values, at least one."""
        before = self.last_step if self.count else steps[0]
        super().extend(steps, values)
        if self.is_ordered:
            self.is_ordered = before <= steps[0] and all(map(int.__le__, steps, steps[1:]))
        place = 0
        while place < len(values):
            end = place + (self._missing or self.size)
            stretch = make_segment(steps[place:end], values[place:end])
            if self.bad_step is None:
                self.bad_step = stretch.bad_step
            left = max(0, end - len(values))
            if self._missing:
                self.stretches[-1] = self.stretches[-1].joined(stretch)
            else:
                self.stretches.append(stretch)
            self._missing, place = left, end
            if len(self.stretches) * (1 if self.size == 1 else 2) > MOST_POINTS:
                while len(self.stretches) * 2 > MOST_POINTS:
                    if len(self.stretches) % 2:  # the last one gets no partner yet
                        self._missing += self.size
                    self.stretches, self.size = halved(self.stretches), self.size * 2

    def as_data(self, most: int = MOST_POINTS) -> dict[str, Any]:
        """Return the curve for the page: base64 of `x` and `y`, of the means of each pair of points (`m`) if values are left out."""
        stretches, size = self.stretches, self.size
        while len(stretches) * (1 if size == 1 else 2) > max(most, 4):
            stretches, size = halved(stretches), size * 2
        full = [stretch for stretch in stretches if stretch.num_finite]
        gaps = [stretch.bad_step for stretch in stretches if stretch.bad_step is not None]
        found: dict[str, Any] = {"n": self.count}
        if size == 1:
            points = [(stretch.low_step, stretch.low) for stretch in full]
        else:
            pairs = [((stretch.low_step, stretch.low), (stretch.high_step, stretch.high)) for stretch in full]
            points = [point for pair in pairs for point in sorted(pair, key=itemgetter(0))]
            if self.is_ordered:
                found["m"] = encode([stretch.mean for stretch in full])
        if not self.is_ordered:
            points.sort(key=itemgetter(0))
        found |= {"x": encode([step for step, _ in points]), "y": encode([value for _, value in points])}
        if gaps:
            found["gaps"] = sorted(gaps)
        return found


def halved(stretches: Sequence[CurveSegment]) -> list[CurveSegment]:
    """Return stretches of twice the size."""
    pairs = [one.joined(two) for one, two in zip(stretches[::2], stretches[1::2])]
    return pairs + list(stretches[-1:]) if len(stretches) % 2 else pairs


def encode(values: Sequence[float]) -> str:
    """Return numbers as base64 of little-endian bytes after a letter for their type: whole numbers `u`, floats `f`, doubles `d`.

    >>> encode([0, 1, 2])
    'uAAAAAAEAAAACAAAA'
    """
    low, high = min(values, default=0), max(values, default=0)
    size = max(abs(low), abs(high))
    if all(type(value) is int for value in values) and low >= 0 and high < 2**32:
        kind, code = "u", "I"
    elif 1e-30 < size < 1e30 and (high - low) >= EXACT_IN_FLOAT * size:
        kind, code = "f", "f"
    else:
        kind, code = "d", "d"
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return kind + b64encode(numbers.tobytes()).decode()


@dataclass
class MetricsCurves(MetricsSummary):
    """A metrics file as a page shows it: curves, histograms, texts and results."""

    texts: dict[str, str] = field(default_factory=dict)
    histograms: dict[str, "DownsampledSequence"] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    """What was recorded as summary of the run."""
    clock: "DownsampledSequence" = field(default_factory=lambda: DownsampledSequence(MOST_KNOTS))
    """Pairs of step and time."""
    kind = Curve

    @property
    def curves(self) -> dict[str, Curve]:
        """The curve of each metric."""
        return {tag: curve for tag, curve in self.tags.items() if isinstance(curve, Curve)}

    def add_row(self, row: Mapping[str, Any]) -> None:
        super().add_row(row)
        kind, tag, value, time = row["kind"], row["tag"], row["value"], row.get("time")
        if kind == "text":
            self.texts[tag] = str(value)[:LONGEST_TEXT]
        elif kind == "summary" and isinstance(value, dict):
            self.results |= value
        elif kind == "histogram" and is_histogram(value):
            if tag not in self.histograms:
                self.histograms[tag] = DownsampledSequence(MOST_HISTOGRAMS)
            kept = {name: value[name] for name in ("low", "high", "counts")}
            self.histograms[tag].extend([{"step": row["step"]} | kept])
        elif kind == "scalar" and isinstance(time, int | float) and math.isfinite(time):
            self.clock.extend([(row["step"], time)])

    def add_scalars(self, found: Sequence[tuple[bytes, bytes, bytes, bytes]]) -> bool:
        is_taken = super().add_scalars(found)
        if is_taken:
            self.clock.extend(found)
        return is_taken

    @property
    def knots(self) -> list[tuple[int, float]]:
        """Pairs of step and time, in order; between them time is as good as linear."""
        return sorted((int(entry[0]), float(entry[1])) for entry in self.clock.entries)


class DownsampledSequence:
    """A sequence of which at most about `2 * most` evenly spaced entries and the last one are kept."""

    def __init__(self, most: int):
        self._most, self._stride, self._next = most, 1, 0
        self._kept: list[Any] = []
        self._last: Any = None

    def extend(self, entries: Sequence[Any]) -> None:
        """Take the next entries, at least one."""
        place, self._last = self._next, entries[-1]
        while place < len(entries):
            self._kept.append(entries[place])
            if len(self._kept) > 2 * self._most:
                self._kept, self._stride = self._kept[::2], self._stride * 2
            place += self._stride
        self._next = place - len(entries)

    @property
    def entries(self) -> list[Any]:
        """The entries that are kept."""
        return self._kept if self._last is None or self._kept[-1] is self._last else [*self._kept, self._last]


def is_histogram(value: object) -> bool:
    """Return whether a recorded value is a histogram that can be drawn.

    >>> is_histogram({"low": 0.0, "high": 1.0, "counts": [1, 2]}), is_histogram({"low": "nan", "high": 1.0, "counts": []})
    (True, False)
    """
    if not isinstance(value, dict) or not isinstance(value.get("counts"), list):
        return False
    counts, low, high = value["counts"], value.get("low", math.nan), value.get("high", math.nan)
    if not all(
        isinstance(number, int | float) and math.isfinite(number) for number in (*counts[:MOST_BINS], low, high)
    ):
        return False
    return 0 < len(counts) <= MOST_BINS and min(counts) >= 0 and low < high
