"""What belongs to one rank alone, and what becomes of it when the number of ranks changes.

Most of a state is the same on every rank and is written once. Different on each are the random generators (dropout
and augmentations must not repeat between ranks) and what a class declares in `rank_local`, or one object in
`_rank_local`: a tuple of patterns over dotted names such as `"*.partial"`, for gradients gathered in an open
accumulation window, say. These go into one small file per rank.

With another number of ranks there is no right file to read. Generators then start from `derive_seed(seed, name, rank,
sequence)`, which is new on every rank and the same whenever the same checkpoint is taken up again; one that was equal
on all ranks is shared on purpose and stays. `_rank_local` may be a dict that gives a pattern a function: it makes the value
of one rank out of those of all saved ranks. Other values that differed between ranks cannot be continued, and are named in
an error.
"""

import random
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.checkpoint.layout import Manifest, rank_file
from drivetrain.checkpoint.tree import IsLocal, flatten, parse_structure, unflatten
from drivetrain.context.codec import is_packed_generator, pack, unpack
from drivetrain.context.coders import tag_of
from drivetrain.core.errors import CheckpointError, ResumeError
from drivetrain.core.types import StateDict
from drivetrain.runtime.seeds import capture_rng, derive_seed, restore_rng, set_seed

_KEY = "drivetrain"

Merge = Callable[[list[Any], int], Any]
"""Makes the value of one of the new ranks out of those of all saved ranks; raises `ResumeError` where that is not possible."""


class RankState(NamedTuple):
    """The random state of one rank's process, and its own values by name."""

    rng: dict[str, Any]
    local: dict[str, Any]


def local_test(source: object) -> IsLocal:
    """Return the test for values of `source` that belong to one rank alone."""
    patterns = (*getattr(source, "rank_local", ()), *getattr(source, "_rank_local", ()))

    def is_local(path: str, value: object) -> bool:
        if is_packed_generator(value):
            return True
        return bool(patterns) and any(fnmatchcase(path, pattern) for pattern in patterns)

    return is_local


def merges_of(source: object) -> dict[str, Merge]:
    """Return the functions of `source` that make one rank's value out of those of another number of ranks, by pattern."""
    patterns = getattr(source, "_rank_local", ())
    return dict(patterns) if isinstance(patterns, Mapping) else {}


def rank_tensors(local: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what goes into this rank's file: tensors, and a header with their structure."""
    flat = flatten({"rng": capture_rng(), "local": dict(local)})
    return flat.tensors, {_KEY: flat.to_json().decode()}


def read_rank(folder: Path, rank: int) -> RankState:
    """Read the file of one rank."""
    from safetensors import SafetensorError, safe_open

    path = folder / rank_file(rank)
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY, "null")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, RuntimeError) as error:  # torch opens the file a second time
        raise CheckpointError(f"{path.name} cannot be read ({error})") from None
    content = unflatten(parse_structure(text.encode(), path.name), tensors)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("rng", "local")):
        raise CheckpointError(f"{path.name} does not hold a rank's state")
    return RankState(content["rng"], content["local"])


def state_for_rank(
    folder: Path, manifest: Manifest, rank: int, size: int, merges: Mapping[str, Merge] | None = None
) -> RankState:
    """Return what this rank continues with."""
    if size == manifest.world_size:
        return read_rank(folder, rank)
    saved = [read_rank(folder, other) for other in range(manifest.world_size)]
    seed = manifest.seed or 0
    local = {}
    for name in saved[0].local:
        values = [entry.local.get(name) for entry in saved]
        merge = next((merge for pattern, merge in (merges or {}).items() if fnmatchcase(name, pattern)), None)
        local[name] = (
            merge(values, rank) if merge is not None else _for_other_world(name, values, seed, rank, manifest, size)
        )
    return RankState(_fresh_rng(derive_seed(seed, "resume", rank, manifest.sequence)), local)


def _for_other_world(name: str, values: list[Any], seed: int, rank: int, manifest: Manifest, size: int) -> Any:
    first = values[0]
    shared = len(values) > 1 and all(_equal(first, other) for other in values[1:])
    if is_packed_generator(first):
        return first if shared else _fresh_generator(first, derive_seed(seed, name, rank, manifest.sequence))
    if shared:
        return first
    raise ResumeError(
        f"{name} belongs to each rank alone and was saved by {manifest.world_size}; there are {size} now, so it "
        f"cannot be continued exactly. Resume with {manifest.world_size} processes, or from a checkpoint between two "
        "updates."
    )


def _fresh_generator(packed: StateDict, seed: int) -> object:
    """Return the packed state of a generator of the same kind that starts from `seed`."""
    if tag_of(packed) == "generator":
        try:
            generator = torch.Generator(device=packed["value"]["device"])
        except RuntimeError:  # saved on a device that is not here
            generator = torch.Generator()
        return pack(generator.manual_seed(seed))
    if tag_of(packed) == "random":
        return pack(random.Random(seed))
    import numpy as np

    if tag_of(packed) == "numpy_random_state":
        return pack(np.random.RandomState(seed % 2**32))
    return pack(np.random.Generator(type(unpack(packed).bit_generator)(seed)))


def _fresh_rng(seed: int) -> dict[str, object]:
    """Return the state the process's generators have after seeding, without changing them."""
    before = capture_rng()
    try:
        set_seed(seed)
        return capture_rng()
    finally:
        restore_rng(before)


def _equal(left: object, right: object) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping) and left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
        )
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(_equal, left, right))
    return type(left) is type(right) and bool(left == right)
