"""What a run was made of: command, parameters' origins, code, packages, machine. Written once, at the start."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from drivetrain.core.files import read_limited
from drivetrain.core.secret import hide
from drivetrain.experiment.run_folder import MANIFEST, read_json, write_json

SCHEMA = 1
SOURCE_LIMIT = 64 * 2**20
MAX_DIFF = 500_000
"""Characters of a git diff that are kept; generated files can have millions."""


def describe_run(source: str | None, hidden: Iterable[str], **fields: object) -> dict[str, object]:
    """Return the manifest of a run that begins now: the fields given, and what is known of its code and machine.

    `hidden` are secret texts, which uncommitted changes of the code may hold too.
    """
    git = _git(str(Path(source).parent) if source else os.getcwd())
    return {
        "schema": SCHEMA,
        **fields,
        "source": source,
        "source_sha256": hash_source(source),
        "started": time.time(),
        "plan": None,
        "resumed": [],
        "host": _host(),
        "git": None if git is None else {name: hide(text, hidden) for name, text in git.items()},
        "packages": _packages(),
    }


def hash_source(path: str | Path | None) -> str | None:
    """Return the SHA-256 of a source file, None where it cannot be read."""
    try:
        return None if path is None else hashlib.sha256(read_limited(Path(path).resolve(), SOURCE_LIMIT)).hexdigest()
    except OSError:
        return None


def add_to_manifest(folder: Path, **fields: object) -> None:
    """Set some fields of a run's manifest, such as the plan its strategy chose."""
    write_json(folder / MANIFEST, read_json(folder / MANIFEST) | fields)


def _host() -> dict[str, object]:
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "folder": os.getcwd(),
    }


@functools.cache
def _packages() -> dict[str, str]:
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found[name] = distribution.version
    return dict(sorted(found.items(), key=lambda entry: entry[0].lower()))


@functools.cache
def _git(folder: str) -> dict[str, str] | None:
    """Return commit and uncommitted changes, None outside a repository; the code of a process does not change later."""
    commit = _git_output(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git_output(folder, "diff", "HEAD") or ""
    if len(diff) > MAX_DIFF:
        diff = diff[:MAX_DIFF] + f"\n... {len(diff) - MAX_DIFF} more characters"
    branch = _git_output(folder, "rev-parse", "--abbrev-ref", "HEAD") or ""
    return {"commit": commit.strip(), "branch": branch.strip(), "diff": diff}


def _git_output(folder: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, errors="replace", timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
