"""`history.bin`: the history of a run, in an append-only file next to its checkpoints.

A checkpoint does not contain the history. It refers to this file by name, length and SHA-256, so a save writes only what was
recorded since the last one, however long the run is.

The file has a line that names the format, then blocks: the lengths of header and data, the header in JSON, the data. Each block
names the position in the file that it continues (`after`). A run that resumes from an older checkpoint appends a block that
continues there, and what other checkpoints refer to is not changed: nothing in the file is ever changed or removed.

Data of a series: its steps (int64), its numbers (float64), both little-endian, and one byte for each value with its kind, if not
all are floats. Values that are not numbers are in the header, and their tensors are a safetensors block at the end of the data.
"""

import bisect
import copy
import hashlib
import itertools
import json
import logging
import os
import re
import threading
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from drivetrain.checkpoint.files import flush_folder, safetensors_pieces
from drivetrain.checkpoint.tree import flatten, parse_structure, unflatten
from drivetrain.core.errors import CheckpointError
from drivetrain.core.files import open_regular, open_to_read
from drivetrain.core.types import StateDict
from drivetrain.runtime.codec import pack, unpack

FLOAT, INT, BOOL, OBJECT, TENSOR = 0, 1, 2, 3, 16
"""What a value is; a number in a tensor is TENSOR plus the place of its dtype in this list."""
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_EXACT = 2**53  # every integer up to here is a float64


class Series:
    """Values of one metric, oldest first, and when each was recorded.

    >>> series = Series()
    >>> for step, value in enumerate([0.5, 3, True, "text"]):
    ...     series.append(value, epoch=1, step=step)
    >>> series.values(), series.moments()[-1], len(series)
    ([0.5, 3, True, 'text'], (1, 3), 4)
    """

    def __init__(self) -> None:
        self.numbers, self.steps = array("d"), array("q")
        self.kinds: bytearray | None = None  # what each value is; None while all are floats
        self.objects: dict[int, object] = {}  # values that are not numbers, by position
        self.epochs: list[tuple[int, int]] = []  # the position from which on values belong to an epoch, and the epoch

    def __len__(self) -> int:
        return len(self.numbers)

    def append(self, value: object, epoch: int, step: int) -> None:
        """Append a value. A numpy number becomes a Python number."""
        self.numbers.append(value if type(value) is float else 0.0)
        if self.kinds is not None:
            self.kinds.append(FLOAT)
        if type(value) is not float:
            self.put(len(self.numbers) - 1, value)
        self.steps.append(step)
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((len(self.numbers) - 1, epoch))

    def put(self, position: int, value: Any, dtype: torch.dtype | None = None) -> None:
        """Set a value; with a dtype, to a number from a tensor of that type."""
        if isinstance(value, Tensor):
            value = value.detach()
            if value.numel() == 1 and value.is_cpu and value.dtype in DTYPES:
                value, dtype = value.item(), value.dtype
            else:
                value = value.clone()
        elif not isinstance(value, int | float | str) and hasattr(value, "dtype") and not getattr(value, "shape", True):
            value = value.item()
        if not isinstance(value, int | float) or (isinstance(value, int) and not -_EXACT <= value <= _EXACT):
            self._mark(position, OBJECT)
            self.objects[position] = value if dtype is None else torch.tensor(value, dtype=dtype, device="cpu")
            return
        self.numbers[position] = value
        if dtype is not None:
            self._mark(position, TENSOR + DTYPES.index(dtype))
        elif not isinstance(value, float):
            self._mark(position, BOOL if isinstance(value, bool) else INT)

    def value(self, position: int) -> object:
        """Return one value."""
        kind = FLOAT if self.kinds is None else self.kinds[position]
        if kind == OBJECT:
            return self.objects[position]
        number = self.numbers[position]
        if kind >= TENSOR:
            return torch.tensor(number, dtype=DTYPES[kind - TENSOR], device="cpu")
        return number if kind == FLOAT else int(number) if kind == INT else bool(number)

    def values(self) -> list[object]:
        """Return all values."""
        if self.kinds is None:
            return list(self.numbers)
        kind = self.kinds[0] if self.kinds else FLOAT
        if kind >= TENSOR and self.kinds.count(kind) == len(self):
            numbers = torch.tensor(self.numbers, dtype=torch.float64, device="cpu")
            return list(numbers.to(DTYPES[kind - TENSOR]).unbind())
        return [self.value(at) for at in range(len(self))]

    def moments(self) -> list[tuple[int, int]]:
        """Return the epoch and the step of each value."""
        ends = [start for start, _ in self.epochs[1:]] + [len(self)]
        return [(epoch, step) for (start, epoch), end in zip(self.epochs, ends) for step in self.steps[start:end]]

    def epochs_from(self, position: int) -> list[tuple[int, int]]:
        """Return where epochs begin in the part after a position, relative to it."""
        first = bisect.bisect_right(self.epochs, position, key=lambda run: run[0]) - 1
        return [(max(start - position, 0), epoch) for start, epoch in self.epochs[max(first, 0) :]]

    def copy(self) -> "Series":
        """Return an independent copy."""
        copied = Series()
        vars(copied).update({name: copy.copy(value) for name, value in vars(self).items()})
        return copied

    def _mark(self, position: int, kind: int) -> None:
        if self.kinds is None:
            self.kinds = bytearray(len(self.numbers))
        self.kinds[position] = kind


