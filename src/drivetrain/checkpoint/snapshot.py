"""What a checkpoint holds, taken at one moment: the state, the run around it, and this rank's random generators.

A source is a Context (anything with `state_dict()`), or a dict. From a Context the checkpoint also keeps what it
takes to continue the run as if nothing had happened; from a dict it keeps the dict.

What only grows, such as the history of a run, is in a side file next to the checkpoints, and a checkpoint refers to it. A Context has at
most one item of this kind, as `_side_file`. While a checkpoint is taken, its `state_dict` returns a reference that rank 0 prepared; what
the reference covers is written and flushed before the checkpoint becomes valid.
"""

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from drivetrain.checkpoint.exchange import RankExchange
from drivetrain.checkpoint.layout import Manifest, rank_file
from drivetrain.checkpoint.tree import FlatState, IsLocal, flatten, parse_structure, unflatten
from drivetrain.checkpoint.writer import Snapshot, WriteFailedError
from drivetrain.context.context import Context
from drivetrain.core.errors import CheckpointError, ConfigError, ResumeError, StateError
from drivetrain.core.types import StateDict
from drivetrain.runtime.codec import is_packed_generator, pack
from drivetrain.runtime.coders import GENERATORS, TAG
from drivetrain.runtime.run import ExperimentRun, current_run
from drivetrain.runtime.seeds import capture_rng, derive_seed, preserve_rng_state, same_state, set_seed


def take_snapshot(
    source: Any,
    exchange: RankExchange | None = None,
    *,
    folder: Path | None = None,
    metrics: Mapping[str, object] | None = None,
    progress: Mapping[str, float] | None = None,
) -> Snapshot:
    """Split a source into the parts that this rank saves. Tensors are those of the source, not copies.

    Ranks that save a Context together meet here. Usually all of them hold the same names and rank 0 keeps the tensors;
    where they differ (stages of a pipeline) each keeps its own. `folder` is where the checkpoint goes: what only grows is in a file there.
    """
    exchange = exchange or RankExchange()
    is_context = not isinstance(source, Mapping)
    try:
        with with_side_file_reference(source, folder, exchange) as write_side_file:
            state = source.state_dict() if is_context else pack(source if isinstance(source, dict) else dict(source))
    except StateError as error:
        if is_context:
            raise
        raise CheckpointError(f"this state cannot be saved. {error}") from error
    flat = flatten(state, is_local=local_test(source) if is_context else None)
    run, seed = current_run(), getattr(source, "seed", None)
    if type(seed) is not int:
        seed = torch.initial_seed() if run is None else run.seed
    flat_run = flatten(_run_state(run) if is_context and run is not None else None)
    if flat_run.tensors:
        names = ", ".join(flat_run.tensors)
        raise CheckpointError(f"parameters of the run hold tensors ({names}). Keep them in the Context.")
    flat.structure = {"kind": "context" if is_context else "dict", "state": flat.structure, "run": flat_run.structure}
    is_own = is_context and not _is_alike(flat, exchange)
    shards, shard_metadata = _own_shards(flat.sharded, exchange) if flat.sharded else ({}, {})
    own = flatten({"rng": capture_rng(place_of(source)), "local": flat.local} if is_context else None)
    return Snapshot(
        state=flat.to_json(),
        is_own=is_own,
        write_side_file=write_side_file,
        tensors=flat.tensors if exchange.rank == 0 or is_own else {},
        header={
            "run": "" if run is None else run.name or run.folder.name,
            "seed": seed,
            "progress": dict(progress or {}),
            "metrics": checked_metrics(metrics),
            "versions": _versions(),
        },
        is_sharded=bool(flat.sharded),
        shards=shards,
        shard_metadata=shard_metadata,
        local_tensors=own.tensors,
        local_metadata={_KEY: own.to_json().decode()} if is_context else {},
    )


def place_of(source: object) -> torch.device | None:
    """Return the device whose random states belong to a source, None for the current one."""
    return source.device if isinstance(source, Context) else None


