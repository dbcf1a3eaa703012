"""The folder that holds checkpoints: tested and locked before a run starts, and watched during the run.

A folder that cannot be written, or that another run writes to, is an error before the first step. If it disappears or becomes
read-only later, the next save raises in the main thread, so that training does not continue for hours without a checkpoint; the
thread that touches the lock warns within seconds. Rank 0 holds the lock for all ranks, which must see it: each writes its part of a
checkpoint, so the nodes must share the folder.
"""

import os
from pathlib import Path

from drivetrain.checkpoint.exchange import RankExchange, control_exchange
from drivetrain.checkpoint.files import replace_file
from drivetrain.checkpoint.layout import checkpoint_folders
from drivetrain.checkpoint.writer import WriteFailedError
from drivetrain.core.errors import CheckpointsExistError, FolderInUseError, warn
from drivetrain.core.files import TEMPORARY
from drivetrain.core.locking import FolderLock, lock_held_here
from drivetrain.runtime.collectives import why_not_shared

WRITER_LOCK = "writer.lock"


def prepare_folder(directory: Path, *, fresh: bool) -> FolderLock:
    """Create a folder, test that it can be written, and lock it. With `fresh` it must hold no checkpoint. Called on every rank.

    The caller releases the lock, which is held on rank 0.
    """
    exchange, lock = control_exchange(), FolderLock(directory, WRITER_LOCK)

    def test() -> tuple[str, list[str]]:
        directory.mkdir(parents=True, exist_ok=True)
        _test_writing(directory, 0)
        if not lock.acquire():
            return str(lock.holder), []
        return "", [folder.name for folder in checkpoint_folders(directory)] if fresh else []

    def failed(why: str) -> WriteFailedError:
        if os.path.lexists(directory) and not directory.is_dir():
            why = f"it is {'a link that leads to no folder' if directory.is_symlink() else 'not a folder'}"
        text = f"checkpoint_dir={str(directory)!r} cannot be written: {why}. Choose another folder, or make this one writable."
        return WriteFailedError(text, is_permanent=True)

    try:
        owner, found = exchange.first(test, failed)
        _check_owner(directory, owner)
        if found:
            raise CheckpointsExistError(
                f"checkpoint_dir={str(directory)!r} holds {len(found)} checkpoints of an earlier run ({', '.join(found[:3])}), which a new "
                "run would replace. Continue that run with resume_from='auto', or give every run, and every fold of "
                "a cross-validation, its own checkpoint_dir. overwrite_checkpoints=True replaces them."
            )
        _check_shared(directory, exchange)
    except BaseException:
        lock.release()
        raise
    return lock


def _test_writing(directory: Path, rank: int) -> None:
    probe = directory / f"{TEMPORARY}probe-{rank}"
    replace_file(probe, [])
    probe.unlink(missing_ok=True)


def _check_shared(directory: Path, exchange: RankExchange) -> None:
    """Raise on every rank unless all of them see the lock of rank 0 and can write next to it."""

    def failed(why: str) -> WriteFailedError:
        return WriteFailedError(f"the checkpoint folder {str(directory)!r} cannot be used: {why}.", is_permanent=True)

    if why := why_not_shared(directory, WRITER_LOCK):
        raise failed(why)
    if exchange.size > 1:
        exchange.attempt(lambda: _test_writing(directory, exchange.rank)).checked(failed)


def lock_checkpoint_folder(directory: Path, lock: FolderLock, exchange: RankExchange) -> None:
    """Lock a folder before a run saves in it, or raise on every rank if another process holds it. Called on every rank."""
    _check_owner(directory, exchange.first(lambda: _try_lock_folder(directory, lock)))
    _check_shared(directory, exchange)


def _try_lock_folder(directory: Path, lock: FolderLock) -> str:
    """Lock a folder unless this process holds it already; return who holds it instead, or nothing."""
    held = lock_held_here(directory, WRITER_LOCK)
    try:
        if held is not None and held.is_held():
            return ""
        directory.mkdir(parents=True, exist_ok=True)
        lock = held or lock  # one whose file has vanished is taken again
        return "" if lock.acquire() else str(lock.holder)
    except OSError:  # a disk that is full or gone: the save reports it
        return ""


def _check_owner(directory: Path, owner: str) -> None:
    if owner:
        raise FolderInUseError(
            f"the checkpoint folder {str(directory)!r} is in use: {owner} writes to it, and two runs in one folder would replace and "
            "remove each other's checkpoints. Wait until that run ends, or give this one its own folder. If this is a copy of that run's "
            f"folder, delete the {WRITER_LOCK} in it."
        )


def device_of(directory: Path) -> int | None:
    """Return the number of the disk that holds a folder, or None if the folder does not exist."""
    try:
        return directory.stat().st_dev
    except OSError:
        return None


def check_folder(directory: Path, device: int | None, name: str, exchange: RankExchange, lock: FolderLock) -> None:
    """Raise if a folder is gone, read-only or in use before `name` is saved in it. `device` is the disk it was on."""

    def test() -> tuple[bool, str]:
        is_new = device is not None and not directory.is_dir()  # without a device the first save makes the folder
        if is_new:
            directory.mkdir(parents=True)
            if device_of(directory) != device:
                directory.rmdir()
                raise FileNotFoundError(f"{directory} disappeared, together with its disk")
        elif device is not None and not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} is read-only now")
        return is_new, _try_lock_folder(directory, lock)

    def failed(why: str) -> WriteFailedError:
        way_out = "Make the folder available and continue with resume_from='auto', or use another checkpoint_dir."
        return WriteFailedError(f"{name} was not saved: {why}. {way_out}", is_permanent=True)

    is_new, owner = exchange.first(test, failed)
    _check_owner(directory, owner)
    if is_new:
        warn(
            f"the checkpoint folder {directory} disappeared during the run, with its checkpoints. It is created again for {name}."
        )