logger = logging.getLogger(__name__)

MAGIC = b"drivetrain history 1\n"
_LENGTHS = 32  # bytes of the line before a header: two numbers
_NAME = re.compile(r"history(-[1-9]\d{0,5})?\.bin")
_PIECE = 1 << 22


class DamagedHistoryError(CheckpointError):
    """The content of the file differs from what the checkpoint refers to."""


@dataclass(frozen=True)
class Reference:
    """What a checkpoint records about the file."""

    name: str
    size: int
    sha256: str

    @classmethod
    def from_state(cls, state: Any) -> "Reference":
        """Read the reference in a checkpoint, which is untrusted."""
        kinds = {"name": str, "size": int, "sha256": str}
        is_read = isinstance(state, Mapping) and all(type(state.get(name)) is kind for name, kind in kinds.items())
        if not is_read or not _NAME.fullmatch(state["name"]):
            raise CheckpointError(
                f"history: {state!r} does not refer to a history file. Expected name, size and sha256."
            )
        return cls(**{name: state[name] for name in kinds})


@dataclass
class HistoryFile:
    """The file in one folder to which one history appends.

    `prepare` encodes what is new and returns the reference for a checkpoint. `commit` writes and flushes it, and must have returned before
    that checkpoint becomes valid. A commit that failed is made up for by the next one.
    """

    folder: Path
    after: int = 0  # where in the file the values end that this history continues; 0: nowhere
    name: str | None = None  # the file that `after` belongs to
    counts: dict[str, tuple[Series, int]] = field(default_factory=dict)  # how many values of each series the file has
    _end: int = 0
    _written: int = 0
    _waiting: list[bytes] = field(default_factory=list)
    _digest: "hashlib._Hash | None" = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self, series: Mapping[str, Series]) -> Reference:
        """Encode what is not in the file yet, and return the reference to all of it."""
        with self._lock:
            if self._digest is not None and not self._is_whole():
                path = self.folder / str(self.name)
                logger.warning("%s was truncated since it was written; a new file is started.", path)
                self._start_over()
            if self._digest is None:
                self._open()
            assert self._digest is not None and self.name is not None
            block = self._encode(series)
            if block:
                self._waiting.append(block)
                self._digest.update(block)
                self._end += len(block)
                self.after = self._end
            return Reference(self.name, self._end, self._digest.hexdigest())

    def commit(self) -> None:
        """Write what was prepared, and flush it to the disk."""
        with self._lock:
            if not self._waiting:
                return
            assert self.name is not None
            path, is_new = self.folder / self.name, self._written == 0
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
            with os.fdopen(descriptor, "r+b") as file:
                if os.fstat(descriptor).st_size < self._written:
                    self._start_over()
                    raise OSError(f"{path} was truncated since it was written. The next save starts a new file.")
                file.truncate(self._written)  # what a failed write left
                file.seek(self._written)
                for block in self._waiting:
                    file.write(block)
                file.flush()
                os.fsync(descriptor)
            if is_new:
                flush_folder(self.folder)
            self._written, self._waiting = self._end, []

    def _open(self) -> None:
        """Find the file and its end; one that cannot be continued is left alone, and another is started."""
        numbered = (f"history-{number}.bin" if number else "history.bin" for number in itertools.count())
        for name in itertools.chain([] if self.name is None else [self.name], numbered):
            path = self.folder / name
            if not path.exists() and not path.is_symlink():
                self.name, self.after, self.counts = name, 0, {}
                self._digest, self._waiting = hashlib.sha256(MAGIC), [MAGIC]
                self._end, self._written = len(MAGIC), 0
                return
            # A hard link is a copy that another run may continue in its own way.
            can_continue = path.lstat().st_nlink <= 1 and os.access(path, os.W_OK)
            if can_continue and (digest := _whole_digest(path)) is not None:
                self._end = self._written = path.stat().st_size
                self.name, self._digest = name, digest
                return
            if name == self.name:  # its end was cut short while it was written
                self._start_over()

    def _is_whole(self) -> bool:
        """Return whether the file still has what was written to it."""
        try:
            return os.lstat(self.folder / str(self.name)).st_size >= self._written
        except FileNotFoundError:
            return self._written == 0

    def _start_over(self) -> None:
        self.name, self._digest, self._waiting, self.after, self.counts = None, None, [], 0, {}

    def _encode(self, series: Mapping[str, Series]) -> bytes:
        """Return the block of what is new, or nothing."""
        forget = [name for name, (known, _) in self.counts.items() if series.get(name) is not known]
        for name in forget:
            del self.counts[name]
        listed: list[list[object]] = []
        data: list[bytes] = []
        objects: dict[str, object] = {}
        for name, values in series.items():
            start, end = self.counts.get(name, (values, 0))[1], len(values)
            if start == end:
                continue
            kinds = None if values.kinds is None else values.kinds[start:end]
            listed.append([name, end - start, kinds is not None, values.epochs_from(start)])
            data += [
                np.array(values.steps[start:end], "<i8").tobytes(),
                np.array(values.numbers[start:end], "<f8").tobytes(),
            ]
            if kinds is not None:
                data.append(bytes(kinds))
                objects.update(
                    (f"{len(listed) - 1}:{at}", values.objects[start + at])
                    for at, kind in enumerate(kinds)
                    if kind == OBJECT
                )
            self.counts[name] = (values, end)
        if not listed and not forget:
            return b""
        header: dict[str, object] = {"after": self.after, "forget": forget, "series": listed}
        if objects:
            flat = flatten(pack(objects))
            tensors = b"".join(bytes(piece) for piece in safetensors_pieces(flat.tensors)) if flat.tensors else b""
            header |= {"objects": flat.structure, "tensors": len(tensors)}
            data.append(tensors)
        text, body = json.dumps(header, allow_nan=False).encode(), b"".join(data)
        return b"%010d %020d\n" % (len(text), len(body)) + text + body


