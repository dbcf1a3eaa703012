"""The table of a sweep that redraws itself on a terminal, and the lines that stand for it everywhere else.

Trials print as well, some of them from processes of their own. While the table stands, the descriptors of output and error output
lead into a pipe, and what comes out of it is printed above the table, line by line.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from drivetrain.core.display import printable
from drivetrain.experiment.cli.output import STATE_STYLES, STDERR, STDOUT, plain_text, print_lines

OnChange = Callable[[Any], object]
"""Gets the result so far whenever a trial begins or ends."""
REFRESH_PER_SECOND = 4
DRAIN_SECONDS = 2.0
"""How long to wait for the last lines of processes that are ending."""
ORDER = ("running", "failed", "timed out", "finished", "pruned", "asked")


@contextmanager
def show_progress() -> Iterator[OnChange]:
    """Show a sweep while it runs: as a table on a terminal, else as lines."""
    if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown"):
        with LiveTable() as table:
            yield table
    else:
        yield status_lines()


def status_lines() -> OnChange:
    """Return what prints one line whenever a trial begins or ends."""
    told: dict[int, str] = {}

    def show(result: Any) -> None:
        for trial in result:
            if told.get(trial.index) != trial.status:
                told[trial.index] = trial.status
                value = "" if trial.value is None else f" {plain_text(trial.value)}"
                print_lines(f"trial {trial.index}: {trial.status}{value}   [{state_of(result)}]")

    return show


def state_of(result: Any) -> str:
    """Return how many trials run, are done and failed, and the best value."""
    counts = {state: sum(trial.status == state for trial in result) for state in ("running", "finished")}
    values = [trial for trial in result.ranked if trial.value is not None]
    best = f", best {plain_text(values[0].value)} (trial {values[0].index})" if values else ""
    return f"{counts['running']} running, {counts['finished']} done, {len(result.failed)} failed{best}"


class LiveTable:
    """Draws trials with their parameters, state, metric and time; use it as a context manager and call it with each result."""

    def __init__(self) -> None:
        self._result: Any = None
        self._began: dict[int, float] = {}
        self._terminal: Any = None
        self._live: Any = None
        self._reader: threading.Thread | None = None
        self._kept: dict[int, int] = {}

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.live import Live

        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._kept = {descriptor: os.dup(descriptor) for descriptor in (STDOUT, STDERR)}
        self._terminal = os.fdopen(os.dup(STDOUT), "w", encoding="utf-8")
        console = Console(file=self._terminal, markup=False, highlight=False, emoji=False)
        self._live = Live(
            console=console,
            get_renderable=self.draw,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,  # the result table follows
            redirect_stdout=False,
            redirect_stderr=False,
        )
        source, sink = os.pipe()
        for descriptor in self._kept:
            os.dup2(sink, descriptor)
        os.close(sink)
        self._reader = threading.Thread(target=self._print_above, args=(source,), daemon=True)
        self._live.start()
        self._reader.start()
        return self

    def __call__(self, result: Any) -> None:
        """Take the result so far."""
        now = time.monotonic()
        for trial in result:
            if trial.status == "running":
                self._began.setdefault(trial.index, now)
            else:
                self._began.pop(trial.index, None)
        self._result = result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor, kept in self._kept.items():
            os.dup2(kept, descriptor)
            os.close(kept)
        assert self._reader is not None
        self._reader.join(DRAIN_SECONDS)  # a process that outlives the sweep may hold the pipe open for ever
        self._live.stop()
        if not self._reader.is_alive():
            self._terminal.close()

    def _print_above(self, source: int) -> None:
        from rich.text import Text

        with os.fdopen(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._live.console.print(Text.from_ansi(line.rstrip("\r\n")), soft_wrap=True)

    def draw(self) -> Any:
        """Return the table as it is now."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if self._result is None:
            return Text("sweep: no trial has begun")
        room = max(3, self._live.console.height - 8)
        trials = sorted(
            self._result.ranked, key=lambda trial: ORDER.index(trial.status)
        )  # stable: best first within a state
        hidden = len(trials) - room
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("trial", "parameters", "state", "metric", "time"):
            table.add_column(name, overflow="fold", no_wrap=name in ("trial", "state", "time"))
        now, names = time.monotonic(), self._result.varied
        for trial in trials[:room]:
            began = self._began.get(trial.index)
            seconds = trial.seconds + (0.0 if began is None else now - began)
            table.add_row(
                str(trial.index),
                Text(
                    printable(", ".join(f"{name}={plain_text(self._result.shown(trial).get(name))}" for name in names))
                ),
                Text(trial.status, style=STATE_STYLES.get(trial.status, "")),
                plain_text(trial.value),
                f"{seconds:.1f} s",
            )
        # Beside the table and not as its title, which would be broken at the table's width.
        state, more = Text(f"sweep: {state_of(self._result)}", style="bold"), Text(f"… and {hidden} more")
        return Group(state, table, more) if hidden > 0 else Group(state, table)
