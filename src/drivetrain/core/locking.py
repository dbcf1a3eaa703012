"""A lock on a folder: one writer at a time, on one machine or on a shared file system, with nothing to clean up after a crash.

The lock is a small file that names its owner: host, process, when that process started. A thread of the owner touches it every few seconds.
On the same machine the process and its start time decide whether the owner lives. Otherwise (another host, another container) the file is
watched, and an owner whose heartbeat does not change for `STALE_SECONDS` is dead; clocks of two machines are not compared.

The file of a dead owner is replaced in a way that only one of several processes can do: each tries to create a claim whose name contains
the dead owner's token, and renames its claim onto the lock. Links, FIFOs and devices in its place are not opened.
"""

import atexit
import json
import logging
import os
import queue
import re
import secrets
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from drivetrain.core.display import printable
from drivetrain.core.files import open_regular, open_to_read, rename_over, time_of_files

logger = logging.getLogger(__name__)

RUN_LOCK = "run.lock"
BEAT_SECONDS = 5.0
"""Seconds between two heartbeats."""
STALE_SECONDS = 60.0
"""An owner on another machine is dead when its heartbeat has not changed for so many seconds."""
_POLL_SECONDS = 0.5
_FILE_LIMIT = 4096
_TOKEN = re.compile(r"[0-9a-f]{16}")
_released: set[str] = set()
"""Tokens of locks that this process has released. The file of one may still exist, in a read-only or renamed folder."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The owner of a lock, as recorded in its file."""

    host: str = "unknown"
    machine: str = ""
    """The machine since its last start, and the namespace of its process numbers."""
    pid: int = 0
    started: str = ""
    """When the process started, as its system counts."""
    since: str = "unknown"
    token: str = ""
    beat: int = 0
    """The time of the last heartbeat in nanoseconds, by the clock of the file system or the owner."""

    def __str__(self) -> str:
        beat = datetime.fromtimestamp(self.beat / 1e9, UTC)
        return printable(
            f"process {self.pid} on host {self.host}, since {self.since} (last heartbeat {beat:%Y-%m-%d %H:%M:%S} UTC)"
        )

    def is_alive(self) -> bool | None:
        """Return whether the process lives, or None where only its heartbeat shows it."""
        if self.token and self.token in _released:
            return False
        if os.name != "posix" or self.pid <= 0 or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # another user's process
            pass
        started = _start_of(self.pid)
        return None if started is None else started == self.started


class FolderLock:
    """Hold the lock of one folder: `acquire()` returns whether it was free."""

    def __init__(self, folder: Path, name: str = RUN_LOCK):
        self.path = folder.absolute() / name
        self.holder: Owner | None = None
        """Who held the lock when `acquire()` returned False."""
        self._token = ""
        self._problem = ""

    def acquire(self) -> bool:
        """Take the lock if no process holds it, or if its owner is dead. For an owner on another machine this waits for a heartbeat."""
        self.holder, token = None, secrets.token_hex(8)
        if not self._create_lock_file(self.path, token):
            return False
        _released.add(self._token)  # of a folder that was moved away
        self._token, self._problem = token, ""
        _hearts.add(self)
        return True

    def is_held(self) -> bool:
        """Return whether the lock is this object's, also on the disk."""
        seen = _look(self.path) if self._token else None
        return seen is not None and seen.token == self._token

    def release(self) -> None:
        """Release the lock; nothing if it is not held."""
        _hearts.remove(self)
        try:
            if self.is_held():
                self.path.unlink(missing_ok=True)
        except OSError as error:  # its owner is dead soon, and others see that
            logger.warning("the lock %s cannot be removed: %s", self.path, error)
        _released.add(self._token)
        self._token = ""

    def beat(self) -> None:
        """Show that the owner lives; a lock that is gone or cannot be touched is warned about once."""
        try:
            seen = _look(self.path)
            if seen is None:
                problem = "is gone"
            elif seen.token != self._token:
                problem = f"was taken by {seen}"
            else:
                problem = ""
                os.utime(self.path, follow_symlinks=os.utime not in os.supports_follow_symlinks)
        except OSError as error:
            problem = f"cannot be touched ({error})"
        if problem and self._token and problem != self._problem:
            logger.warning("the lock %s %s: a second process may write to the folder.", self.path, problem)
        self._problem = problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _create_lock_file(self, path: Path, token: str) -> bool:
        """Create the file, or replace that of a dead owner."""
        while not _create(path, token):
            seen = _look(path)
            if seen is None:
                continue  # released in between
            if not _is_dead(path, seen):
                self.holder = seen
                return False
            claim = path.with_name(f"{path.name}.{seen.token}")
            if not self._create_lock_file(claim, token):
                return False  # another process takes over
            now = _look(path)
            if now is not None and now.token == seen.token:
                rename_over(claim, path)
                logger.warning("%s: its owner is dead (%s), so it is taken over.", path, seen)
                return True
            claim.unlink(missing_ok=True)
        return True


