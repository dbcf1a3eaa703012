"""Text for people: made safe for terminals and spreadsheets; sizes, durations and curves in one form for logs, errors and tables.

A terminal executes escape sequences: they move the cursor, rewrite lines that were printed before and set the window's title. Marks
that turn the direction of writing make a name read as another. A spreadsheet computes a cell that begins like a formula.
"""

import logging
import math
import re
import sys
from collections.abc import Sequence
from typing import ClassVar, TextIO

logger = logging.getLogger(__name__)

_HIDDEN = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 without the tab, DEL, C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"  # line ends and direction marks, characters without width
    "\ud800-\udfff\U000e0000-\U000e007f]"  # halves of characters, invisible tags
)
_LINES = re.compile("\r\n|\n")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")


def printable(text: str) -> str:
    r"""Return a text on one line, with characters that a terminal executes or hides written as escapes.

    >>> printable("loss\x1b[2J\nok")
    'loss\\x1b[2J\\nok'
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


class SafeOutput:
    """A stream that drops what cannot be written, and warns about it once, so that a run outlives the terminal, pipe or disk of its log.

    Characters that the encoding of the stream lacks are written as escapes.
    """

    lost: ClassVar[set[str]] = set()
    """Names of streams that could not be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text if possible."""
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:  # which calls every code page "charmap"
                encoding = getattr(self._stream, "encoding", None) or "ascii"
                return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:
            return self._drop(error, len(text))

    def flush(self) -> None:
        """Flush the stream if possible."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: Exception, length: int = 0) -> int:
        name = getattr(self._stream, "name", None)
        name = name if isinstance(name, str) else "the output"
        if name not in SafeOutput.lost:
            SafeOutput.lost.add(name)
            logger.warning("%s cannot be written (%s), so lines are lost. This process continues.", name, error)
        return length


def print_if_possible(
    *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print like `print` to a `SafeOutput`."""
    stream = sys.stdout if file is None else file
    if stream is not None:  # a process without a console has none
        print(*values, sep=sep, end=end, file=SafeOutput(stream), flush=flush)


def shortened(text: str, length: int) -> str:
    """Return at most so many characters of a text.

    >>> shortened("accuracy", 5), shortened("loss", 5)
    ('accu…', 'loss')
    """
    return text if len(text) <= length else text[: length - 1] + "…"


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Return rows of cells as lines in which each column is as wide as its widest cell.

    >>> aligned([("lr", "0.1"), ("momentum", "0.9")])
    ['lr        0.1', 'momentum  0.9']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [gap.join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


def printable_lines(text: str) -> str:
    """Return a text of several lines with each line made `printable`."""
    return "\n".join(printable(line) for line in _LINES.split(text))


def printable_json(text: str) -> str:
    r"""Return JSON text in which such characters are JSON escapes, so that it means the same; line ends stay.

    >>> printable_json('"a\u202e"')
    '"a\\u202e"'
    """
    return "\n".join(_HIDDEN.sub(_json_escape, line) for line in text.split("\n"))


def spreadsheet_cell(value: object) -> str | int | float | None:
    """Return a value for a CSV file: text that a spreadsheet would compute gets an apostrophe in front, numbers stay numbers.

    >>> spreadsheet_cell("=1+1"), spreadsheet_cell(-0.5), spreadsheet_cell("-0.5"), spreadsheet_cell("-loss")
    ("'=1+1", -0.5, '-0.5', "'-loss")
    """
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return "'" + text
    return text if text[0] in "+-" else "'" + text


def _json_escape(found: re.Match[str]) -> str:
    pair = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{pair[place : place + 2].hex()}" for place in range(0, len(pair), 2))


_BARS = "▁▂▃▄▅▆▇█"
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BY_FOLDED = {unit.casefold(): factor for unit, factor in _SIZES.items()}
SIZE_UNITS = tuple(filter(None, _SIZES))
"""The units that `parse_size` reads, in any case."""


def format_bytes(size: float) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> format_bytes(103.1 * 2**30), format_bytes(3 * 2**20), format_bytes(512)
    ('103.1 GiB', '3.0 MiB', '512 B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= _SIZES[unit]:
            return f"{size / _SIZES[unit]:.1f} {unit}"
    return f"{size:.4g} B"


def parse_size(text: str) -> int | None:
    """Return the bytes that a text such as "80GiB" stands for, or None if it is not a size.

    >>> parse_size("1.5 KiB"), parse_size("2 GB"), parse_size("much")
    (1536, 2000000000, None)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    factor = None if found is None else _BY_FOLDED.get(found[2].casefold())
    size = math.inf if found is None or factor is None else float(found[1]) * factor
    return int(size) if size < 1e300 else None


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that suits it, or in two of them from a minute on.

    >>> format_duration(0.0125), format_duration(3.21), format_duration(75), format_duration(7260)
    ('12.5 ms', '3.21 s', '1 min 15 s', '2 h 1 min')
    """
    for (size, unit), (smaller, smaller_unit) in (
        ((86400, "d"), (3600, "h")),
        ((3600, "h"), (60, "min")),
        ((60, "min"), (1, "s")),
    ):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {smaller_unit}"
    if seconds >= 1 or seconds <= 0:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} µs"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the finite values of a curve as one line of bars, at most `width` of them.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▅▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, reach = min(finite), max(finite) - min(finite)
    if len(finite) > width:
        finite = [finite[round(place * (len(finite) - 1) / (width - 1))] for place in range(width)]
    return "".join(_BARS[round((value - low) / reach * (len(_BARS) - 1)) if reach else 0] for value in finite)
