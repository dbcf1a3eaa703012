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
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drivetrain.checkpoint.exchange import RankExchange
from drivetrain.checkpoint.local import local_test, rank_tensors
from drivetrain.checkpoint.tree import FlatState, flatten
from drivetrain.checkpoint.writer import Snapshot, WriteFailedError
from drivetrain.context.codec import pack
from drivetrain.core.errors import CheckpointError, ConfigError, StateError
from drivetrain.core.types import StateDict
from drivetrain.runtime.run import current_run


def take_snapshot(
    source: Any,
    exchange: RankExchange | None = None,
    *,
    folder: Path | None = None,
    metrics: Mapping[str, Any] | None = None,
    progress: Mapping[str, float] | None = None,
) -> Snapshot:
    """Take a source apart for this rank; tensors are those of the source, not copies.

    Ranks that save a Context together meet here. Usually all of them hold the same names and rank 0 keeps the tensors;
    where they differ (stages of a pipeline) each keeps its own. `folder` is where the checkpoint goes: what only grows is in a file there.
    """
    exchange = exchange or RankExchange()
    is_context = not isinstance(source, Mapping)
    try:
        with referring(source, folder, exchange) as write_side_file:
            state = source.state_dict() if is_context else pack(dict(source))
    except StateError as error:
        if is_context:
            raise
        raise CheckpointError(f"this state cannot be saved. {error}") from error
    flat = flatten(state, is_local=local_test(source) if is_context else None)
    run = flatten(_run_state() if is_context else None)
    if run.tensors:
        raise CheckpointError(
            f"parameters of the run hold tensors ({', '.join(run.tensors)}). Keep them in the Context."
        )
    flat.structure = {"kind": "context" if is_context else "dict", "state": flat.structure, "run": run.structure}
    is_own = is_context and not _is_alike(flat, exchange)
    snapshot = Snapshot(
        state=flat.to_json(),
        is_own=is_own,
        write_side_file=write_side_file,
        tensors=flat.tensors if exchange.rank == 0 or is_own else {},
        header={
            "run": _run_name(),
            "seed": _seed_of(source),
            "progress": dict(progress or {}),
            "metrics": checked_metrics(metrics),
            "versions": versions(),
        },
    )
    if flat.sharded:
        from drivetrain.checkpoint.sharded import own_parts

        snapshot.is_sharded = True
        snapshot.shards, snapshot.shard_metadata = own_parts(_written_here(flat.sharded, exchange))
    if is_context:
        snapshot.local_tensors, snapshot.local_metadata = rank_tensors(flat.local)
    return snapshot


def _is_alike(flat: FlatState, exchange: RankExchange) -> bool:
    """Return whether all ranks hold tensors of the same names, shapes and types."""
    if exchange.size == 1:
        return True
    whole = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in flat.tensors.items()}
    sharded = {
        name: (tuple(tensor.shape), str(tensor.dtype), _whole_mesh(tensor)) for name, tensor in flat.sharded.items()
    }
    digest = hashlib.sha256(repr(sorted((whole | sharded).items())).encode()).hexdigest()
    exchange.meet("saving a checkpoint")
    if len(set(exchange.gather(digest))) == 1:
        return True
    first: dict[str, Any] = {}
    for rank, theirs in enumerate(exchange.gather(sharded)):
        for name, description in theirs.items():
            if first.setdefault(name, description) != description:
                raise CheckpointError(
                    f"{name} is one sharded tensor on rank {rank} and another on a rank before it: {description} and "
                    f"{first[name]} (shape, type, ranks). Give the parts of the model different names."
                )
    return False


def _whole_mesh(tensor: Any) -> Any:
    """Return the ranks of the mesh that a sharded tensor's is a column of: equal columns hold equal tensors."""
    mesh = tensor.device_mesh
    find = getattr(mesh, "_get_root_mesh", None)  # without it every mesh is whole
    root = mesh if find is None else find()
    return root.mesh.tolist() if root is mesh else [root.mesh.tolist(), list(mesh.mesh_dim_names or ())]


def _written_here(sharded: Mapping[str, Tensor], exchange: RankExchange) -> dict[str, Tensor]:
    """Return the sharded tensors that this rank's mesh writes: of equal ones on several columns of a larger mesh, the first column's."""
    if exchange.size == 1:
        return dict(sharded)
    own = {name: sorted(tensor.device_mesh.mesh.flatten().tolist()) for name, tensor in sharded.items()}  # type: ignore[attr-defined]
    first: dict[str, Any] = {}
    for theirs in exchange.gather(own):
        for name, ranks in theirs.items():
            first[name] = min(first.get(name, ranks), ranks)
    return {name: tensor for name, tensor in sharded.items() if first[name] == own[name]}


def checked_metrics(metrics: Mapping[str, object] | None) -> dict[str, float]:
    """Return metrics as plain numbers; a one-element tensor is read (which waits for its device)."""
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


def versions() -> dict[str, str]:
    """Return the versions a reader may want to know."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("drivetrain")
    except PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"drivetrain": own, "torch": torch.__version__, "python": platform.python_version()}


def _run_name() -> str:
    run = current_run()
    return "" if run is None else run.name or run.folder.name


def _seed_of(source: object) -> int:
    seed = getattr(source, "seed", None)
    if type(seed) is int:
        return seed
    run = current_run()
    return torch.initial_seed() if run is None else run.seed


def _run_state() -> StateDict | None:
    """The run around the Context: its parameters, its generator of new seeds, the time it took so far."""
    run = current_run()
    if run is None:
        return None
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
    """An item whose values are in a file of the checkpoints' folder."""

    def prepare_side_file(self, folder: Path) -> tuple[Any, Callable[[], None]]:
        """Return the reference to all values up to now, and what writes and flushes them."""

    def referring_to(self, reference: object) -> AbstractContextManager[None]:
        """Let `state_dict` return this reference."""

    def reading_from(self, folder: Path) -> AbstractContextManager[None]:
        """Let `load_state_dict` look up references in a folder."""


@contextmanager
def referring(source: object, folder: Path | None, exchange: RankExchange) -> Iterator[Callable[[], None] | None]:
    """Take a state with a reference to the side file, if there is one; gives what writes that file on rank 0."""
    item: SideFile | None = getattr(source, "_side_file", None)
    if item is None or folder is None:
        yield None
        return
    write: Callable[[], None] | None = None

    def prepare() -> object:
        nonlocal write
        if exchange.rank:
            return None
        reference, write = item.prepare_side_file(folder)
        return reference

    outcome = exchange.attempt(prepare)
    if outcome.problems:
        raise WriteFailedError(f"no checkpoint was saved in {folder}: {outcome.explain()}.") from outcome.own
    with item.referring_to(outcome.results[0]):
        yield write


def reading_from(source: object, folder: Path) -> AbstractContextManager[None]:
    """Load a state whose side file is in this folder."""
    item: SideFile | None = getattr(source, "_side_file", None)
    return nullcontext() if item is None else item.reading_from(folder)
