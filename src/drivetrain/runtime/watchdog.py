"""Ending a rank that was asked to stop and cannot hear it, because it waits in a collective for another rank.

Python runs signal handlers in the main thread, between two bytecodes. A main thread that waits in C code never gets there, so neither
SIGTERM nor Ctrl-C would end such a rank. The interpreter also writes the number of each signal into a socket at once; a thread reads it
there and ends the process when no code has acted on a stop in time.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from drivetrain.core.errors import ConfigError
from drivetrain.runtime.ranks import get_rank

STOP_GRACE = 60.0
"""Seconds in which several processes act on a stop: they finish their step or batch and begin to save."""
GRACE_VARIABLE = "DRIVETRAIN_STOP_GRACE"
"""The environment variable that sets other seconds; 0 waits for ever."""
REPEAT_SECONDS = 5.0
"""A stop that is sent again after so many seconds is not waited for. Sooner, two launchers may have sent the same one."""


class StopWatchdog:
    """Ends this process some time after one of the `signals` arrives, unless `is_done()` by then."""

    def __init__(self, signals: set[int], is_done: Callable[[], bool]):
        self._signals, self._is_done, self._grace = signals, is_done, _grace()
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._earlier = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="drivetrain-stop-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer; called in the main thread."""
        signal.set_wakeup_fd(self._earlier, warn_on_full_buffer=False)
        self._theirs.close()  # the thread reads the end, and ends
        self._thread.join()
        self._ours.close()

    def _watch(self) -> None:
        first: float | None = None
        deadline: float | None = None
        number = 0
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._ours], [], [], left)[0]:
                if not self._is_done():
                    _end(number, time.monotonic() - (first or 0.0))
                deadline = None  # it is being acted on
                continue
            arrived = self._ours.recv(64)
            if not arrived:
                return
            stops = [one for one in arrived if one in self._signals]
            if not stops:
                continue
            if first is None:
                first, number = time.monotonic(), stops[0]
                deadline = first + self._grace if self._grace else None
            elif time.monotonic() > first + REPEAT_SECONDS:
                deadline = time.monotonic()


def _grace() -> float:
    given = os.environ.get(GRACE_VARIABLE, STOP_GRACE)
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigError(f"{GRACE_VARIABLE}={given!r}: expected a number of seconds, or 0 to wait for ever.")
    return seconds


def _end(number: int, seconds: float) -> None:
    """End the process as the signal asks, and print where it was."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    sys.stderr.write(
        f"{stack}rank {get_rank()}: {signal.Signals(number).name} came {seconds:.0f} s ago and could not be acted on, because this "
        f"process waits at the place above, probably for another rank. It ends without a new checkpoint. {GRACE_VARIABLE} sets how "
        "many seconds to wait.\n"
    )
    sys.stderr.flush()
    os._exit(128 + number)
