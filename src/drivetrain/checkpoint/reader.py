"""Find, verify and read checkpoints: the newest valid one is used.

Candidates are ordered by the `sequence` in their manifests, never by file times. Each is verified before anything of it is used; one that
fails is logged with the file and the reason, and the next one is tried. Each rank hashes its share of the files, and all get every failure.

A run may write while its checkpoints are read: a reader whose checkpoint was replaced or removed looks again.
Files of other programs load too: `.pt` and `.pth` through `torch.load(weights_only=True)`, `.safetensors` as a dict of tensors.
"""

import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from drivetrain.checkpoint import layout
from drivetrain.checkpoint.exchange import AttemptResults, RankExchange
from drivetrain.checkpoint.layout import CheckpointNotFoundError, Manifest, Verify
from drivetrain.checkpoint.snapshot import Merge, RankState, read_rank, state_for_rank
from drivetrain.checkpoint.tree import STATE_LIMIT, parse_structure, tensor_names, unflatten
from drivetrain.core.errors import CheckpointError, ResumeError, first_line
from drivetrain.core.files import read_limited
from drivetrain.core.types import StateDict
from drivetrain.runtime.ranks import get_num_processes, get_rank

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds in which a reader looks again when a writer has replaced what it reads."""
LiveState = Callable[[], object]
"""Returns the state into which the checkpoint will be loaded; its sharded tensors show how to split the saved ones."""


class Rejected(NamedTuple):
    """A checkpoint that was skipped, and why."""

    path: Path
    reason: str


@dataclass
class Loaded:
    """The content of one checkpoint."""

    path: Path
    manifest: Manifest
    kind: Literal["context", "dict"]
    state: Any
    run: StateDict | None
    """Parameters, the generator of new seeds and the elapsed time, when it was saved within a run."""
    rank: RankState | None
    rejected: list[Rejected] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CheckpointReader:
    """How checkpoints are read."""

    verify: Verify = "full"
    exchange: RankExchange = field(default_factory=RankExchange)
    """The ranks that read together and must all take the same checkpoint."""
    map_location: torch.device | str = "cpu"
    live: LiveState | None = None
    """Where the layouts of sharded tensors come from; None: they are read whole."""
    merges: Mapping[str, Merge] = field(default_factory=dict)
    """How to convert per-rank values to another number of ranks, by pattern."""
    resume: bool = False
    """Whether each rank continues with its own values, or with new ones if the number of ranks has changed."""

    def read_at(self, find: Callable[[], "CheckpointPath"]) -> Loaded:
        """Read what `find` returns on rank 0, and again if it returns something else afterwards, because a pointer may change."""
        begun = time.monotonic()
        while True:
            place = self.exchange.first(find)
            try:
                return self.read_newest(place.path) if place.kind == "directory" else self.read(place.path)
            except CheckpointError:
                is_late = self.exchange.first(lambda: time.monotonic() - begun > PATIENCE)
                if is_late or self.exchange.first(find) == place:
                    raise

    def read(self, folder: Path) -> Loaded:
        """Verify and read one checkpoint, or raise a `CheckpointError` on all ranks."""
        begun = time.monotonic()
        while True:
            before = self.exchange.first(lambda: _sequence(folder))
            result = self._try(folder)
            if isinstance(result, Loaded):
                return result
            if self._is_replaced(folder, before, begun):
                continue
            if isinstance(result.own, ResumeError):
                raise result.own
            raise CheckpointError(
                f"{folder} cannot be used: {result.explain()}. Give the run folder instead to load its newest valid "
                "checkpoint."
            )

    def read_newest(self, directory: Path) -> Loaded:
        """Read the newest valid checkpoint of a folder. Damaged ones are logged and listed in the result."""
        begun = time.monotonic()
        while True:
            names, broken = self.exchange.first(lambda: _newest_first(directory))
            rejected = [Rejected(directory / name, reason) for name, reason in broken]
            error = ResumeError if self.resume else CheckpointError
            for name, sequence in names:
                result = self._try(directory / name)
                if isinstance(result, Loaded):
                    result.rejected = _logged(rejected)
                    return result
                if self._is_replaced(directory / name, sequence, begun):
                    break
                rejected.append(Rejected(directory / name, result.explain()))
                error = ResumeError if isinstance(result.own, ResumeError) else error
            else:
                if not rejected:
                    raise CheckpointNotFoundError(f"there is no checkpoint in {directory}.")
                listing = "\n".join(f"  {entry.path}: {entry.reason}" for entry in _logged(rejected))
                raise error(f"no checkpoint in {directory} can be used; nothing was loaded.\n{listing}")

    def _is_replaced(self, folder: Path, sequence: int | None, begun: float) -> bool:
        """Return whether a checkpoint that could not be read is another one by now, or gone, and is worth another look."""
        return self.exchange.first(lambda: _sequence(folder) != sequence and time.monotonic() - begun < PATIENCE)

    def _try(self, folder: Path) -> Loaded | AttemptResults:
        """Return the content of a checkpoint, or what went wrong, so that no rank may use it."""
        rank, size, loaded = self.exchange.rank, self.exchange.size, []
        folder = self.exchange.first(lambda: _present(folder))

        def verify() -> None:
            layout.verify_files(folder, layout.read_manifest(folder), self.verify, share=rank, of=size)

        def read() -> int:
            loaded.append(self._read(folder))
            manifest = loaded[0].manifest
            # As text: a metric may be NaN, which differs from itself.
            if layout.read_manifest(folder).to_json() != manifest.to_json():
                raise CheckpointError("it was replaced while it was read")
            return manifest.sequence

        outcome = self.exchange.attempt(verify)
        if not outcome.problems:
            outcome = self.exchange.attempt(read)
        if outcome.problems:
            return outcome
        if len(set(outcome.results)) > 1:
            return outcome._replace(problems={0: "it was replaced while it was read"})
        return loaded[0]

    def _read(self, folder: Path) -> Loaded:
        manifest = layout.read_manifest(folder)
        listed = {entry.path for entry in manifest.files}
        own = self._own_rank(manifest, listed)
        state_file, tensors_file = layout.own_file(layout.STATE, own), layout.own_file(layout.TENSORS, own)
        try:
            content = parse_structure(read_limited(folder / state_file, STATE_LIMIT), state_file)
        except OSError as error:
            raise CheckpointError(f"{state_file} cannot be read ({error})") from None
        if not isinstance(content, dict) or set(content) != {"kind", "state", "run"}:
            raise CheckpointError(f"{layout.STATE} is not the state of a {layout.FORMAT}")
        if content["kind"] not in ("context", "dict"):
            raise CheckpointError(f"{layout.STATE} holds a state of kind {content['kind']!r}")
        tensors = read_safetensors(folder / tensors_file, self.map_location) if tensors_file in listed else {}
        if sharded := tensor_names(content["state"]) - set(tensors):
            tensors |= self._read_sharded(folder, listed, sharded, content["state"])
        rank = self._rank_state(folder, manifest) if layout.rank_file(0) in listed else None
        return Loaded(
            path=folder,
            manifest=manifest,
            kind=content["kind"],
            state=unflatten(content["state"], tensors, rank.local if rank is not None else None),
            run=unflatten(content["run"], {}),
            rank=rank,
        )

    def _own_rank(self, manifest: Manifest, listed: set[str]) -> int:
        """Return whose state this rank reads: rank 0's, unless every rank has its own."""
        if layout.own_file(layout.STATE, 1) not in listed:
            return 0
        rank, size = (self.exchange.rank, self.exchange.size) if self.resume else (get_rank(), get_num_processes())
        if size != manifest.world_size:
            raise ResumeError(
                f"checkpoint {manifest.id} was saved by {manifest.world_size} ranks that hold different parts of the "
                f"model, but there are {size} now. Load it with {manifest.world_size} processes."
            )
        if layout.own_file(layout.STATE, rank) not in listed:
            raise CheckpointError(f"{layout.MANIFEST} does not list {layout.own_file(layout.STATE, rank)}")
        return rank

    def _read_sharded(self, folder: Path, listed: set[str], names: set[str], structure: object) -> dict[str, Tensor]:
        if not any(path.startswith(f"{layout.SHARDS}/") for path in listed):
            raise CheckpointError(f"{layout.TENSORS} lacks {', '.join(sorted(names)[:3])}")
        from drivetrain.checkpoint.sharded import find_layouts, read_parts

        layouts = {} if self.live is None else find_layouts(names, structure, self.live())
        parts = read_parts(folder / layout.SHARDS, sorted(names), layouts)
        return parts if self.live is not None else {name: part.to(self.map_location) for name, part in parts.items()}

    def _rank_state(self, folder: Path, manifest: Manifest) -> RankState:
        wanted = {layout.rank_file(rank) for rank in range(min(manifest.world_size, len(manifest.files) + 1))}
        if missing := wanted - {entry.path for entry in manifest.files}:
            raise CheckpointError(f"{layout.MANIFEST} does not list {min(missing)}")
        if self.resume:
            return state_for_rank(folder, manifest, self.exchange.rank, self.exchange.size, self.merges)
        return read_rank(folder, get_rank() % manifest.world_size)


