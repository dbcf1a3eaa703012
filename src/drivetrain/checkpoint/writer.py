"""Write one checkpoint atomically.

Everything is written to a temporary folder (`.tmp-*`) and flushed, the manifest last. When every rank has reported its files, one
rename turns the folder into a checkpoint, and the pointers are updated. A process may die at any moment: it leaves an earlier
checkpoint and possibly temporary files whose names begin with a dot, which the next save removes. The temporary folder is locked
while it is being written, and the lock is released when the process ends, so the cleanup never removes a folder that is still
being written.
"""

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from drivetrain.checkpoint import layout
from drivetrain.checkpoint.exchange import Failure, RankExchange
from drivetrain.checkpoint.files import exchange_names, flush_folder, replace_file, safetensors_pieces, write_file
from drivetrain.checkpoint.layout import Best, FileEntry, Manifest
from drivetrain.core.errors import CheckpointError
from drivetrain.core.files import TEMPORARY, create_locked_temporary, lock_path, rename_over
from drivetrain.core.types import StateDict
from drivetrain.runtime.device import PINNED

logger = logging.getLogger(__name__)

SPARE = 2**20
"""Bytes that must stay free next to the checkpoint: headers, manifest, pointers."""


class WriteFailedError(CheckpointError):
    """A checkpoint could not be written. Earlier ones are untouched.

    A permanent failure (a folder that is gone or read-only) does not go away by itself, so that trying again is of no use.
    """

    def __init__(self, message: str, *, is_permanent: bool = False):
        super().__init__(message)
        self.is_permanent = is_permanent


