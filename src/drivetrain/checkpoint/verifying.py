"""Whether a checkpoint folder is whole: its files are those of its manifest, in size and content.

Apart from the reader, because this needs no torch: a command that lists or shows runs starts without it.
"""

import hashlib
from pathlib import Path
from typing import Literal, get_args

from drivetrain.checkpoint.layout import MANIFEST, SHARDS, STATE, Manifest, file_inside, read_manifest
from drivetrain.core.errors import CheckpointError, ConfigError, unknown_name
from drivetrain.core.files import is_regular, open_to_read

Verify = Literal["full", "size", "off"]


def check_verify(verify: str) -> Verify:
    """Return a verification mode, or say which there are."""
    if verify not in get_args(Verify):
        raise ConfigError(unknown_name("mode", verify, get_args(Verify), where="verify"))
    return verify  # type: ignore[return-value]


def problem_with(folder: Path, verify: Verify = "full") -> str | None:
    """Return what is wrong with a checkpoint folder, or None when it is whole."""
    try:
        verify_files(folder, read_manifest(folder), verify)
    except CheckpointError as error:
        return str(error)
    return None


def verify_files(folder: Path, manifest: Manifest, verify: Verify, *, share: int = 0, of: int = 1) -> None:
    """Check that the files are those of the manifest; of their contents, share `share` of `of` is hashed here."""
    listed = {entry.path: file_inside(folder, entry.path) for entry in manifest.files}
    if STATE not in listed:
        raise CheckpointError(f"{MANIFEST} does not list {STATE}")
    for name, path in listed.items():
        if not is_regular(path):
            raise CheckpointError(f"{name} is {'not a regular file' if path.exists() else 'missing'}")
    if verify == "off":
        return
    for entry in manifest.files:
        path = listed[entry.path]
        if (size := path.stat().st_size) != entry.size:
            raise CheckpointError(f"{entry.path} has {size} bytes instead of {entry.size}")
    shards = folder / SHARDS
    unlisted = {f"{SHARDS}/{path.name}" for path in shards.iterdir()} - set(listed) if shards.is_dir() else set()
    if unlisted:
        raise CheckpointError(f"{min(unlisted)} is not listed in {MANIFEST}")
    if verify == "full":
        for entry in manifest.files[share::of]:
            try:
                digest = hash_file(listed[entry.path])
            except OSError as error:
                raise CheckpointError(f"{entry.path} cannot be read ({error})") from None
            if digest != entry.sha256:
                raise CheckpointError(f"{entry.path} does not match its SHA-256")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_to_read(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