def _newest_first(directory: Path) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    """Return the readable checkpoints with their numbers, newest first, and those without a usable manifest with the reason."""
    while True:
        order, broken, is_changed = [], [], False
        for folder in layout.checkpoint_folders(directory):
            try:
                order.append((layout.read_manifest(folder).sequence, folder.name))
            except CheckpointError as error:
                # It was there a moment ago, or is there again: a save is replacing it.
                is_changed = is_changed or not folder.is_dir() or _sequence(folder) is not None
                broken.append((folder.name, str(error)))
        if not is_changed:
            return [(name, sequence) for sequence, name in sorted(order, reverse=True)], broken


def _sequence(folder: Path) -> int | None:
    try:
        return layout.read_manifest(folder).sequence
    except CheckpointError:
        return None


def _present(folder: Path) -> Path:
    """Return a checkpoint, or the one that has stepped aside for it and whose replacement is not there yet."""
    aside = folder.with_name(layout.ASIDE + folder.name)
    return aside if not folder.exists() and aside.is_dir() else folder


def _logged(rejected: list[Rejected]) -> list[Rejected]:
    for entry in rejected:
        logger.warning("checkpoint %s is skipped: %s", entry.path, entry.reason)
    return rejected


def read_safetensors(path: Path, map_location: object = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file onto a device."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path, device=str(map_location or "cpu"))
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path.name} cannot be read as safetensors ({error})") from None
    # Tensors on the CPU are the file, mapped into memory. Windows neither removes nor replaces such a file.
    return {name: tensor.clone() for name, tensor in tensors.items()} if os.name == "nt" else tensors


