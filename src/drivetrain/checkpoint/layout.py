"""What a checkpoint folder looks like: its names, its two pointers, and the manifest that makes it one, and whether its files match that.

    checkpoints/
      checkpoint-ep3-ba1200/
        manifest.json                written last: without it the folder is not a checkpoint
        state.json                   structure and plain values
        tensors.safetensors          tensors that are whole on one rank
        state-rank-00001.json, ...   the same of other ranks, where they hold different names (pipeline stages)
        shards/*.safetensors         tensors that are split over ranks, one file per rank
        rng-rank-00000.safetensors   random states, and what else belongs to one rank alone
      last, best                     one line each: the name of a folder next to them
      .tmp-*, .old-*, .del-*         being written, being replaced, being removed

Nothing here trusts a file: a manifest is plain JSON with its own hash, a path in it that would leave the folder is
rejected, and a link, FIFO or device is never opened. No torch is needed: a command that lists or shows runs starts without it.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, Self, get_args

from drivetrain.core.arguments import check_choice
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.files import is_regular, open_to_read, read_limited
from drivetrain.core.time import Interval, Time
from drivetrain.core.types import StateDict

FORMAT = "drivetrain-checkpoint"
VERSION = 1

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = "tensors.safetensors"
SHARDS = "shards"
LAST = "last"
BEST = "best"
PREFIX = "checkpoint-"
ASIDE = ".old-"
REMOVED = ".del-"

MANIFEST_LIMIT = 64 * 2**20
"""Bytes; a larger manifest is invalid and is not read."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this path."""

    __str__ = Exception.__str__  # OSError would look for an errno


def checkpoint_name(id: object) -> str:
    """Return the folder name for an id, which is a number or a short plain text."""
    text = str(id)
    if isinstance(id, bool) or not isinstance(id, str | int) or not _PLAIN_NAME.fullmatch(text):
        raise ConfigError(
            f"checkpoint id: {id!r} cannot be a folder name. Expected a whole number, or up to 200 letters, digits and "
            "._=+- that begin with a letter or digit, such as 'ep3-ba1200'."
        )
    return PREFIX + text


def rank_file(rank: int) -> str:
    """Return the name of the file that holds one rank's own values."""
    return f"rng-rank-{rank:05d}.safetensors"


def own_file(name: str, rank: int) -> str:
    """Return the name of a file that each rank has separately. Rank 0's is the plain name."""
    stem, dot, suffix = name.partition(".")
    return name if rank == 0 else f"{stem}-rank-{rank:05d}{dot}{suffix}"


