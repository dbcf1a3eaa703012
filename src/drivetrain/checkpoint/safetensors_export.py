"""Weights for other programs: plain safetensors files, split with an index when they are large.

The names are those of the user's own modules and the layout is the one the Hugging Face libraries write and read:
`model.safetensors`, or `model-00001-of-00003.safetensors` and so on next to `model.safetensors.index.json`. Tied
tensors are stored once; the header says which names share a tensor.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.files import replace_tensors, replace_text
from drivetrain.checkpoint.tree import flatten
from drivetrain.core.errors import CheckpointError, ConfigError, unknown_name
from drivetrain.runtime.ranks import is_master

SPLIT_ABOVE = 5 * 10**9
"""Bytes in one file at most; the Hugging Face hub splits there too."""


def export_safetensors(
    source: Any, path: str | Path, names: Sequence[str] = ("model",), *, split_above: int = SPLIT_ABOVE
) -> Path:
    """Write items of a Context and return the file (or the index); on several ranks all call it and rank 0 writes.

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
        raise CheckpointError(
            f"{name} has type {dtype}, which other programs cannot read from safetensors. Convert it."
        )
    if not flat.tensors:
        raise CheckpointError(f"{', '.join(names)} hold no tensors, so there is nothing to export.")
    file.parent.mkdir(parents=True, exist_ok=True)
    return _write(file, flat.tensors, {"format": "pt", **flat.aliases}, split_above)


def _write(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str], split_above: int) -> Path:
    parts = list(_split(tensors, split_above))
    if len(parts) == 1:
        replace_tensors(file, tensors, metadata)
        return file
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"{file.stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        replace_tensors(file.with_name(name), part, metadata)
        weight_map |= dict.fromkeys(part, name)
    index = file.with_name(f"{file.name}.index.json")
    total = sum(map(_num_bytes, tensors.values()))
    replace_text(index, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return index


def _split(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Fill one part after the other; a tensor above the limit has a part to itself."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + _num_bytes(tensor) > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += _num_bytes(tensor)
    yield part


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
