"""Files in folders that others may have filled: read without surprises, replaced in one step.

A run folder or a checkpoint may come from another person. In it a name can be a link to somewhere else, a FIFO that blocks
whoever opens it, or a device without an end. Everything in the library that reads such a folder opens its files here: a link is
not followed, only a regular file is read, and never more of it than the caller allows. Files are written under a random name
first and renamed when they are complete, so that a reader sees the old content or the new one.
"""

import errno
import io
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from drivetrain.core.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".tmp-"
"""How the name of a file that is still being written begins."""
JSON_DEPTH = 64
"""How deeply values in a JSON file may be nested."""
_LONGEST_INT = 300  # digits
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of what may hold parameters; a stricter umask stays in force."""
_TRIES, _TRY_SECONDS = 20, 0.05
_ahead: dict[tuple[int, int], float] = {}
"""By device and minute, how many seconds the clock of its files is ahead of this machine's."""

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path that stays the same when the program changes its folder."""
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        raise ConfigError(
            f"{str(path)!r} is a relative path, and the current folder has been deleted. Change to a folder that exists, or give an "
            "absolute path."
        ) from None


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file; a link to one is not."""
    return stat.S_ISREG(_mode(path))


def is_real_folder(path: Path) -> bool:
    """Return whether a path is a folder; a link to one is not."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except (OSError, ValueError):
        return 0


def time_of_files(folder: Path) -> float:
    """Return the present time by the clock that dates new files in a folder; this machine's clock where no file can be made there.

    On a network file system that is the server's clock: the times of files from several machines compare with it.
    """
    now = time.time()
    try:
        key = (os.stat(folder).st_dev, int(now // 60))  # a file a minute; a clock that is set is asked again
        if key not in _ahead:
            with tempfile.TemporaryFile(dir=folder, prefix=TEMPORARY) as file:
                ahead = os.fstat(file.fileno()).st_mtime - now
            _ahead.clear()
            _ahead[key] = ahead
        return now + _ahead[key]
    except OSError:
        return now


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor; anything else, a link to a file included, is an `OSError`."""
    try:
        descriptor = os.open(path, flags | _NO_LINK | _BINARY, mode)
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and (_NO_LINK or not os.path.islink(path)):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO opened for writing without a reader
            raise
    reason = "it is not a regular file (a link, FIFO, device or folder), so it is not opened"
    raise OSError(errno.EINVAL, reason, str(path))


def open_to_read(path: Path) -> io.BufferedReader:
    """Open a regular file for reading."""
    return os.fdopen(open_regular(path), "rb")


def read_limited(path: Path, limit: int | None) -> bytes:
    """Return the content of a regular file of at most `limit` bytes, as long as it is now; a longer one is an `OSError`."""
    with open_to_read(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if limit is None or size <= limit:
            return stream.read(size)
    raise OSError(errno.EFBIG, f"the file is larger than {limit:,} bytes, so it is not read", str(path))


def load_json(data: str | bytes) -> Any:
    """Return what a JSON text holds; one that is malformed or nested more than `JSON_DEPTH` times is a `ValueError`.

    The limit is far below Python's own, so that whoever walks through the value need not fear a `RecursionError`. For the same reason an
    integer that no float can hold is an error.
    """
    try:
        value = json.loads(data, parse_int=_parse_int if len(data) > _LONGEST_INT else None)
    except RecursionError:
        raise ValueError(f"it is nested more than {JSON_DEPTH} times") from None
    opening = ("[", "{") if isinstance(data, str) else (b"[", b"{")
    if sum(map(data.count, opening)) <= JSON_DEPTH:  # type: ignore[arg-type]
        return value
    level = [value]
    for _ in range(JSON_DEPTH + 1):
        containers = [one for one in level if isinstance(one, dict | list)]
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
    if level:
        raise ValueError(f"it is nested more than {JSON_DEPTH} times")
    return value


def _parse_int(text: str) -> int:
    if len(text) > _LONGEST_INT:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def home_cache() -> Path:
    """Return `~/.cache/drivetrain`. A user without a home folder, as in containers, gets a path where nothing can be read or written."""
    try:
        return Path.home() / ".cache" / "drivetrain"
    except RuntimeError:
        return Path(os.devnull, "drivetrain")


def read_end(path: Path, size: int) -> bytes:
    """Return the last `size` bytes of a regular file."""
    with open_to_read(path) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
        return stream.read(size)


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a stream whose content becomes the file `path` when the block ends without an error.

    A file that is replaced keeps its permissions; a new one gets `mode`, less the umask. A link is replaced, not followed.
    `durable` waits until the disk has the content. While the file is written it is locked, so that a process that removes
    leftovers can distinguish it from one.
    """
    aside, lock = create_locked_temporary(path, lambda aside: aside.touch(mode, exist_ok=False))
    try:
        with open(aside, "wb") as stream:
            if is_regular(path) and hasattr(os, "fchmod"):
                os.fchmod(stream.fileno(), stat.S_IMODE(os.lstat(path).st_mode))
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        rename_over(aside, path)
    finally:
        aside.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def rename_over(source: Path, target: Path) -> None:
    """Rename a file or folder, over the file that may have the name.

    Windows rejects that while another program has one open, such as a reader or a virus scanner; there it is tried again for a moment.
    """
    for left in range(_TRIES, 0, -1):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if os.name != "nt" or left == 1:
                raise
            time.sleep(_TRY_SECONDS)


def replace_bytes(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace a file in one step."""
    with atomic_write(path, mode=mode, durable=durable) as stream:
        stream.write(content)


def make_inner_folder(root: Path, folder: Path) -> None:
    """Make a folder within `root`, and those between the two; one that is a link is an `OSError`."""
    place = root
    root.mkdir(parents=True, exist_ok=True)
    for part in folder.relative_to(root).parts:
        place = place / part
        place.mkdir(exist_ok=True)
        if not is_real_folder(place):
            raise OSError(errno.ELOOP, "it is a link, and files are not written through it", str(place))


def create_locked_temporary(path: Path, create: Callable[[Path], object]) -> tuple[Path, int | None]:
    """Create a file or folder next to `path` under a temporary name, and lock it until the descriptor is closed or the process ends.

    A process that removes leftovers recognizes it by the lock, which is None where the file system has no locks.
    """
    while True:
        aside = path.with_name(f"{TEMPORARY}{path.name[:48]}-{secrets.token_hex(8)}")
        create(aside)
        try:
            lock = lock_path(aside)
        except (BlockingIOError, FileNotFoundError):  # such a process has come first
            continue
        except OSError:
            return aside, None
        if aside.exists():
            return aside, lock
        os.close(lock)


def lock_path(path: Path) -> int:
    """Lock a file or folder until the returned descriptor is closed or the process ends.

    It is an `OSError` if a living process holds the lock (`BlockingIOError`), if nothing or a link is there, and without locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no such locks", str(path))
    descriptor = os.open(path, os.O_RDONLY | _NO_LINK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
