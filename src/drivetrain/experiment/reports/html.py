"""The few pieces of HTML that every section is made of; all text from runs goes through `escape`."""

import datetime
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from drivetrain.core.quantities import shown_seconds
from drivetrain.experiment.reports.scales import short

LONGEST_VALUE = 400


def cell(value: Any) -> str:
    """Return a value as escaped text, cut where it is very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return escape(text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…")


def table(head: Sequence[str], rows: Iterable[str], *, numbers_from: int | None = None) -> str:
    """Return a table; rows are ready `<tr>` elements."""
    columns = "".join(
        f'<th scope="col"{" class=number" if numbers_from is not None and place >= numbers_from else ""}>{escape(name)}</th>'
        for place, name in enumerate(head)
    )
    return f'<div class="table"><table><thead><tr>{columns}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(name: str, values: Iterable[str], kind: str = "", cell_kind: str = "value") -> str:
    """Return a table row from a name and ready, escaped values."""
    cells = "".join(f'<td class="{cell_kind}">{value}</td>' for value in values)
    return f'<tr class="{kind}"><th scope="row">{escape(name)}</th>{cells}</tr>'


def section(title: str, *parts: str) -> str:
    """Return a titled section, nothing when it would be empty."""
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def folded(title: str, body: str) -> str:
    """Return a part that opens on demand."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def block(text: str, kind: str = "") -> str:
    """Return preformatted text."""
    return f'<pre class="block {kind}">{escape(text)}</pre>' if text else ""


def moment(seconds: float) -> str:
    """Return a time since 1970 as UTC text."""
    if not seconds:
        return "unknown"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float | None) -> str:
    """Return a duration as text; None is unknown."""
    return "unknown" if seconds is None else shown_seconds(seconds)


def number(value: Any) -> str:
    """Return a number as tables show it, anything else as text."""
    return short(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else cell(value)