def read_torch_file(path: Path, map_location: Any = "cpu") -> Any:
    """Read a `.pt` file of tensors and plain containers. A file that would run code is rejected."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain containers, and reading it could run code, so it is not read. "
            f"If you trust it, save it again as state dicts. ({first_line(error)})"
        ) from None
    except Exception as error:  # a damaged file can raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{path} cannot be read as a torch file; it is not a checkpoint ({reason})") from None


class CheckpointPath(NamedTuple):
    """Where a checkpoint is: a file, one folder, or the folder that holds several."""

    kind: Literal["file", "checkpoint", "directory"]
    path: Path


def find_checkpoint_path(path: Path) -> CheckpointPath:
    """Return what a path is: a file of tensors, a checkpoint, a run or checkpoint folder, or a pointer."""
    if path.is_symlink() and path.is_dir():  # what the user names may be a link; what lies inside may not
        path = path.resolve()
    if path.suffix in (".pt", ".pth", ".bin", ".safetensors") and path.is_file():
        return CheckpointPath("file", path)
    if path.name in (layout.LAST, layout.BEST) and not path.is_dir():
        target = layout.read_pointer(path.parent, path.name)
        if target is not None:
            return CheckpointPath("checkpoint", target)
    if not path.is_dir() and not _present(path).is_dir():
        raise CheckpointNotFoundError(
            f"{path} does not exist. Expected a checkpoint folder, a run folder, or a .pt, .pth or .safetensors file."
        )
    inner = path / layout.CHECKPOINTS
    if inner.is_dir() or layout.checkpoint_folders(path):  # also a folder of runs that is called checkpoint-...
        return CheckpointPath("directory", inner if inner.is_dir() else path)
    is_checkpoint = path.name.startswith(layout.PREFIX) or (path / layout.STATE).is_file()
    return CheckpointPath("checkpoint" if is_checkpoint else "directory", path)