def read_history(folder: Path, reference: Reference) -> dict[str, Series] | None:
    """Return the series that a checkpoint refers to, None if the file does not exist. A changed file is an error."""
    path = folder / reference.name
    try:
        with open_to_read(path) as file:
            if (size := os.fstat(file.fileno()).st_size) < reference.size:
                raise _damaged(path, f"it has {size:,} bytes, and the checkpoint refers to {reference.size:,}")
            if _digest_of(file, reference.size).hexdigest() != reference.sha256:
                raise _damaged(path, f"its first {reference.size:,} bytes are not those that the checkpoint refers to")
            return _read_chain(file, reference.size, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"the history file {path} cannot be read ({error}). Make it readable, or move it away."
        ) from None


def _read_chain(file: BinaryIO, end: int, path: Path) -> dict[str, Series]:
    """Read the blocks that lead to a place, oldest first."""
    blocks, chain, place = _blocks(file, end, path), [], end
    while place > len(MAGIC):
        after, header_at, data_at = blocks.get(place, (place, 0, 0))
        if after >= place:
            raise _damaged(path, f"no block ends at byte {place}")
        chain.append((header_at, data_at, place))
        place = after
    series: dict[str, Series] = {}
    try:
        for header_at, data_at, block_end in reversed(chain):
            file.seek(header_at)
            header = parse_structure(file.read(data_at - header_at), path.name)
            _apply(header, file.read(block_end - data_at), series)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _damaged(path, f"a block cannot be read ({type(error).__name__}: {error})") from None
    return series


