"""`metrics.jsonl`: everything that was recorded, one object a line, the reader for it, and `scalars.csv`, its view for spreadsheets.

The file only grows. After a resume a line of the kind `resume` says from where rows are recorded again, and readers drop what
it supersedes; so a killed run shows one history, and nothing that was ever written is lost. JSON has no NaN and no infinity: they
are the strings "nan", "inf" and "-inf".
"""

import csv
import errno
import io
import json
import math
import os
import time as clock
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, BinaryIO

from drivetrain.core.display import spreadsheet_cell
from drivetrain.core.errors import StateError
from drivetrain.core.files import atomic_write, load_json, make_inner_folder, open_regular, open_to_read, replace_bytes
from drivetrain.core.plain import spelled
from drivetrain.core.types import Settings

if TYPE_CHECKING:
    from drivetrain.record.buffer import Histogram
    from drivetrain.record.images import Picture
    from drivetrain.record.sink import Resume


class FileSink:
    """Appends waiting lines to a regular file, never through a link. A subclass opens it.

    The file grows by whole blocks. A full disk must not leave half a line in the middle of a file that goes on when there is space again,
    and a process killed while writing leaves half a line only at the end, which the next writer cuts off.
    """

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._file: int | None = None
        self._size = self._lines = 0

    def _open(self, path: Path, mode: int = 0o666) -> None:
        file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
        try:
            self._size, self._lines = _measured(path)
            os.ftruncate(file, self._size)
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def flush(self, durable: bool = False) -> None:
        """Write what is waiting, all of it or nothing; `durable` waits until the disk has it."""
        if self._file is None or not self._waiting:
            return
        block = "".join(self._waiting).encode()
        try:
            done = 0
            while done < len(block):
                done += os.write(self._file, block[done:])
            if durable:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(block)
        self._lines += len(self._waiting)
        self._waiting.clear()  # what could not be written waits for the next time

    def close(self) -> None:
        """Write what is waiting and close the file."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = None


def _measured(path: Path) -> tuple[int, int]:
    """Return the size of a file up to its last line end, and the number of lines."""
    size = lines = position = 0
    with open_to_read(path) as file:
        while block := file.read(1 << 20):
            lines += block.count(b"\n")
            end = block.rfind(b"\n")
            if end >= 0:
                size = position + end + 1
            position += len(block)
    return size, lines


FILE_NAME = "metrics.jsonl"
METRICS_LIMIT = 2 * 2**30
"""Bytes that are read unless the caller sets another limit; about ten million rows."""


class JsonlSink(FileSink):
    """Writes `metrics.jsonl`."""

    def __init__(self) -> None:
        super().__init__()
        self._tags: dict[str, str] = {}

    @property
    def lines(self) -> int | None:
        """How many lines have been written, None while the file is closed."""
        return None if self._file is None else self._lines

    def open(self, folder: Path, resume: "Resume | None") -> None:
        """Open the file for appending; a resume adds a line."""
        self._open(folder / FILE_NAME)
        if resume is not None:
            line: dict[str, object] = {"kind": "resume", "step": resume.step, "time": round(clock.time(), 3)}
            if resume.lines is not None:
                line["lines"] = resume.lines
            self._waiting.append(json.dumps(line) + "\n")
            self.flush()

    def scalar(self, tag: str, value: float, step: int, time: float) -> None:
        """Take one number."""
        if tag not in self._tags:
            self._tags[tag] = json.dumps(tag)
        # What json.dumps would write, at a third of its price.
        number = repr(value) if math.isfinite(value) else f'"{value}"'
        self._waiting.append(
            f'{{"step": {step}, "time": {time:.3f}, "kind": "scalar", "tag": {self._tags[tag]}, "value": {number}}}\n'
        )

    def _add(self, kind: str, tag: str, value: object, step: int, time: float) -> None:
        row = {"step": step, "time": round(time, 3), "kind": kind, "tag": tag, "value": spelled(value)}
        self._waiting.append(json.dumps(row, allow_nan=False) + "\n")

    text = partialmethod(_add, "text")
    direction = partialmethod(_add, "direction")
    params = partialmethod(_add, "params", "params")
    summary = partialmethod(_add, "summary", "summary")

    def _add_path(self, kind: str, tag: str, picture: "Picture", step: int, time: float) -> None:
        self._add(kind, tag, picture.path, step, time)

    image = partialmethod(_add_path, "image")
    figure = partialmethod(_add_path, "figure")

    def histogram(self, tag: str, histogram: "Histogram", step: int, time: float) -> None:
        """Take a histogram."""
        counted = {name: getattr(histogram, name) for name in ("low", "high", "counts", "nonfinite")}
        self._add("histogram", tag, counted, step, time)


def read_metrics(
    path: str | os.PathLike[str], *, kind: str | None = None, tag: str | None = None, limit: int | None = METRICS_LIMIT
) -> list[Settings]:
    """Return the rows of a `metrics.jsonl`, or of the folder that holds it, in the order of recording.

    Rows that a resume superseded and an incomplete last line are skipped. A row has `step`, `time`, `kind`,
    `tag` and `value`; with `kind` or `tag` only matching rows are returned. A file of more than `limit` bytes is an `OSError`.
    """
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    with open_to_read(file) as stream:
        if limit is not None and os.fstat(stream.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"the file is larger than {limit:,} bytes, so it is not read", str(file))
    return [row for row in iterate_metrics(file) if kind in (None, row["kind"]) and tag in (None, row["tag"])]


def iterate_metrics(file: Path) -> Iterator[Settings]:
    """Yield the rows of a `metrics.jsonl` that no resume superseded, one at a time: a long file needs no more memory than a short one."""
    with open_to_read(file) as stream:
        size = os.fstat(stream.fileno()).st_size  # rows that are added while it is read are left out
        resumes = find_resumes(stream, file, size)
        for number, block in whole_blocks(stream, size):
            yield from rows_of(block, number, resumes, file)


BLOCK = 2**16
"""Bytes that are read at a time."""
ResumeLine = tuple[int, int, int | None]
"""The number of a line that marks a resume, its step, and how many lines before it count."""


def whole_blocks(stream: BinaryIO, size: int, start: int = 0, number: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines up to `size` bytes, with the number of the first; a last line that was cut short is left out.

    `start` is where to begin, which is line `number`.
    """
    stream.seek(start)
    left, pieces = size - start, list[bytes]()
    while left > 0 and (part := stream.read(min(BLOCK, left))):
        left -= len(part)
        cut = part.rfind(b"\n") + 1
        pieces.append(part[:cut] if cut else part)
        if cut:
            block = b"".join(pieces)
            yield number, block
            number += block.count(b"\n")
            pieces = [part[cut:]]