@dataclass(kw_only=True)
class Snapshot:
    """Everything that one rank puts into a checkpoint, taken at one moment."""

    state: bytes
    """The text of `state.json`; rank 0's is written."""
    is_own: bool = False
    """Whether this rank's state differs from the others' and is written too."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Whole tensors; on rank 0 only, unless every rank has its own."""
    shards: dict[str, Tensor] = field(default_factory=dict)
    """This rank's parts of tensors that are split over ranks."""
    shard_metadata: dict[str, str] = field(default_factory=dict)
    local_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Random states and other values of this rank alone, with the structure they have in `local_metadata`."""
    local_metadata: dict[str, str] = field(default_factory=dict)
    header: StateDict = field(default_factory=dict)
    """Fields of the manifest: run, progress, seed, metrics, versions."""
    write_side_file: Callable[[], None] | None = None
    """Writes and flushes what the state refers to in a file next to the checkpoints; on rank 0 only."""
    is_sharded: bool = False
    """Whether some tensors are split over ranks, also when this rank has no part of them."""

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of this rank by the file they go to."""
        return {"tensors": self.tensors, "shards": self.shards, "local": self.local_tensors}

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank writes."""
        return len(self.state) + sum(tensor.nbytes for part in self.parts().values() for tensor in part.values())


def write_checkpoint(
    directory: Path, id: object, snapshot: Snapshot, exchange: RankExchange | None = None, *, best: Best | None = None
) -> Path:
    """Write a checkpoint into `directory` and return its folder. Called on every rank of the exchange.

    A disk that fails raises `WriteFailedError` on all ranks and leaves nothing behind.
    """
    exchange = exchange or RankExchange()
    name = layout.checkpoint_name(id)
    exchange.meet(f"saving {name}")

    def failed(why: str) -> WriteFailedError:
        return WriteFailedError(f"{name} was not saved in {directory}: {why}. Earlier checkpoints are untouched.")

    with _locked_temporary(directory, name, exchange, failed) as temporary:
        sizes = exchange.attempt(lambda: (snapshot.num_bytes, shutil.disk_usage(directory).free)).checked(failed)
        needed, free = sum(needed for needed, _ in sizes) + SPARE, sizes[0][1]
        if needed > free:
            raise WriteFailedError(
                f"{name} was not saved: it needs {needed:,} bytes and {directory} has {free:,} free. Free some space, keep "
                "fewer checkpoints (keep=), or save into another folder (dir=)."
            )
        parts = exchange.attempt(lambda: _write_parts(temporary, snapshot, exchange.rank)).checked(failed)
        files = [entry for part in parts for entry in part]
        exchange.first(lambda: _commit(directory, name, temporary, files, snapshot, exchange.size, best), failed)
    return directory / name


@contextmanager
def _locked_temporary(directory: Path, name: str, exchange: RankExchange, failed: Failure) -> Iterator[Path]:
    """Make a locked folder aside on rank 0 and name it to all ranks; whatever is left of it afterwards is removed."""
    lock = None

    def make() -> str:
        nonlocal lock
        directory.mkdir(parents=True, exist_ok=True)
        sweep(directory)
        path, lock = create_locked_temporary(directory / name, Path.mkdir)
        return path.name

    temporary = directory / exchange.first(make, failed)
    try:
        yield temporary
    finally:
        if exchange.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def sweep(directory: Path) -> None:
    """Remove temporary files of dead processes, and restore a checkpoint whose replacement was interrupted."""
    for path in directory.glob(f"{layout.ASIDE}{layout.PREFIX}*"):
        home = directory / path.name.removeprefix(layout.ASIDE)
        if home.exists():
            remove_folder(path)
        else:
            rename_over(path, home)
            logger.warning("%s was moved aside by an interrupted save and has been restored.", home)
    for path in directory.glob(f"{layout.REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # a living writer or another user holds it; without locks nobody knows, so it stays
            lock = lock_path(path)
            try:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            finally:
                os.close(lock)


def remove_folder(path: Path) -> None:
    """Remove a checkpoint atomically for readers: it is renamed first."""
    gone = path.with_name(f"{layout.REMOVED}{path.name.lstrip('.')}-{secrets.token_hex(4)}")
    rename_over(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _write_parts(temporary: Path, snapshot: Snapshot, rank: int) -> list[FileEntry]:
    files = []
    if snapshot.write_side_file is not None:
        snapshot.write_side_file()
    if rank == 0 or snapshot.is_own:
        files.append(write_file(temporary, layout.own_file(layout.STATE, rank), [snapshot.state]))
        if snapshot.tensors:
            name = layout.own_file(layout.TENSORS, rank)
            files.append(write_file(temporary, name, safetensors_pieces(snapshot.tensors)))
    if snapshot.shards:
        (temporary / layout.SHARDS).mkdir(exist_ok=True)
        name = f"{layout.SHARDS}/rank-{rank:05d}.safetensors"
        files.append(write_file(temporary, name, safetensors_pieces(snapshot.shards, snapshot.shard_metadata)))
    if snapshot.local_metadata:
        pieces = safetensors_pieces(snapshot.local_tensors, snapshot.local_metadata)
        files.append(write_file(temporary, layout.rank_file(rank), pieces))
    return files


def _commit(
    directory: Path,
    name: str,
    temporary: Path,
    files: list[FileEntry],
    snapshot: Snapshot,
    world_size: int,
    best: Best | None,
) -> None:
    """Write the manifest, rename the folder into its place and update the pointers; on rank 0."""
    manifest = Manifest(
        id=name.removeprefix(layout.PREFIX),
        sequence=max((known.sequence for known in known_checkpoints(directory).values()), default=0) + 1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=world_size,
        files=tuple(sorted(files, key=lambda entry: entry.path)),
        **snapshot.header,
    )
    if (temporary / layout.SHARDS).is_dir():
        flush_folder(temporary / layout.SHARDS)
    write_file(temporary, layout.MANIFEST, [manifest.to_json()])
    flush_folder(temporary)
    _rename_in(temporary, directory / name)
    flush_folder(directory)
    try:
        replace_file(directory / layout.LAST, [f"{name}\n".encode()])
        if best is not None and (leader := layout.best_checkpoint(known_checkpoints(directory), best)) is not None:
            replace_file(directory / layout.BEST, [f"{leader.name}\n".encode()])
    except OSError as error:  # the checkpoint is whole and will be found by its sequence
        logger.warning("%s is saved, but its pointer files could not be updated: %s", name, error)


def _rename_in(temporary: Path, target: Path) -> None:
    """Put the new folder in place; one of the same name is exchanged with it, or steps aside first where that is not possible."""
    if not target.exists():
        rename_over(temporary, target)
        return
    if exchange_names(temporary, target):
        return  # the old one is removed with what is left of the temporary folder
    aside = target.with_name(layout.ASIDE + target.name)
    rename_over(target, aside)
    try:
        rename_over(temporary, target)
    except OSError:
        rename_over(aside, target)
        raise
    remove_folder(aside)


def known_checkpoints(directory: Path) -> Mapping[Path, Manifest]:
    """Return the checkpoints here that have a valid manifest, oldest first. Files are not checked."""
    known: dict[Path, Manifest] = {}
    for folder in layout.checkpoint_folders(directory):
        try:
            known[folder] = layout.read_manifest(folder)
        except CheckpointError:
            continue
    return dict(sorted(known.items(), key=lambda item: item[1].sequence))


# ---------------------------------------------------------------------- saving during training
# A copy in host memory is made now, the file is written in a thread. Training is held only while the state is copied. The host buffers are
# made once (pinned where the tensors are on an accelerator) and used again for every save. Device copies are queued behind the work that
# made the values and before the next update; the thread, not the training, waits for them.


class HostBuffers:
    """Host memory for one snapshot at a time, reused between saves."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def stage(self, snapshot: Snapshot) -> Callable[[], None]:
        """Copy the snapshot's tensors into host buffers. The returned function waits until all copies are complete.

        After this the values of the snapshot no longer change with the live ones. Copies from a device are in its
        stream, so later work on that stream cannot overtake them.
        """
        used: dict[tuple[str, str], Tensor] = {}
        devices: set[torch.device] = set()
        for part, tensors in snapshot.parts().items():
            for name, live in tensors.items():
                buffer = self._buffers.get((part, name))
                if buffer is None or buffer.shape != live.shape or buffer.dtype != live.dtype:
                    buffer = torch.empty(
                        live.shape, dtype=live.dtype, device="cpu", pin_memory=live.device.type in PINNED
                    )
                buffer.copy_(live, non_blocking=live.device.type in PINNED)
                tensors[name] = used[part, name] = buffer
                if live.device.type in PINNED:
                    devices.add(live.device)
        self._buffers = used
        events = [torch.accelerator.current_stream(device).record_event() for device in devices]

        def arrived() -> None:
            for event in events:
                event.synchronize()

        return arrived


class BackgroundJob:
    """One job at a time in a thread. Its error is kept for the main thread.

    The thread is not a daemon: a program that ends waits for its last checkpoint.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], object], name: str) -> None:
        """Run a job in the background. The previous one must have ended."""
        assert not self.is_busy
        self._thread = threading.Thread(target=self._run, args=(job, name), name=f"drivetrain {name}")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current job."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> BaseException | None:
        """Return the error of a finished job, once."""
        error, self._error = self._error, None
        return error

    def _run(self, job: Callable[[], object], name: str) -> None:
        try:
            job()
        except Exception as error:
            # Also logged here: when the program is ending no caller will ask for the error.
            logger.error("%s failed in the background: %s", name, error)
            self._error = error