def _blocks(file: BinaryIO, end: int, path: Path) -> dict[int, tuple[int, int, int]]:
    """Return for the end of each block up to a place: what it continues, where its header begins, and where its data does."""
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise _damaged(path, f"it does not begin with {MAGIC.decode().strip()!r}")
    found, place = {}, len(MAGIC)
    while place < end:
        file.seek(place)
        try:
            header_size, data_size = map(int, file.read(_LENGTHS).split())
            after = parse_structure(file.read(header_size), path.name)["after"]
        except (ValueError, KeyError, TypeError, CheckpointError):
            raise _damaged(path, f"the block at byte {place} cannot be read") from None
        data_at = place + _LENGTHS + header_size
        if type(after) is not int or header_size < 0 or data_size < 0 or data_at + data_size > end:
            raise _damaged(path, f"the block at byte {place} is cut short")
        place = data_at + data_size
        found[place] = after, data_at - header_size, data_at
    return found


def _apply(header: StateDict, data: bytes, series: dict[str, Series]) -> None:
    """Add the values of one block."""
    for name in header["forget"]:
        series.pop(name, None)
    at, objects = 0, {}  # the place in the data; values that are not numbers
    if "objects" in header:
        from safetensors.torch import load

        tensors = load(data[len(data) - header["tensors"] :]) if header["tensors"] else {}
        objects = unpack(unflatten(header["objects"], tensors))
    for index, (name, count, has_kinds, epochs) in enumerate(header["series"]):
        values = series.setdefault(name, Series())
        start = len(values)
        values.steps.extend(np.frombuffer(data, "<i8", count, at).tolist())
        values.numbers.extend(np.frombuffer(data, "<f8", count, at + 8 * count).tolist())
        at += 16 * count
        kinds = data[at : at + count] if has_kinds else b""
        at += len(kinds)
        if has_kinds or values.kinds is not None:
            values.kinds = bytearray(start) if values.kinds is None else values.kinds
            values.kinds += kinds or bytes(count)
        values.objects.update({start + k: objects[f"{index}:{k}"] for k, kind in enumerate(kinds) if kind == OBJECT})
        for begin, epoch in epochs:
            if not values.epochs or values.epochs[-1][1] != epoch:
                values.epochs.append((start + begin, epoch))


def _whole_digest(path: Path) -> "hashlib._Hash | None":
    """Return the digest of a file of whole blocks; None for another file, or one whose end was cut short."""
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            _blocks(file, size, path)
        except DamagedHistoryError:
            return None
        return _digest_of(file, size)


def _digest_of(file: BinaryIO, size: int) -> "hashlib._Hash":
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (piece := file.read(min(_PIECE, size))):
        digest.update(piece)
        size -= len(piece)
    return digest


def _damaged(path: Path, problem: str) -> DamagedHistoryError:
    return DamagedHistoryError(
        f"the history file {path} was changed: {problem}. Restore the original file, or move this one away to resume with an empty "
        "history."
    )
