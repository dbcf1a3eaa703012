"""A run's log: one handler for its file and one for the console, there while the run lasts.

The root logger gets these handlers and, for the time of the run, a level that lets messages of level INFO through (DEBUG with
`--debug`); afterwards it is as it was.
"""

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.core.display import printable_lines
from drivetrain.core.files import PRIVATE_FILE, open_regular
from drivetrain.core.secret import hide
from drivetrain.experiment.run_folder import LOG

COLOURS = {"DEBUG": "35", "INFO": "34", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}


class LineFormatter(logging.Formatter):
    """One unwrapped line per record: time, level, rank, name, message."""

    converter = staticmethod(time.gmtime)

    def __init__(self, rank: int, *, shows_time: bool, colours: bool, hidden: Iterable[str] = ()):
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._hidden = tuple(hidden)
        self._rank, self._shows_time, self._colours = rank, shows_time, colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the record with its traceback, and without secrets."""
        return hide(super().format(record), self._hidden)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Put one line together."""
        level = f"[{record.levelname}]"
        if self._colours and record.levelname in COLOURS:
            level = f"\033[{COLOURS[record.levelname]}m{level}\033[0m"
        parts = [f"[{self.formatTime(record, self.datefmt)}]"] if self._shows_time else []
        parts += (
            [level] + ([f"[RANK {self._rank}]"] if self._rank else []) + [f"[{record.name}]", self._message(record)]
        )
        return " ".join(parts)

    @staticmethod
    def _message(record: logging.LogRecord) -> str:
        """Return the message; our own may carry names from files, so control characters are written as escapes."""
        own = record.name.partition(".")[0] == "drivetrain"
        return printable_lines(record.message) if own else record.message


class _FileHandler(logging.StreamHandler):
    """Appends to a regular file; a link in its place is not followed."""

    def __init__(self, path: Path) -> None:
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        super().__init__(os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace"))

    def close(self) -> None:
        """Close the file."""
        super().close()
        self.stream.close()


class _ConsoleHandler(logging.StreamHandler):
    """Writes to the present stderr, so that it survives a redirection."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    @property
    def stream(self) -> Any:
        return sys.stderr


def log_file(folder: Path, rank: int) -> Path:
    """Return the log of one rank."""
    return folder / (LOG if rank == 0 else f"log.rank-{rank}.txt")


@contextmanager
def run_log(folder: Path, rank: int, *, debug: bool, hidden: Iterable[str] = ()) -> Iterator[None]:
    """Log to the run's folder, and on rank 0 to the console unless the program does that already; `hidden` texts are masked."""
    root = logging.getLogger()
    level = logging.DEBUG if debug else logging.INFO
    handlers: list[logging.Handler] = [_FileHandler(log_file(folder, rank))]
    handlers[0].setFormatter(LineFormatter(rank, shows_time=True, colours=False, hidden=hidden))
    if rank == 0 and not root.handlers:
        console = _ConsoleHandler()
        colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        console.setFormatter(LineFormatter(rank, shows_time=False, colours=colours, hidden=hidden))
        handlers.append(console)
    level_before = root.level
    try:
        for handler in handlers:
            handler.setLevel(level)
            root.addHandler(handler)
        root.setLevel(min(level, level_before or level))
        yield
    finally:
        root.setLevel(level_before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
