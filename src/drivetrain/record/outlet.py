"""The way from the stream to one sink: what it takes, and what happens when it fails.

A tracker whose network is down and a disk that is full must not end a training run. Such an error is said once; the sink then
rests, for longer each time it fails again, so that a dead server costs next to nothing, and what it missed is counted and said at
the end. `metrics.jsonl` has it all in any case, unless its own disk was the one that was full.
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from drivetrain.core.errors import ConfigTypeError
from drivetrain.record.sink import SINK_METHODS, Resume, Row

logger = logging.getLogger(__name__)

_FIRST_REST = 30.0  # seconds
_LONGEST_REST = 3600.0


class Outlet:
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
            self._hand_over(rows)
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
        """Close the sink and say what it has missed."""
        if self.is_open:
            self.is_open = False
            try:
                self._call("close")
            except self._forgiven as error:
                self._failed(error, 0)
        if self.missed:
            logger.warning(
                "the sink %s missed %d rows because of errors; see metrics.jsonl for them.", self.name, self.missed
            )
            self.missed = 0

    def _hand_over(self, rows: Iterable[Row]) -> None:
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
                "the sink %s failed (%s: %s). Training goes on; the sink is tried again from time to time.",
                self.name,
                type(error).__name__,
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
