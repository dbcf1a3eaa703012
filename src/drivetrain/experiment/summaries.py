"""A metrics file in a few numbers: count, last, smallest and largest value of each metric, kept in a small file next to it.

Listing hundreds of long runs must not read all their rows. A run writes its summary when it ends. A reader that finds none, or that of a
shorter file, reads the rows that were added since, and writes it. The summary can always be removed. `read_added` does the reading,
also for what keeps more of each metric (`reports.curves`).
"""

import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

from drivetrain.core.errors import StateError
from drivetrain.core.files import open_to_read
from drivetrain.experiment.directions import direction_of
from drivetrain.experiment.run_folder import read_json, write_text
from drivetrain.record.jsonl import find_resumes, rows_of, whole_blocks

FILE_NAME = "metrics.summary.json"
SCHEMA = 1
TAIL = 256
"""Bytes before the end of what was read that are compared, to notice that another file has taken its place."""
ROW = re.compile(
    rb'^\{"step": (\d{1,15}), "time": (\d{1,15}\.\d{3}), "kind": "scalar", "tag": ("[^"\n]*"), '
    rb'"value": (-?\d{1,18}(?:\.\d{1,30})?(?:e[-+]\d{1,3})?|"nan"|"-?inf")\}$',
    re.MULTILINE,
)
"""A scalar as the Recorder writes it, which is nearly every row; other rows are read as JSON."""


@dataclass
class TagSummary:
    """What is known of one metric."""

    count: int = 0
    last: float = math.nan
    last_step: int = 0
    low: float = math.inf
    low_step: int | None = None
    high: float = -math.inf
    high_step: int | None = None

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take the next values, at least one; the extremes are of finite values only, and of equal ones the first counts."""
        self.count += len(values)
        self.last, self.last_step = values[-1], steps[-1]
        steps, values = finite_only(steps, values)
        if not values:
            return
        low, high = min(values), max(values)
        if low < self.low:
            self.low, self.low_step = low, steps[values.index(low)]
        if high > self.high:
            self.high, self.high_step = high, steps[values.index(high)]

    def best(self, tag: str, directions: Mapping[str, str] | None = None) -> tuple[float | None, int | None]:
        """Return the best value and its step; None where the direction is unknown, the last value where none is finite."""
        good = direction_of(tag, directions)
        if good is None:
            return None, None
        value, step = (self.low, self.low_step) if good == "min" else (self.high, self.high_step)
        return (self.last, self.last_step) if step is None else (value, step)


def finite_only(steps: Sequence[int], values: Sequence[float]) -> tuple[Sequence[int], Sequence[float]]:
    """Return the finite values and their steps; where all are, as usual, that costs one sum."""
    if math.isfinite(sum(values)):
        return steps, values
    kept = [(step, value) for step, value in zip(steps, values) if math.isfinite(value)]
    return [step for step, _ in kept], [value for _, value in kept]


@dataclass
class MetricsSummary:
    """A metrics file in a few numbers. Subclasses keep more of each metric."""

    tags: dict[str, TagSummary] = field(default_factory=dict)
    directions: dict[str, str] = field(default_factory=dict)
    """Declared with the Recorder."""
    lines: int = 0
    end: int = 0
    """Bytes of the whole lines that were read."""
    tail: int = 0
    size: int = 0
    modified: int = 0
    """Size and modification time, in nanoseconds, of the file when it was read."""

    kind: ClassVar[type[TagSummary]] = TagSummary
    """What is kept of each metric."""

    def metric(self, tag: str) -> TagSummary:
        """Return what is known of a metric; one that was not met before begins here."""
        if tag not in self.tags:
            self.tags[tag] = self.kind()
        return self.tags[tag]

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Take one row of any kind."""
        kind, tag, value = row["kind"], row["tag"], row["value"]
        if kind == "scalar" and isinstance(value, int | float):
            self.metric(tag).extend([row["step"]], [float(value)])
        elif kind == "direction" and value in ("min", "max"):
            self.directions[tag] = value

    def add_scalars(self, found: Sequence[tuple[bytes, bytes, bytes, bytes]]) -> bool:
        """Take rows that `ROW` matched; False, and nothing is taken, where tags must be read one by one."""
        rows: dict[bytes, tuple[list[int], list[float]]] = {}
        for step, _, raw, value in found:
            own = rows.get(raw)
            if own is None:
                own = rows[raw] = ([], [])
            own[0].append(int(step))
            own[1].append(float(value if value[:1] != b'"' else value.strip(b'"')))
        try:
            tags = {raw: json.loads(raw.decode()) for raw in rows}
        except ValueError:
            return False
        if len(set(tags.values())) < len(tags):  # one tag in two spellings: the order of its rows counts
            return False
        for raw, (steps, values) in rows.items():
            self.metric(tags[raw]).extend(steps, values)
        return True

    def advance(self, num_lines: int, num_bytes: int) -> None:
        """Count what was read."""
        self.lines, self.end = self.lines + num_lines, self.end + num_bytes

    def finish(self, tail: int, facts: os.stat_result) -> None:
        """Note the state of the file that was read."""
        self.tail, self.size, self.modified = tail, facts.st_size, facts.st_mtime_ns


