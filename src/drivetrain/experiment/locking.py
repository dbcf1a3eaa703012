"""A lock on a folder that vanishes with the process that holds it, however that process ends."""

import os
import sys
from pathlib import Path
from typing import Self

from drivetrain.core.files import open_regular

LOCK = "run.lock"

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _take(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class FolderLock:
    """Hold the lock of one folder: `acquire()` says whether it was free."""

    _held: set["FolderLock"] = set()

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock if nobody holds it."""
        descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        if not _take(descriptor):
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        self._held.add(self)
        return True

    def release(self) -> None:
        """Give the lock back; nothing if it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._held.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @classmethod
    def _forget_after_fork(cls) -> None:
        """A forked child (a data worker) shares the descriptor and would keep the lock alive after its parent's death."""
        for lock in list(cls._held):
            lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FolderLock._forget_after_fork)


def is_locked(folder: Path) -> bool:
    """Say whether a live process holds the lock of a folder."""
    path = folder / LOCK
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _take(descriptor)
    finally:
        os.close(descriptor)
