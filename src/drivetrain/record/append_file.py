"""A text file that only grows by whole blocks: a block that cannot be written leaves no trace.

A full disk must not leave half a line in the middle of a file that goes on when there is space again, and a process killed while
writing leaves half a line only at the end, which the next writer cuts off.
"""

import os
from pathlib import Path

from drivetrain.core.files import open_regular, open_to_read


class AppendFile:
    """Appends lines to a regular file, never through a link, and knows how many it has."""

    def __init__(self, path: Path):
        self.path = path
        self._file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            self._size, self.lines = _whole_lines(path)
            os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, lines: list[str]) -> None:
        """Write lines, each with its end, all of them or none."""
        block = "".join(lines).encode()
        try:
            done = 0
            while done < len(block):
                done += os.write(self._file, block[done:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(block)
        self.lines += len(lines)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class FileSink:
    """The part of a sink that appends what is waiting to a file; a subclass opens it and says what is waiting."""

    _file: AppendFile | None = None

    def take_waiting(self) -> list[str]:
        """Return the lines that wait to be written, and forget them."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write what is waiting."""
        if self._file is not None and (lines := self.take_waiting()):
            self._file.append(lines)

    def close(self) -> None:
        """Write what is waiting and close the file."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                self._file.close()
                self._file = None


def _whole_lines(path: Path) -> tuple[int, int]:
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
