"""What a sink is, the way from the stream to one sink, and the sink for the console.

A sink is any object with some of the methods of `Sink`. Rows reach it in the order in which they were recorded, on rank 0 only, as plain
numbers, and some seconds later; `step` and `time` (seconds since 1970) are those of the call that recorded them.

An error of a sink (a network that is down, a full disk) does not end a training run: it is logged once, the sink rests for longer each time
it fails again, and what it missed is counted and logged at the end. `metrics.jsonl` has it all.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from drivetrain.core.display import print_if_possible, printable, printable_lines
from drivetrain.core.errors import ConfigTypeError
from drivetrain.record.buffer import Histogram
from drivetrain.record.images import Picture


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The folder holds rows of an earlier life of this run; those from here on are recorded again."""

    step: int
    """Rows of this step and later ones are superseded."""
    lines: int | None = None
    """Number of lines of `metrics.jsonl` to keep, if the checkpoint stores it; more exact than the step."""
    run_id: str | None = None
    """The id of this run in an external tracker."""


class Sink(Protocol):
    """The full set of methods. A class of yours needs no base; give it those it can serve.

    A sink with `scalars` gets the values of a step together and is not asked for `scalar`. A sink with `step` is served at every
    step rather than every few seconds. With the attribute `remote = True` no error of the sink ever reaches the training loop;
    otherwise that holds for `OSError` once it has been opened. An attribute `name` and `run_id` make a tracker's run resumable.
    A sink that is `remote`, or says `wants_settings = True`, gets the parameters of the experiment that runs when it is opened.
    """

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Begin, before the first row; again after `close` when a state is loaded."""

    def scalar(self, tag: str, value: float, step: int, time: float) -> None:
        """Take one number."""

    def scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Take the numbers of one step."""

    def image(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Take an image."""

    def figure(self, tag: str, picture: Picture, step: int, time: float) -> None:
        """Take a figure."""

    def histogram(self, tag: str, histogram: Histogram, step: int, time: float) -> None:
        """Take a histogram."""

    def text(self, tag: str, text: str, step: int, time: float) -> None:
        """Take a text."""

    def params(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take the settings of the run."""

    def summary(self, values: Mapping[str, object], step: int, time: float) -> None:
        """Take results of the run."""

    def direction(self, tag: str, good: str, step: int, time: float) -> None:
        """Take whether small ("min") or large ("max") values of a metric are good."""

    def step(self, step: int, time: float) -> None:
        """End a step."""

    def flush(self) -> None:
        """Make what was taken durable."""

    def close(self) -> None:
        """End."""


SINK_METHODS = tuple(name for name in vars(Sink) if not name.startswith("_"))


class Row(NamedTuple):
    """One thing that was recorded; `kind` is the name of the sink's method for it."""

    kind: str
    tag: str
    value: Any
    step: int
    time: float


logger = logging.getLogger(__name__)

_FIRST_REST = 30.0  # seconds
_LONGEST_REST = 3600.0


class GuardedSink:
    """One sink, opened when there is something for it, and guarded."""

    def __init__(self, sink: object):
        self.sink = sink
        self.name: str = getattr(sink, "name", None) or type(sink).__name__
        self._methods: dict[str, Callable[..., None]] = {
            name: getattr(sink, name) for name in SINK_METHODS if callable(getattr(sink, name, None))
        }
        if not self._methods:
            raise ConfigTypeError(
                f"sinks: {sink!r} is not a sink. Expected an object with some of the methods {', '.join(SINK_METHODS)}, or a name."
            )
        self._forgiven: type[Exception] = Exception if getattr(sink, "remote", False) else OSError
        self.wants_settings = bool(getattr(sink, "remote", False) or getattr(sink, "wants_settings", False))
        self.is_open = False
        self.missed = 0
        self._rest, self._rests_until = _FIRST_REST, 0.0
        self._has_spoken = False

    def takes(self, kind: str) -> bool:
        """Return whether the sink has a method for rows of this kind."""
        return kind in self._methods

    def open(self, folder: Path, resume: Resume | None) -> None:
        """Open the sink before its first row; a local sink that cannot be opened is an error of the run."""
        if self._is_resting():
            return
        try:
            self._call("open", folder, resume)
            self.is_open = True
        except Exception as error:
            if self._forgiven is OSError:
                raise
            self._failed(error, 0)

    def deliver(self, rows: list[Row]) -> None:
        """Hand rows to the sink."""
        if not self.is_open or self._is_resting():
            self.missed += len(rows)
            return
        try:
            self._send_rows(rows)
        except self._forgiven as error:
            self._failed(error, len(rows))

    def flush(self) -> None:
        """Let the sink make durable what it has taken."""
        if self.is_open and not self._is_resting():
            try:
                self._call("flush")
                self._rest = _FIRST_REST
            except self._forgiven as error:
                self._failed(error, 0)

    def close(self) -> None:
        """Close the sink and log what it has missed."""
        if self.is_open:
            self.is_open = False
            try:
                self._call("close")
            except self._forgiven as error:
                self._failed(error, 0)
        if self.missed:
            logger.warning(
                "the sink %s missed %d rows because of errors; metrics.jsonl has them, unless its own disk failed.",
                self.name,
                self.missed,
            )
            self.missed = 0

    def _send_rows(self, rows: Iterable[Row]) -> None:
        methods, together = self._methods, self._methods.get("scalars")
        values: dict[str, float] = {}
        at, when = 0, 0.0
        for kind, tag, value, step, moment in rows:
            if together is not None and kind == "scalar":
                if values and (step != at or tag in values):
                    together(values, at, when)
                    values = {}
                values[tag], at, when = value, step, moment
                continue
            method = methods.get(kind)
            if method is None:
                continue
            if values and together is not None:
                together(values, at, when)
                values = {}
            if kind == "step":
                method(step, moment)
            elif kind in ("params", "summary"):
                method(value, step, moment)
            else:
                method(tag, value, step, moment)
        if values and together is not None:
            together(values, at, when)

    def _call(self, name: str, *arguments: object) -> None:
        method = self._methods.get(name)
        if method is not None:
            method(*arguments)

    def _is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def _failed(self, error: Exception, num_rows: int) -> None:
        self.missed += num_rows
        self._rests_until = time.monotonic() + self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)
        if not self._has_spoken:
            self._has_spoken = True
            logger.warning(
                "the sink %s failed (%s: %s). Training continues; the sink is retried periodically.",
                self.name,
                type(error).__name__,
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )


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
            shown = [f"{printable(tag)} {value:.6g}" for tag, value in values.items()]
            self._print("  ".join([f"step {step}", *shown]))

    def _print(self, line: str) -> None:
        print_if_possible(line, file=self._file, flush=True)