def _is_alike(flat: FlatState, exchange: RankExchange) -> bool:
    """Return whether all ranks hold tensors of the same names, shapes and types."""
    if exchange.size == 1:
        return True
    whole = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in flat.tensors.items()}
    sharded = {name: (tuple(one.shape), str(one.dtype), _whole_mesh(one)) for name, one in flat.sharded.items()}
    digest = hashlib.sha256(repr(sorted((whole | sharded).items())).encode()).hexdigest()
    exchange.meet("saving a checkpoint")
    if len(set(exchange.gather(digest))) == 1:
        return True
    first: dict[str, object] = {}
    for rank, theirs in enumerate(exchange.gather(sharded)):
        for name, description in theirs.items():
            if first.setdefault(name, description) != description:
                raise CheckpointError(
                    f"{name} is a different sharded tensor on rank {rank} than on an earlier rank: {description} and "
                    f"{first[name]} (shape, type, ranks). Give the parts of the model different names."
                )
    return False


def _whole_mesh(tensor: Any) -> Any:
    """Return the ranks of the mesh that a sharded tensor's is a column of: equal columns hold equal tensors."""
    mesh = tensor.device_mesh
    find = getattr(mesh, "_get_root_mesh", None)  # without it every mesh is whole
    root = mesh if find is None else find()
    return root.mesh.tolist() if root is mesh else [root.mesh.tolist(), list(mesh.mesh_dim_names or ())]


def _own_shards(sharded: Mapping[str, Tensor], exchange: RankExchange) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the parts that this rank writes and their header: of equal tensors on several columns of a larger mesh, the first column's."""
    from drivetrain.checkpoint.sharded import own_parts

    own = {name: sorted(tensor.device_mesh.mesh.flatten().tolist()) for name, tensor in sharded.items()}  # type: ignore[attr-defined]
    first: dict[str, object] = {}
    for theirs in exchange.gather(own):
        for name, ranks in theirs.items():
            first[name] = min(first.get(name, ranks), ranks)
    return own_parts({name: tensor for name, tensor in sharded.items() if first[name] == own[name]})


def checked_metrics(metrics: Mapping[str, object] | None) -> dict[str, float]:
    """Return metrics as plain numbers. A one-element tensor is read, which waits for its device."""
    numbers: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            number = value.item() if isinstance(value, Tensor) or hasattr(value, "item") else value
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"metrics: {name!r} is {value!r}; expected one number.") from None
        numbers[str(name)] = number
    return numbers


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("drivetrain")
    except PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"drivetrain": own, "torch": torch.__version__, "python": platform.python_version()}


def _run_state(run: ExperimentRun) -> StateDict:
    """Return the run around the Context: its parameters, its generator of new seeds, the time it took so far."""
    return {
        "parameters": {name: _packed_or_text(value) for name, value in run.shown(run.params).items()},
        "random_gen": run.random_gen.getstate(),
        "elapsed": run.elapsed,
    }


def _packed_or_text(value: object) -> object:
    try:
        return pack(value)
    except StateError:
        return repr(value)  # a record for people; a resumed run has its parameters from its own command line


class SideFile(Protocol):
    """An item whose values are in a file in the checkpoint folder."""

    def prepare_side_file(self, folder: Path) -> tuple[object, Callable[[], None]]:
        """Return the reference to all values so far, and a function that writes and flushes them."""

    def referring_to(self, reference: object) -> AbstractContextManager[None]:
        """Make `state_dict` return this reference."""

    def reading_from(self, folder: Path) -> AbstractContextManager[None]:
        """Make `load_state_dict` look up references in a folder."""


@contextmanager
def with_side_file_reference(
    source: object, folder: Path | None, exchange: RankExchange
) -> Iterator[Callable[[], None] | None]:
    """Take a state with a reference to the side file, if there is one. Yield the function that writes that file on rank 0."""
    item: SideFile | None = getattr(source, "_side_file", None)
    if item is None or folder is None:
        yield None
        return
    write: Callable[[], None] | None = None

    def prepare() -> object:
        nonlocal write
        reference, write = item.prepare_side_file(folder)
        return reference

    def failed(why: str) -> WriteFailedError:
        return WriteFailedError(f"no checkpoint was saved in {folder}: {why}.")

    with item.referring_to(exchange.first(prepare, failed)):
        yield write


