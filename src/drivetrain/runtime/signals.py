"""Stop cleanly: signals set a flag that is read at the end of a step.

A handler only stores the signal; the loop reads it at a step boundary, saves, and ends. Inside a `StopSignals` context SIGTERM and SIGINT
request a stop and SIGUSR1 a save; a second SIGINT stops at once.

On several processes `agreed()` combines the flags with a reduction that is started at one boundary and read at the next, so that no rank
waits for it and all stop at the same step. The watchdog (`StopWatchdog`) ends a rank that waits for another one in a collective.
"""

import functools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import ClassVar, Self

from drivetrain.core.errors import ConfigError
from drivetrain.runtime.collectives import all_gather_values, start_agree_any
from drivetrain.runtime.environment import INTERACTIVE_SLURM_JOBS, seconds_from
from drivetrain.runtime.ranks import get_num_processes, get_rank

logger = logging.getLogger(__name__)

_valid_signals = functools.cache(signal.valid_signals)  # one Enum lookup for each of 64 numbers
SAVE_SIGNAL: int = getattr(signal, "SIGUSR1", -1)  # Windows has none
URGENCY: tuple[int, ...] = (SAVE_SIGNAL, signal.SIGINT, signal.SIGTERM)
"""Signals in order of urgency, most urgent last: a stop outranks a save."""


def is_stop(number: int | None) -> bool:
    """Return whether this signal requests a stop (SIGUSR1 only requests a save)."""
    return number is not None and number != SAVE_SIGNAL


def exit_status(number: int) -> int:
    """Return the exit status of a process that a signal ended: 143 for SIGTERM, 130 for SIGINT."""
    return 128 + number