def owner_of(folder: Path, name: str = RUN_LOCK) -> Owner | None:
    """Return the owner that the lock of a folder names, alive or not, or None where there is no lock."""
    return _look(folder / name)


def is_locked(folder: Path, name: str = RUN_LOCK, *, assume_alive: bool = False) -> bool:
    """Return whether a live process holds the lock of a folder.

    Of an owner on another machine the age of the last heartbeat decides by the clock of the file system, unless `assume_alive`: then the
    lock is watched until the heartbeat changes, or does not for `STALE_SECONDS`.
    """
    path = folder / name
    try:
        seen = _look(path)
        if seen is None:
            return False
        if assume_alive:
            return not _is_dead(path, seen)
    except OSError:
        return False
    alive = seen.is_alive()
    return abs(time_of_files(folder) - seen.beat / 1e9) < 2 * STALE_SECONDS if alive is None else alive


def lock_held_here(folder: Path, name: str) -> FolderLock | None:
    """Return the lock of a folder that this process holds, if it does."""
    return _hearts.find(folder / name)


class _HeartbeatThread:
    """Touches the locks of this process from one thread, which lives as long as there are any.

    A garbage collection may release a lock at any moment and in any thread, also inside of these methods. So the guard can be taken
    again by its own thread and is never held while another thread is waited for, and the thread is stopped through a queue that a
    collection may write to.
    """

    def __init__(self) -> None:
        self._locks: dict[str, FolderLock] = {}
        self._guard = threading.RLock()
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, lock: FolderLock) -> None:
        with self._guard:
            self._locks[os.path.realpath(lock.path)] = lock
            if self._thread is not None:
                return
            self._stop = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(self._stop,), name="drivetrain-lock", daemon=True)
            self._thread = thread
        thread.start()  # waits for the thread

    def remove(self, lock: FolderLock) -> None:
        with self._guard:
            self._locks = {path: other for path, other in self._locks.items() if other is not lock}
            if not self._locks:
                self._stop.put(None)
                self._thread = None

    def find(self, path: Path) -> FolderLock | None:
        with self._guard:
            return self._locks.get(os.path.realpath(path))

    def release_all(self) -> None:
        for lock in list(self._locks.values()):
            lock.release()

    def forget_after_fork(self) -> None:
        """A forked child has neither the thread nor the locks: those are its parent's."""
        for lock in self._locks.values():
            lock._token = ""
        self.__init__()  # type: ignore[misc]

    def _run(self, stop: "queue.SimpleQueue[None]") -> None:
        while True:
            with suppress(queue.Empty):
                return stop.get(timeout=BEAT_SECONDS)
            with self._guard:
                locks = list(self._locks.values())
            for lock in locks:
                lock.beat()


_hearts = _HeartbeatThread()
atexit.register(_hearts.release_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hearts.forget_after_fork)


def _create(path: Path, token: str) -> bool:
    """Create the file of a lock with this process as its owner; False where there is one."""
    try:
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    content = {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()) or "",
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "token": token,
    }
    try:
        with os.fdopen(descriptor, "w") as stream:
            json.dump(content, stream)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _look(path: Path) -> Owner | None:
    """Return the owner of a lock, or None where there is no lock; a file that does not name one has an unknown owner."""
    try:
        with open_to_read(path) as stream:
            status, data = os.fstat(stream.fileno()), stream.read(_FILE_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    known = {"token": f"{status.st_ino:016x}", "beat": status.st_mtime_ns}
    with suppress(ValueError, RecursionError, AttributeError):  # what is not a dict has no items
        for name, value in json.loads(data).items():
            is_text = name in ("host", "machine", "started", "since") and isinstance(value, str)
            is_pid = name == "pid" and type(value) is int and 0 < value < 2**31
            if is_text or is_pid or (name == "token" and isinstance(value, str) and _TOKEN.fullmatch(value)):
                known[name] = value
    return Owner(**known)  # type: ignore[arg-type]


def _is_dead(path: Path, seen: Owner) -> bool:
    """Return whether the owner of a lock is dead; of one on another machine, after watching its heartbeat."""
    alive = seen.is_alive()
    if alive is not None:
        return not alive
    logger.warning("%s is held by %s. Waiting up to %.0f s for a heartbeat.", path, seen, STALE_SECONDS)
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        now = _look(path)
        if now is None or now.token != seen.token:
            return True  # not this owner's any more
        if now.beat != seen.beat:
            return False
    return True


def _machine() -> str:
    """Name the machine since its last start, and the namespace of its process numbers: elsewhere the same number is another process."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_of(pid: int) -> str | None:
    """Return when a process started as its system counts, empty for one that has ended, or None where the system does not say."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # hidden from other users
            return None
        return "" if fields[0] in "ZX" else fields[19]
    try:
        command = ["ps", "-o", "lstart=", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
