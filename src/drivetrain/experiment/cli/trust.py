"""Whether the file that a run names may be run.

`drivetrain resume` imports the file in which a run's experiment is defined, and importing a file runs it. The run folder, which may
come from somebody else, says which file that is. So the file is shown first, and one that others could have written is not run
unless the user says that it is trusted.
"""

import os
import stat
from pathlib import Path

from drivetrain.core.errors import ResumeError
from drivetrain.experiment.manifest import hash_source
from drivetrain.experiment.records import RunRecord, is_run


def source_of(record: RunRecord) -> Path:
    """Return the file that defines a run's experiment, as a full path."""
    source = record.manifest.get("source")
    if not source:
        raise ResumeError(
            f"the run {record.folder} does not say which file its experiment is in (it was started from a prompt?). Start the program "
            f"again with --resume {record.folder}."
        )
    path = Path(source)
    if path.suffix != ".py":  # a module's name would be looked for in the present folder
        raise ResumeError(f"the run {record.folder} names the file {source!r}, which is not a Python file (.py).")
    return Path(os.path.abspath(path))


def describe_source(record: RunRecord, path: Path) -> list[str]:
    """Return lines that say what resuming a run will execute: file, function, command, and whether the file has changed."""
    now, then = hash_source(path), record.manifest.get("source_sha256")
    if then is None:
        change = f"sha256 {now}; the run did not record the file's hash, so it is not known whether it has changed"
    elif then == now:
        change = f"sha256 {now}, unchanged since the run"
    else:
        change = f"CHANGED since the run: sha256 was {then}, is {now}"
    return [
        f"file        {path}",
        f"            {change}",
        f"function    {record.manifest.get('function') or record.experiment}",
        f"command     {' '.join(map(str, record.manifest.get('argv') or ['not recorded']))}",
    ]


def reasons_for_distrust(path: Path) -> list[str]:
    """Return why somebody else may have written a file; none where only this user or root can have."""
    real = path.resolve()
    reasons = [
        f"it lies inside the run folder {folder}, which its author filled"
        for folder in dict.fromkeys((*path.parents, *real.parents))
        if is_run(folder)
    ]
    if not hasattr(os, "geteuid"):  # Windows, where these permissions mean nothing
        return reasons
    try:
        facts = real.stat()
        folders = [(folder, folder.stat().st_mode) for folder in real.parents]
    except OSError:
        return reasons  # it does not exist, which is said when it is loaded
    if facts.st_uid not in (os.geteuid(), 0):
        reasons.append(f"it belongs to another user ({facts.st_uid})")
    if facts.st_mode & stat.S_IWOTH:
        reasons.append("every user can write to it")
    open_folders = [folder for folder, mode in folders if mode & stat.S_IWOTH and not mode & stat.S_ISVTX]
    reasons += [f"every user can replace files in {folder}" for folder in open_folders]
    return reasons


def check_trust(path: Path) -> None:
    """Raise a `ResumeError` for a file that somebody else may have written."""
    reasons = reasons_for_distrust(path)
    if reasons:
        raise ResumeError(
            f"{path} is not run: {'; '.join(reasons)}. Read the file; if you trust it, resume again with --trust, or start your own "
            "copy of the program with --resume."
        )
