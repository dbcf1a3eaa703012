"""Numbers of a step on the console, one line when the step ends."""

import sys
from typing import TextIO

from drivetrain.core.display import printable, printable_lines


class ConsoleSink:
    """Prints what was recorded in a step.

    Being served at every step makes no device wait: a line appears when its values have arrived, on an accelerator a step later.
    """

    def __init__(self, file: TextIO | None = None):
        self._file = file
        self._values: dict[str, float] = {}

    def scalar(self, tag: str, value: float, step: int, time: float) -> None:
        """Take one number."""
        self._values[tag] = value

    def text(self, tag: str, text: str, step: int, time: float) -> None:
        """Print a text."""
        self._print(f"step {step}  {printable(tag)}: {printable_lines(text)}")

    def step(self, step: int, time: float) -> None:
        """Print the line of a step in which something was recorded."""
        if self._values:
            values, self._values = self._values, {}
            self._print(
                "  ".join([f"step {step}", *(f"{printable(tag)} {value:.6g}" for tag, value in values.items())])
            )

    def _print(self, line: str) -> None:
        print(line, file=self._file or sys.stdout, flush=True)