def file_inside(folder: Path, relative: str) -> Path:
    """Return a file named in a manifest. A name that could lead out of the folder is an error."""
    pure = PurePosixPath(relative)
    if not relative or pure.is_absolute() or ".." in pure.parts or not set("\\\0:").isdisjoint(relative):
        raise CheckpointError(
            f"{folder / MANIFEST} names the file {relative!r}, which is outside the checkpoint. Nothing was read."
        )
    path = folder / pure
    for part in (path, *path.parents[: len(pure.parts) - 1]):
        if part.is_symlink():
            raise CheckpointError(f"{part} is a link, and links in a checkpoint are not followed.")
    return path


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint: where it is, how long, and its SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint."""

    id: str
    sequence: int
    """Increases with every save in one folder; it decides which checkpoint is the newest."""
    run: str = ""
    created: str = ""
    progress: Mapping[str, float] = field(default_factory=dict)
    """How far the run was, by unit: those of `TimeUnit` that it counts."""
    world_size: int = 1
    seed: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return int(self.progress.get("ep", 0))

    @property
    def step(self) -> int:
        """Optimizer steps if they were counted, else batches."""
        return int(self.progress.get("st", self.progress.get("ba", 0)))

    @property
    def samples(self) -> int:
        """Samples seen."""
        return int(self.progress.get("sp", 0))

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(entry.size for entry in self.files)

    def to_json(self) -> bytes:
        """Return the text of `manifest.json`, which ends with the hash of everything before it."""
        content: StateDict = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["metrics"] = {tag: one if math.isfinite(one) else repr(one) for tag, one in self.metrics.items()}
        content["sha256"] = _content_hash(content)
        return json.dumps(content, indent=1, allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read a manifest. Anything that is not exactly one raises with the reason."""
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is not readable JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{MANIFEST} is not the manifest of a {FORMAT}")
        if (version := content.get("version")) != VERSION:
            raise CheckpointError(f"{MANIFEST} has format version {version!r}; this library reads {VERSION}")
        stated = content.pop("sha256", None)
        try:
            actual = _content_hash(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} cannot be hashed ({error})") from None
        if stated != actual:
            raise CheckpointError(f"{MANIFEST} does not match its own hash")
        return cls._checked(content)

    @classmethod
    def _checked(cls, content: StateDict) -> Self:
        """The hash only shows that the text is whole; a forged manifest has a good one, so every field is looked at."""
        given = {key: value for key, value in content.items() if key not in ("format", "version")}
        if wrong := set(given) ^ set(_FIELD_TYPES):
            raise CheckpointError(f"{MANIFEST} has wrong fields: {sorted(wrong)}")
        for key, kind in _FIELD_TYPES.items():
            if type(given[key]) is not kind and not (key == "seed" and given[key] is None):
                raise CheckpointError(f"{MANIFEST}: {key} is a {type(given[key]).__name__}, expected {kind.__name__}")
        for key, least in {"sequence": 0, "world_size": 1}.items():
            if given[key] < least:
                raise CheckpointError(f"{MANIFEST}: {key} is {given[key]}, below {least}")
        try:
            checkpoint_name(given["id"])
        except ConfigError as error:
            raise CheckpointError(f"{MANIFEST}: {error}") from None
        given["progress"], given["metrics"] = _numbers(given, "progress"), _numbers(given, "metrics")
        for unit, value in given["progress"].items():
            if not math.isfinite(value):
                raise CheckpointError(f"{MANIFEST}: progress.{unit} is {value}, expected a finite number")
        given["versions"] = {name: str(value) for name, value in given["versions"].items()}
        given["files"] = tuple(map(_file_entry, given["files"]))
        return cls(**given)


_FIELD_TYPES: dict[str, type] = {
    **dict.fromkeys(("id", "run", "created"), str),
    **dict.fromkeys(("sequence", "world_size", "seed"), int),
    **dict.fromkeys(("progress", "metrics", "versions"), dict),
    "files": list,
}