def find_resumes(stream: BinaryIO, file: Path, size: int, start: int = 0, number: int = 0) -> list[ResumeLine]:
    """Return the resumes in whole lines, without those in lines that a later one supersedes."""
    found: list[ResumeLine] = []
    for first, block in whole_blocks(stream, size, start, number):
        if b'"resume"' in block:
            for place, line in enumerate(block[:-1].split(b"\n"), start=first):
                if b'"resume"' in line and (row := parse_row(line, file, place))["kind"] == "resume":
                    found.append((place, row["step"], row.get("lines")))
    valid, end = list[ResumeLine](), math.inf
    for place, step, lines in reversed(found):
        if place < end:
            valid.insert(0, (place, step, lines))
            end = end if lines is None else min(end, lines)
    return valid


def rows_of(block: bytes, number: int, resumes: list[ResumeLine], file: Path) -> Iterator[Settings]:
    """Yield the rows of whole lines that no resume superseded; those that have been passed are removed from `resumes`."""
    for place, line in enumerate(block[:-1].split(b"\n"), start=number):
        row = parse_row(line, file, place)
        if row["kind"] == "resume":
            resumes[:] = [later for later in resumes if later[0] > place]
        elif not any(row["step"] >= step if lines is None else place >= lines for _, step, lines in resumes):
            yield row  # else it was recorded again after that resume


def parse_row(line: bytes, file: Path, number: int) -> Settings:
    """Return the row in one line of a metrics file; a line that is not one is a `StateError` with its number, counted from 0."""
    try:
        row = load_json(line)
        kind = row["kind"]
        if type(row["step"]) is not int or not isinstance(kind, str):
            raise TypeError
        if kind == "resume":
            if type(row.get("lines", 0)) is not int:
                raise TypeError
        elif not isinstance(row["tag"], str) or "value" not in row:
            raise TypeError
        elif kind == "scalar":
            value = float(row["value"])
            if isinstance(row["value"], str):
                row["value"] = value
    except (ValueError, KeyError, TypeError, OverflowError):
        raise StateError(
            f"{file}, line {number + 1}: {line[:80]!r} is not a row of metrics. Expected an object with step, kind, tag and value; "
            "remove the line to read the others."
        ) from None
    return row


TABLE_NAME = "scalars.csv"
COLUMNS = ("step", "time", "tag", "value")


class CsvSink(FileSink):
    """Writes `scalars.csv`, and the PNG files of images and figures.

    After a resume the table is written again from the rows that remain, so it never shows a step twice. A tag that a spreadsheet would
    take for a formula has an apostrophe in front of it here, and only here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None
        self._writer = csv.writer(SimpleNamespace(write=self._waiting.append))

    def open(self, folder: Path, resume: "Resume | None") -> None:
        """Open the table for appending, after a resume without the rows that are recorded again."""
        self._folder, path = folder, folder / TABLE_NAME
        if resume is not None:
            with atomic_write(path) as stream:
                file = io.TextIOWrapper(stream, encoding="utf-8", newline="")
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                writer.writerows(
                    [spreadsheet_cell(row[column]) for column in COLUMNS]
                    for row in iterate_metrics(folder / FILE_NAME)
                    if row["kind"] == "scalar"
                )
                file.flush()
                file.detach()  # `atomic_write` closes the stream beneath it
        self._open(path)
        if self._lines == 0:
            self._writer.writerow(COLUMNS)

    def scalar(self, tag: str, value: float, step: int, time: float) -> None:
        """Take one number."""
        self._writer.writerow((step, round(time, 3), spreadsheet_cell(tag), value))

    def image(self, tag: str, picture: "Picture", step: int, time: float) -> None:
        """Write a PNG file."""
        assert self._folder is not None and picture.path is not None
        path = self._folder / picture.path
        make_inner_folder(self._folder, path.parent)
        replace_bytes(path, picture.png, durable=False)

    figure = image
