"""Files that are hashed while they are written, and flushed to the disk when the function returns.

The hash is computed from memory on the way to the file, not from what was read back, so that a faulty disk is detected. Tensors
are written in pieces, directly from their memory, so writing needs no second copy of the state. Hashing and writing both release
the GIL, so that a background save does not slow training. The format is safetensors: eight bytes of length, a JSON header, the
raw values.
"""

import ctypes
import errno
import functools
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from drivetrain.checkpoint.layout import FileEntry
from drivetrain.checkpoint.tree import SAFETENSORS_DTYPES, flatten
from drivetrain.core.errors import CheckpointError, ConfigError, unknown_name
from drivetrain.core.files import atomic_write
from drivetrain.runtime.collectives import bytes_of
from drivetrain.runtime.ranks import is_master

PIECE = 8 * 2**20


def put(stream: BinaryIO, piece: bytes | memoryview) -> None:
    """Write one piece. All bytes of a checkpoint are written here, so that tests can simulate a full disk."""
    stream.write(piece)


def replace_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Replace a file atomically: readers see the old content or the new one."""
    with atomic_write(path) as stream:
        for piece in pieces:
            put(stream, piece)
    flush_folder(path.parent)


def safetensors_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file. Tensors on a device are copied one at a time."""
    # Wide types first: every tensor then lies at a multiple of its own item size.
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in order:
        tensor = tensors[key]
        begin, end = end, end + tensor.nbytes
        dtype, shape = SAFETENSORS_DTYPES[tensor.dtype], list(tensor.shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for key in order:
        if tensors[key].numel():
            data = bytes_of(tensors[key].cpu()).numpy().data  # of a contiguous CPU tensor, not a copy
            for begin in range(0, len(data), PIECE):
                yield data[begin : begin + PIECE]


def write_file(folder: Path, name: str, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file and return its entry for the manifest."""
    digest, size = hashlib.sha256(), 0
    with open(folder / name, "xb") as stream:
        for piece in pieces:
            digest.update(piece)
            put(stream, piece)
            size += len(piece)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(path=name, size=size, sha256=digest.hexdigest())


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable. A system that cannot open folders has nothing to flush."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # file systems that flush files only
            raise
    finally:
        os.close(descriptor)


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange two folders atomically, so that both names exist at every moment. Return False if the system does not support it."""
    rename = _rename_with_flags()
    if rename is None:
        return False
    here = -100  # AT_FDCWD: paths are relative to the current folder
    return rename(here, os.fsencode(first), here, os.fsencode(second), 2) == 0  # RENAME_EXCHANGE


@functools.cache
def _rename_with_flags() -> Callable[[int, bytes, int, bytes, int], int] | None:
    """Return the system's `renameat2`, which Python does not offer."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux, or a C library without it
        return None
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return rename


# ---------------------------------------------------------------------- weights for other programs
# The names are those of the user's own modules and the layout is the one the Hugging Face libraries write and read:
# `model.safetensors`, or `model-00001-of-00003.safetensors` and so on next to `model.safetensors.index.json`. Tied tensors are stored
# once; the header says which names share a tensor.

SPLIT_ABOVE = 5 * 10**9
"""Bytes in one file at most; the Hugging Face hub splits there too."""


def export_safetensors(
    source: Any, path: str | Path, names: Sequence[str] = ("model",), *, split_above: int = SPLIT_ABOVE
) -> Path:
    """Write items of a Context and return the file (or the index). On several ranks all call it and rank 0 writes.

    One item keeps its own names (`encoder.weight`), several begin with theirs (`model.encoder.weight`). `path`
    is a `.safetensors` file or a folder.
    """
    path = Path(path)
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    items = [name for name in (source if isinstance(source, Mapping) else vars(source)) if not name.startswith("_")]
    wrong = [name for name in names if name not in items]
    if wrong or not names:
        raise ConfigError(unknown_name("item", wrong[0] if wrong else "", items, where="export_safetensors"))
    state = source if isinstance(source, Mapping) else source.state_dict(full=True)
    if not is_master():
        return file
    flat = flatten(state[names[0]] if len(names) == 1 else {name: state[name] for name in names})
    if flat.viewed:
        name, dtype = next(iter(flat.viewed.items()))
        raise CheckpointError(f"{name} has type {dtype}, which safetensors of other programs do not have. Convert it.")
    if not flat.tensors:
        raise CheckpointError(f"{', '.join(names)} contain no tensors to export.")
    file.parent.mkdir(parents=True, exist_ok=True)
    return _write_weights(file, flat.tensors, {"format": "pt", **flat.aliases}, split_above)


def _write_weights(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str], split_above: int) -> Path:
    parts = list(_split(tensors, split_above))
    if len(parts) == 1:
        replace_file(file, safetensors_pieces(tensors, metadata))
        return file
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"{file.stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        replace_file(file.with_name(name), safetensors_pieces(part, metadata))
        weight_map |= dict.fromkeys(part, name)
    index = file.with_name(f"{file.name}.index.json")
    total = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    replace_file(index, [text.encode()])
    return index


def _split(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Fill one part after the other; a tensor above the limit has a part to itself."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part