Summary = TypeVar("Summary", bound=MetricsSummary)


def summarize_metrics(file: Path) -> MetricsSummary:
    """Return the summary of a metrics file. It reads only rows that were added since the last time.

    A missing file is an `OSError`, a damaged one a `StateError`, as for `read_metrics`.
    """
    known = _stored(file)
    before = (known.size, known.modified)
    summary = read_added(known, file)
    if (summary.size, summary.modified) != before:
        _store(summary, file)
    return summary


def read_added(known: Summary, file: Path) -> Summary:
    """Add the rows that a metrics file has got since `known` was read. Where earlier rows no longer count, begin again."""
    with open_to_read(file) as stream:
        facts = os.fstat(stream.fileno())
        if (known.size, known.modified) == (facts.st_size, facts.st_mtime_ns):
            return known
        grew = known.size < facts.st_size and _tail(stream, known.end) == known.tail
        summary = _extended(known if grew else type(known)(), stream, facts.st_size, file)
        summary.finish(_tail(stream, summary.end), facts)
    return summary


def _extended(summary: Summary, stream: BinaryIO, size: int, file: Path) -> Summary:
    """Add the rows after what the summary has; a resume that supersedes rows it has makes it begin again."""
    resumes = find_resumes(stream, file, size, summary.end, summary.lines)
    if any(lines is None or lines < summary.lines for _, _, lines in resumes):
        summary = type(summary)()
        resumes = find_resumes(stream, file, size)
    for number, block in whole_blocks(stream, size, summary.end, summary.lines):
        found = [] if resumes else ROW.findall(block)
        num_lines = block.count(b"\n")
        if len(found) != num_lines or not summary.add_scalars(found):
            for row in rows_of(block, number, resumes, file):
                summary.add_row(row)
        summary.advance(num_lines, len(block))
    return summary


def _tail(stream: BinaryIO, end: int) -> int:
    stream.seek(max(0, end - TAIL))
    return zlib.crc32(stream.read(min(TAIL, end)))


def _stored(file: Path) -> MetricsSummary:
    """Return the summary next to a metrics file; an empty one where there is none that can be used."""
    data = read_json(file.with_name(FILE_NAME))
    try:
        if data.pop("schema") != SCHEMA:
            return MetricsSummary()
        tags = {tag: TagSummary(*_checked(values)) for tag, values in data.pop("tags").items()}
        directions = {name: good for name, good in data.pop("directions").items() if good in ("min", "max")}
        numbers = {name: _whole(data[name]) for name in ("lines", "end", "tail", "size", "modified")}
        return MetricsSummary(tags=tags, directions=directions, **numbers)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return MetricsSummary()


def _checked(values: list[Any]) -> tuple[int, float, int, float, int | None, float, int | None]:
    count, last, last_step, low, low_step, high, high_step = values
    steps = [None if step is None else _whole(step) for step in (low_step, high_step)]
    return _whole(count), float(last), _whole(last_step), float(low), steps[0], float(high), steps[1]


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _store(summary: MetricsSummary, file: Path) -> None:
    def spelled(value: float | None) -> object:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    data = {"schema": SCHEMA} | vars(summary)
    data["tags"] = {tag: [spelled(value) for value in vars(own).values()] for tag, own in summary.tags.items()}
    with suppress(OSError):  # somebody else's run, or a full disk: it is read again the next time
        write_text(file.with_name(FILE_NAME), json.dumps(data) + "\n")


def summary_of(file: Path) -> MetricsSummary:
    """Return the summary of a metrics file; an empty one where the file is missing or damaged."""
    try:
        return summarize_metrics(file)
    except (OSError, StateError):
        return MetricsSummary()
