"""What verbs print: tables that fit the terminal, marked lines, or JSON for scripts; colours only where they are wanted."""

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.display import printable, printable_json
from drivetrain.core.plain import spelled
from drivetrain.experiment.command_line import STDERR, STDOUT

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160
"""Width of tables that go to a file or a pipe, where there is no terminal width."""
MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}
STATE_STYLES = {
    "finished": "green",
    "pruned": "green",
    "running": "blue",
    "failed": "red",
    "timed out": "red",
    "lost": "red",
    "interrupted": "yellow",
}


def console() -> "Console":
    """Return a console that follows NO_COLOR, COLUMNS and redirections, and interprets no text as markup."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            """Leave a closed pipe to the caller; rich would end the program with status 1."""
            raise

    is_terminal = sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Output(width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", styles: dict[str, str] | None = None
) -> None:
    """Print a table; the last column gives way first, and cells equal to a key of `styles` get that style."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    heading = Text(title, style="bold", justify="left") if title else None
    table = Table(title=heading, box=box.SIMPLE_HEAD, show_header=any(head), pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(printable(name), overflow="fold", no_wrap=0 < place < len(head) - 1 and len(head) < 6)
    for row in rows:
        texts = [printable(value if isinstance(value, str) else plain_text(value)) for value in row]
        table.add_row(*(Text(text, style=(styles or {}).get(text, "")) for text in texts))
    console().print(table)


@dataclass(frozen=True)
class Column:
    """One column of a table that omits columns on a narrow terminal."""

    name: str
    cells: Sequence[object]
    rank: int = 0
    """Columns of the highest rank are left out first; those of rank 0 stay."""


COLUMN_GAP = 3
"""Characters between two columns; the edges of a table take two."""


def print_fitting_table(columns: Sequence[Column], *, styles: dict[str, str] | None = None) -> None:
    """Print the columns that fit the terminal, and the names of those that do not."""
    room = console().width - 2
    widths = [_width(column) for column in columns]
    kept = list(range(len(columns)))
    while sum(widths[place] for place in kept) - COLUMN_GAP > room:
        rank = max(columns[place].rank for place in kept)
        if rank == 0:
            break
        kept.remove(max(place for place in kept if columns[place].rank == rank))
    shown = [columns[place] for place in kept]
    print_table([column.name for column in shown], zip(*(column.cells for column in shown)), styles=styles)
    left_out = [column.name for place, column in enumerate(columns) if place not in kept]
    if left_out:
        text = f"not shown: {', '.join(left_out)} (use a wider terminal or --json)"
        print_lines(*textwrap.wrap(text, max(20, room)), style="dim")


def print_split_table(key: Column, columns: Sequence[Column]) -> None:
    """Print a table in as many parts as the terminal needs; each part begins with the key column."""
    room = console().width - 2
    parts: list[list[Column]] = [[key]]
    used = first = _width(key)
    for column in columns:
        if used + _width(column) - COLUMN_GAP > room and len(parts[-1]) > 1:
            parts.append([key])
            used = first
        parts[-1].append(column)
        used += _width(column)
    for part in parts:
        print_table([column.name for column in part], zip(*(column.cells for column in part)))


def _width(column: Column) -> int:
    return max(len(printable(text)) for text in (column.name, *map(plain_text, column.cells))) + COLUMN_GAP


def print_lines(*lines: str, style: str = "") -> None:
    """Print lines without wrapping, so that paths can be copied; control characters are printed as escapes."""
    from rich.text import Text

    for line in lines:
        console().print(Text(printable(line), style=style), soft_wrap=True)


def indented(label: str, text: str) -> list[str]:
    """Return the lines of a text after a label; further lines are indented, so that none can pass for a line of ours."""
    first, *rest = text.splitlines() or [""]
    return [label + first, *(" " * len(label) + line for line in rest)]


def print_json(data: object) -> None:
    """Print data as JSON; NaN and infinities become strings, because JSON has none."""
    print(printable_json(json.dumps(spelled(data), indent=2, ensure_ascii=False, default=str)))


def print_either(as_json: bool, data: object, *lines: str) -> None:
    """Print data as JSON, or lines for people."""
    if as_json:
        print_json(data)
    else:
        print_lines(*lines)


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send everything that is printed within to stderr, so that stdout holds nothing but JSON.

    Worker processes write to the descriptor they inherit, whatever `sys.stdout` is, so the descriptor is redirected as well.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(STDOUT)
    except OSError:  # no output at all, so nobody can write into it
        with redirect_stdout(sys.stderr):
            yield
        return
    try:
        os.dup2(STDERR, STDOUT)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, STDOUT)
        os.close(kept)


def plain_text(value: object) -> str:
    """Return a value as a table shows it."""
    from drivetrain.experiment.reports.gather import short

    if value is None:
        return "–"
    if isinstance(value, float):
        return short(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    is_good: bool | None
    """None: information, neither good nor bad."""
    name: str
    found: str
    remedy: str = ""


def print_checks(checks: Iterable[Check], *, as_json: bool) -> int:
    """Print checks as they come in; 1 when any of them failed, else 0."""
    done = []
    for check in checks:
        done.append(check)
        if not as_json:
            mark, style = MARKS[check.is_good]
            remedy = f"  → {check.remedy}" if check.remedy else ""
            print_lines(f"{mark} {check.name}: {check.found}{remedy}", style=style if check.is_good is not True else "")
    if as_json:
        print_json([{"good": one.is_good, "check": one.name, "found": one.found, "remedy": one.remedy} for one in done])
    return int(any(check.is_good is False for check in done))


def own_command() -> str:
    """Return how the command line is started from here: by its name if that is on the path, else by its interpreter."""
    own = Path(sys.executable).parent
    found = shutil.which("drivetrain")
    if found is not None and Path(found).parent == own:
        return "drivetrain"
    inside = own.is_relative_to(Path.cwd())
    return f"{shlex.quote(os.path.relpath(sys.executable) if inside else sys.executable)} -m drivetrain"