def reading_from(source: object, folder: Path) -> AbstractContextManager[None]:
    """Load a state whose side file is in this folder."""
    item: SideFile | None = getattr(source, "_side_file", None)
    return nullcontext() if item is None else item.reading_from(folder)


# ---------------------------------------------------------------------- what belongs to one rank alone
# Most of a state is the same on every rank and is written once. Random generators differ, and so does what a class declares in
# `rank_local`, or one object in `_rank_local`: patterns over dotted names such as `"*.partial"`. These go into one small file per rank.
#
# With another number of ranks, generators start from `derive_seed(seed, name, rank, sequence)`: new on every rank, and the same whenever
# the same checkpoint is resumed. One that was equal on all ranks is shared on purpose and stays. `_rank_local` may be a dict that gives a
# pattern a function, which makes the value of one rank out of those of all saved ranks. Other values that differed are an error.

_KEY = "drivetrain"

Merge = Callable[..., object]
"""Makes the value of one of the new ranks out of those of all saved ranks; raises `ResumeError` where that is not possible."""


class RankState(NamedTuple):
    """The random state of one rank, and its own values by name."""

    rng: StateDict
    local: StateDict


def local_test(source: object) -> IsLocal:
    """Return the test for values of `source` that belong to one rank only."""
    patterns = (*getattr(source, "rank_local", ()), *getattr(source, "_rank_local", ()))

    return lambda path, value: is_packed_generator(value) or any(fnmatchcase(path, pattern) for pattern in patterns)


def merges_of(source: object) -> dict[str, Merge]:
    """Return the functions of `source` that compute one rank's value from those of another number of ranks, by pattern."""
    patterns = getattr(source, "_rank_local", ())
    return dict(patterns) if isinstance(patterns, Mapping) else {}


def read_rank(folder: Path, rank: int) -> RankState:
    """Read the file of one rank."""
    from safetensors import SafetensorError, safe_open

    path = folder / rank_file(rank)
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY, "null")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (a copy: not mapped)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch opens the file a second time
        raise CheckpointError(f"{path.name} cannot be read ({error})") from None
    content = unflatten(parse_structure(text.encode(), path.name), tensors)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("rng", "local")):
        raise CheckpointError(f"{path.name} does not hold a rank's state")
    return RankState(content["rng"], content["local"])


def state_for_rank(folder: Path, manifest: Manifest, rank: int, size: int, merges: Mapping[str, Merge]) -> RankState:
    """Return the state that this rank continues with."""
    if size == manifest.world_size:
        return read_rank(folder, rank)
    saved = [read_rank(folder, other) for other in range(manifest.world_size)]
    seed = manifest.seed or 0
    local = {}
    for name in saved[0].local:
        values: list[Any] = [entry.local.get(name) for entry in saved]
        if merge := next((merge for pattern, merge in merges.items() if fnmatchcase(name, pattern)), None):
            local[name] = merge(values, rank)
        elif len(values) > 1 and all(same_state(values[0], other) for other in values[1:]):
            local[name] = values[0]
        elif is_packed_generator(values[0]):
            local[name] = _fresh_generator(values[0], derive_seed(seed, name, rank, manifest.sequence))
        else:
            raise ResumeError(
                f"{name} differs between ranks and was saved by {manifest.world_size}; there are {size} now, so it cannot be "
                f"restored exactly. Resume with {manifest.world_size} processes, or from a checkpoint between two updates."
            )
    with preserve_rng_state():
        set_seed(derive_seed(seed, "resume", rank, manifest.sequence))
        return RankState(capture_rng(), local)


def _fresh_generator(packed: StateDict, seed: int) -> object:
    """Return the packed state of a generator of the same kind that starts from `seed`."""
    kind = GENERATORS[packed[TAG]]
    try:
        generator = kind.make(packed["value"])
    except RuntimeError:  # saved on a device that is not here
        generator = torch.Generator()
    kind.reseed(generator, seed)
    return pack(generator)
