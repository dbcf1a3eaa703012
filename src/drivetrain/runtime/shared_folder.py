"""Whether all ranks see one folder: on several machines each may have a local disk at the same path."""

import os
import socket
import time
from pathlib import Path

from drivetrain.core.locking import owner_of
from drivetrain.runtime.collectives import all_gather_values, broadcast_from_master
from drivetrain.runtime.ranks import get_num_processes, get_rank

PATIENCE_SECONDS = 30.0
"""How long a network file system may take to show a new file on other nodes."""


def why_not_shared(folder: Path, lock: str) -> str | None:
    """Return which ranks do not see the lock that rank 0 holds in a folder and what to do, None where all see it. Called on every rank."""
    if get_num_processes() == 1:
        return None
    host, token = broadcast_from_master([socket.gethostname(), _token(folder, lock) if get_rank() == 0 else ""])
    deadline = time.monotonic() + PATIENCE_SECONDS
    found = not token  # without a lock the disk is full or gone, which a write reports
    while not (found := found or _token(folder, lock) == token) and time.monotonic() < deadline:
        time.sleep(0.1)
    place = "" if found else f"rank {get_rank()} on host {socket.gethostname()} ({os.path.abspath(folder)!r})"
    missing = [place for place in all_gather_values(place) if place]
    if not missing:
        return None
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return (
        f"it is not one folder for all ranks: {shown} did not find there what rank 0 on host {host} wrote. Every rank writes its part. "
        "Choose a folder on a file system that all nodes share, with the same path on each"
    )


def _token(folder: Path, lock: str) -> str:
    try:
        owner = owner_of(folder, lock)
    except OSError:
        return ""
    return "" if owner is None else owner.token