class StopSignals:
    """Store SIGTERM, SIGINT and SIGUSR1 inside the context instead of ending the process.

    Handlers can only be set in the main thread; elsewhere entering does nothing and `installed` stays False. A signal
    that was ignored before (`nohup`) stays ignored, and a handler of the user's own is called as well. A stop that
    was not acted on (`clear()`) is sent again when the earlier handlers are back, so that it is never lost.

    >>> with StopSignals() as signals:
    ...     signals.requested is None
    True
    """

    _entered: ClassVar[list["StopSignals"]] = []

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT, SAVE_SIGNAL)):
        valid = _valid_signals()
        wrong = [number for number in signals if number not in valid and number != -1]
        if wrong:
            raise ConfigError(f"signals: {wrong} are not signals of this system. Use those of the module signal.")
        self.signals = tuple(int(number) for number in signals if number in valid)
        self.requested: int | None = None
        """The most urgent signal seen since the last `clear()`."""
        self.installed = False
        self._earlier: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._pending: Callable[[], bool] | None = None
        self._has_acted = False
        self._watchdog: StopWatchdog | None = None

    @classmethod
    def active(cls) -> "StopSignals | None":
        """Return the innermost active context, so that an inner part leaves the reaction to the outer one."""
        return cls._entered[-1] if cls._entered else None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        if get_num_processes() > 1:
            stops = {one for one in self.signals if is_stop(one) and signal.getsignal(one) is not signal.SIG_IGN}
            self._watchdog = StopWatchdog(stops, lambda: self._has_acted)
        for number in self.signals:
            earlier = signal.getsignal(number)
            if earlier is not signal.SIG_IGN:
                self._earlier[number] = earlier
                signal.signal(number, self._note)
        self.installed, self._has_acted = True, False
        self._entered.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()  # after an error the other ranks may be gone, and waiting for them could last forever
        else:
            self.clear()  # the error ends the program already
        self.release()

    def release(self) -> None:
        """Restore the earlier handlers, and send them a stop that was not handled."""
        self._pending = None
        if not self.installed or threading.current_thread() is not threading.main_thread():
            return
        if self._watchdog is not None:
            self._watchdog.close()
        self._leave(self._earlier)
        self._earlier.clear()
        if self.requested is not None and is_stop(self.requested):
            signal.raise_signal(self.requested)  # on Windows os.kill would end the process without its handlers

    @classmethod
    def leave_after_fork(cls) -> None:
        """Leave all contexts in a forked process, which ends at SIGTERM, as `terminate()` expects.

        Ctrl-C and SIGUSR1 reach it together with its parent, whose last step may need it, so they are still only stored.
        """
        for signals in reversed(cls._entered.copy()):
            if signals._watchdog is not None:
                signals._watchdog.detach()
            signals._leave(set(signals._earlier) - {signal.SIGINT, SAVE_SIGNAL})

    def _leave(self, restored: Iterable[int]) -> None:
        """Restore the earlier handlers of these signals. The context is over."""
        for number in restored:
            earlier = self._earlier[number]
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._watchdog, self.installed = None, False
        self._entered.remove(self)

    def clear(self) -> None:
        """Clear the signal: it has been handled."""
        self._has_acted = self._has_acted or is_stop(self.requested)
        self.requested = None

    def request(self, number: int) -> None:
        """Store a signal, as its handler does. A more urgent one is kept."""
        if self.requested is None or _signal_priority(number) >= _signal_priority(self.requested):
            self.requested = number

    def agreed(self) -> int | None:
        """Return the signal that all ranks act on at this step boundary, or None. Several processes act one step after it arrived."""
        if get_num_processes() == 1:
            return self.requested
        if not self.finish():
            self._pending = start_agree_any(self.requested is not None)
            return None
        noted = [number for number in all_gather_values(self.requested) if number is not None]
        return max(noted, key=_signal_priority, default=None)

    def finish(self) -> bool:
        """Wait for the result of the pending reduction, so that none is left when the group is destroyed."""
        pending, self._pending = self._pending, None
        return pending is not None and pending()

    def _note(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(number)
        if number == signal.SIGINT and self.requested == signal.SIGINT:
            raise KeyboardInterrupt
        self.request(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=StopSignals.leave_after_fork)


def _signal_priority(number: int) -> int:
    return URGENCY.index(number) if number in URGENCY else len(URGENCY)


def requeue_under_slurm() -> bool:
    """Request SLURM to run this job again after it ends. Return False outside a batch job, or if SLURM rejects it."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job or os.environ.get("SLURM_JOB_NAME") in INTERACTIVE_SLURM_JOBS:
        return False
    job = os.environ.get("SLURM_ARRAY_JOB_ID", job)
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        job = f"{job}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("job %s cannot be requeued: %s. The checkpoint is saved; resubmit the job manually.", job, error)
        return False
    if done.returncode:
        logger.warning("scontrol requeue %s failed: %s. The checkpoint is saved.", job, done.stderr.strip())
    return done.returncode == 0


# ---------------------------------------------------------------------- a rank that cannot act on a signal
# Python runs signal handlers in the main thread, between two bytecodes. A main thread that waits in C code for another rank never gets
# there. The interpreter also writes the number of each signal into a socket at once; a thread reads it there and ends the process when no
# code has acted on a stop in time.

STOP_GRACE = 60.0
"""Seconds in which several processes act on a stop: they finish their step or batch and begin to save."""
GRACE_VARIABLE = "DRIVETRAIN_STOP_GRACE"
"""The environment variable that sets other seconds; 0 waits forever."""
REPEAT_SECONDS = 5.0
"""A stop that is sent again after so many seconds is not waited for. Sooner, two launchers may have sent the same one."""


class StopWatchdog:
    """Ends this process some time after one of the `signals` arrives, unless `is_done()` returns True by then."""

    def __init__(self, signals: set[int], is_done: Callable[[], bool]):
        self._signals, self._is_done, self._grace = signals, is_done, seconds_from(GRACE_VARIABLE, STOP_GRACE)
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._earlier = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="drivetrain-stop-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Call it in the main thread."""
        signal.set_wakeup_fd(self._earlier, warn_on_full_buffer=False)
        self._theirs.shutdown(socket.SHUT_RDWR)  # the thread reads the end, also where another process holds a copy
        self._thread.join()
        self._theirs.close()
        self._ours.close()

    def detach(self) -> None:
        """Leave the sockets to the parent of this forked process, whose signals would look like the parent's."""
        signal.set_wakeup_fd(self._earlier, warn_on_full_buffer=False)
        self._theirs.close()
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


def _end(number: int, seconds: float) -> None:
    """End the process as the signal asks, and print where it was."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    sys.stderr.write(
        f"{stack}rank {get_rank()}: {signal.Signals(number).name} arrived {seconds:.0f} s ago and could not be handled, because this "
        "process is blocked at the line above, probably waiting for another rank. It exits without a new checkpoint. "
        f"{GRACE_VARIABLE} sets how many seconds to wait.\n"
    )
    sys.stderr.flush()
    os._exit(128 + number)
