"""The folder that holds checkpoints: tested before a run begins, and watched while it goes on.

A folder that cannot be written is an error before the first step. One that vanishes or becomes read-only later is noticed at the next save,
in the main thread, so that training does not go on for hours without a checkpoint.
"""

import os
import warnings
from pathlib import Path

from drivetrain.checkpoint.exchange import Exchange, control_exchange
from drivetrain.checkpoint.files import replace_text
from drivetrain.checkpoint.layout import checkpoint_folders
from drivetrain.checkpoint.writer import WriteFailedError
from drivetrain.core.errors import CheckpointsExistError, DrivetrainWarning
from drivetrain.core.files import TEMPORARY


def prepare_folder(directory: Path, *, fresh: bool) -> None:
    """Make a folder and test that it can be written; with `fresh` it must hold no checkpoint. Called on every rank."""
    exchange = control_exchange()

    def test() -> list[str]:
        if exchange.rank:
            return []
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f"{TEMPORARY}probe"
        replace_text(probe, "")
        probe.unlink(missing_ok=True)
        return [folder.name for folder in checkpoint_folders(directory)] if fresh else []

    outcome = exchange.attempt(test)
    if outcome.problems:
        raise WriteFailedError(
            f"checkpoint_dir={str(directory)!r} cannot be written: {outcome.explain()}. Choose another folder, or make this one writable.",
            is_permanent=True,
        ) from outcome.own
    found = outcome.results[0]
    if found:
        raise CheckpointsExistError(
            f"checkpoint_dir={str(directory)!r} holds {len(found)} checkpoints of an earlier run ({', '.join(found[:3])}), which a new run "
            "would replace. Continue that run with resume_from='auto', or give every run, and every fold of a cross-validation, a "
            "checkpoint_dir of its own. overwrite_checkpoints=True starts again here and replaces them."
        )


def device_of(directory: Path) -> int | None:
    """Return the number of the disk a folder is on, or None while there is no folder."""
    try:
        return directory.stat().st_dev
    except OSError:
        return None


def check_folder(directory: Path, device: int | None, name: str, exchange: Exchange) -> None:
    """Notice that a folder is gone or read-only before `name` is saved in it; `device` is the disk it was on. Called on every rank."""

    def test() -> bool:
        if exchange.rank or device is None:
            return False  # None: the first save makes the folder
        if directory.is_dir():
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(f"{directory} is read-only now")
            return False
        directory.mkdir(parents=True)
        if device_of(directory) != device:
            directory.rmdir()
            raise FileNotFoundError(f"{directory} has vanished with the disk it was on")
        return True

    outcome = exchange.attempt(test)
    if outcome.problems:
        raise WriteFailedError(
            f"{name} was not saved: {outcome.explain()}. Make the folder available and continue with resume_from='auto', or train into "
            "another checkpoint_dir.",
            is_permanent=True,
        ) from outcome.own
    if outcome.results[0]:
        warnings.warn(
            f"the checkpoint folder {directory} vanished during the run, and the checkpoints in it with it. It is made again for {name}.",
            DrivetrainWarning,
            stacklevel=4,
        )