def _content_hash(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _numbers(content: StateDict, key: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in content[key].items():
        if value in ("nan", "inf", "-inf"):
            value = float(value)
        if type(value) not in (int, float):
            raise CheckpointError(f"{MANIFEST}: {key}.{name} is {value!r}, expected a number")
        values[name] = value
    return values


def _file_entry(entry: object) -> FileEntry:
    if not isinstance(entry, dict) or set(entry) != {"path", "size", "sha256"}:
        raise CheckpointError(f"{MANIFEST}: an entry of files is not {{path, size, sha256}}")
    path, size, sha256 = entry["path"], entry["size"], entry["sha256"]
    if type(path) is not str or type(size) is not int or size < 0:
        raise CheckpointError(f"{MANIFEST}: the entry for file {path!r} is malformed")
    if type(sha256) is not str or not _SHA256.fullmatch(sha256):
        raise CheckpointError(f"{MANIFEST}: the hash of file {path!r} is malformed")
    return FileEntry(path=path, size=size, sha256=sha256)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder; the error names what is wrong with it."""
    path = folder / MANIFEST
    try:
        if folder.is_symlink():
            raise CheckpointError(f"{folder.name} is a link, and links next to checkpoints are not followed")
        return Manifest.from_json(read_limited(path, MANIFEST_LIMIT))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error})") from None


def _names_checkpoint(name: str) -> bool:
    return name.startswith(PREFIX) and _PLAIN_NAME.fullmatch(name.removeprefix(PREFIX)) is not None


def read_pointer(directory: Path, pointer: str) -> Path | None:
    """Return the folder that `last` or `best` names, or None if there is no such pointer."""
    try:
        with open_to_read(directory / pointer) as stream:
            name = stream.read(512).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the pointer {directory / pointer} cannot be read ({error}). Delete it, or name a folder."
        ) from None
    if not _names_checkpoint(name):
        raise CheckpointError(
            f"the pointer {directory / pointer} holds {name!r}, which is not the name of a checkpoint. Delete it."
        )
    return directory / name


def checkpoint_folders(directory: Path) -> list[Path]:
    """List possible checkpoints here, including one that was moved aside when its replacement was interrupted.

    A folder that changes while it is listed may show neither the checkpoint that comes nor the one that goes. One with the pointer `last`
    has at least one, so that an empty list is made again.
    """
    found: list[Path] = []
    for _ in range(20):
        try:
            entries = [(entry, entry.name.removeprefix(ASIDE)) for entry in directory.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = sorted(entry for entry, name in entries if _names_checkpoint(name) and entry.is_dir())
        if found or not (directory / LAST).exists():
            break
    return found


Verify = Literal["full", "size", "off"]


def check_verify(verify: str) -> Verify:
    """Return a verification mode, or raise an error that lists the valid ones."""
    return check_choice("verify", verify, get_args(Verify))  # type: ignore[return-value]


def problem_with(folder: Path, verify: Verify = "full") -> str | None:
    """Return what is wrong with a checkpoint folder, or None if it is valid."""
    try:
        verify_files(folder, read_manifest(folder), verify)
    except CheckpointError as error:
        return str(error)
    return None


def verify_files(folder: Path, manifest: Manifest, verify: Verify, *, share: int = 0, of: int = 1) -> None:
    """Check that the files match the manifest. Share `share` of `of` of their contents is hashed here."""
    listed = {entry.path: file_inside(folder, entry.path) for entry in manifest.files}
    if STATE not in listed:
        raise CheckpointError(f"{MANIFEST} does not list {STATE}")
    for name, path in listed.items():
        if not is_regular(path):
            raise CheckpointError(f"{name} is {'not a regular file' if path.exists() else 'missing'}")
    if verify == "off":
        return
    for entry in manifest.files:
        if (size := listed[entry.path].stat().st_size) != entry.size:
            raise CheckpointError(f"{entry.path} has {size} bytes instead of {entry.size}")
    shards = folder / SHARDS
    unlisted = {f"{SHARDS}/{path.name}" for path in shards.iterdir()} - set(listed) if shards.is_dir() else set()
    if unlisted:
        raise CheckpointError(f"{min(unlisted)} is not listed in {MANIFEST}")
    if verify == "full":
        for entry in manifest.files[share::of]:
            try:
                with open_to_read(listed[entry.path]) as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(f"{entry.path} cannot be read ({error})") from None
            if digest != entry.sha256:
                raise CheckpointError(f"{entry.path} does not match its SHA-256")


# ---------------------------------------------------------------------- which checkpoints stay
# The newest few, the best one, and one in every so often. A checkpoint opens an interval of `keep_every` when it is the first at or after
# a multiple; that first one is always kept, so the choice does not change when others are removed around it.


@dataclass(frozen=True)
class Best:
    """The metric that selects the best checkpoint, and whether it is minimized or maximized."""

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("min", "max"))


def best_checkpoint(checkpoints: Mapping[Path, Manifest], best: Best) -> Path | None:
    """Return the folder with the best value, the earliest among equals. A NaN is never the best."""
    sign = 1 if best.mode == "min" else -1
    scored = [
        (sign * manifest.metrics[best.metric], manifest.sequence, folder)
        for folder, manifest in checkpoints.items()
        if not math.isnan(manifest.metrics.get(best.metric, math.nan))
    ]
    return min(scored)[2] if scored else None


def milestones(checkpoints: Mapping[Path, Manifest], every: Time) -> set[Path]:
    """Return the first checkpoint at or after each multiple of `every`."""
    first: dict[int, Path] = {}
    for folder, manifest in sorted(checkpoints.items(), key=lambda item: item[1].sequence):
        interval = Interval(every).multiples(manifest.progress.get(every.unit.value, 0))
        if interval > 0:
            first.setdefault(interval, folder)
    return set(first.values())


def to_remove(
    checkpoints: Mapping[Path, Manifest], *, keep: int | None, best: Best | None = None, keep_every: Time | None = None
) -> list[Path]:
    """Return the folders that can be removed, oldest first. `keep=None` keeps all."""
    if keep is None:
        return []
    newest_first = sorted(checkpoints, key=lambda folder: checkpoints[folder].sequence, reverse=True)
    stays = set(newest_first[:keep])
    if best is not None and (leader := best_checkpoint(checkpoints, best)) is not None:
        stays.add(leader)
    if keep_every is not None:
        stays |= milestones(checkpoints, keep_every)
    return [folder for folder in reversed(newest_first) if folder not in stays]
