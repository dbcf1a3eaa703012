"""Text from files and other people, made safe for a terminal and for a spreadsheet.

A terminal executes escape sequences: they move the cursor, rewrite lines that were printed before and set the window's title. Marks
that turn the direction of writing make a name read as another. A spreadsheet computes a cell that begins like a formula.
"""

import re
from typing import Any

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
    return _HIDDEN.sub(_escape, text) if _HIDDEN.search(text) else text


def printable_lines(text: str) -> str:
    """Return a text of several lines with each line made `printable`."""
    return "\n".join(printable(line) for line in _LINES.split(text))


def printable_json(text: str) -> str:
    r"""Return JSON text in which such characters are JSON escapes, so that it means the same; line ends stay.

    >>> printable_json('"a\u202e"')
    '"a\\u202e"'
    """
    return "\n".join(_HIDDEN.sub(_json_escape, line) for line in text.split("\n"))


def spreadsheet_cell(value: object) -> Any:
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


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def _json_escape(found: re.Match[str]) -> str:
    pair = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{pair[place : place + 2].hex()}" for place in range(0, len(pair), 2))
