"""Save one state, load one state: two functions for programs that keep their own loop and their own schedule.

save_checkpoint({"model": model.state_dict(), "epoch": 3}, id=3)
state = load_checkpoint("runs/digits")          # the newest valid checkpoint of that run
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.checkpoint import layout
from drivetrain.checkpoint.exchange import RankExchange, control_exchange
from drivetrain.checkpoint.layout import Best, CheckpointNotFoundError
from drivetrain.checkpoint.reader import (
    CheckpointPath,
    CheckpointReader,
    Loaded,
    find_checkpoint_path,
    read_safetensors,
    read_torch_file,
)
from drivetrain.checkpoint.snapshot import take_snapshot
from drivetrain.checkpoint.writer import write_checkpoint
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.files import absolute
from drivetrain.core.types import StateDict
from drivetrain.runtime.codec import unpack
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.run import current_run


def save_checkpoint(
    state_dict: object, id: object, *, path: str | Path | None = None, metric: float | None = None
) -> Path:
    """Save a dict or a Context as `checkpoint-<id>` and return that folder. Call it on every rank.

    Of a plain dict rank 0 writes its own and the other ranks continue at once. A Context, or a dict with sharded tensors, is saved by
    all ranks together.

    Args:
        state_dict: a dict of tensors and plain values, or a Context.
        id: what the checkpoint is called after `checkpoint-`.
        path: where its folder goes; the current run's `checkpoints` by default.
        metric: a number; the checkpoint with the smallest one is marked as `best`.

    >>> import tempfile
    >>> save_checkpoint({"epoch": 3}, "first", path=tempfile.mkdtemp()).name
    'checkpoint-first'
    """
    if not isinstance(state_dict, Mapping) and not hasattr(state_dict, "state_dict"):
        raise ConfigError(f"save_checkpoint: a {type(state_dict).__name__} cannot be saved. Give a dict or a Context.")
    directory = checkpoint_directory(path)
    name = layout.checkpoint_name(id)
    exchange = control_exchange()
    metrics = None if metric is None else {"metric": metric}
    snapshot = take_snapshot(state_dict, exchange, folder=directory, metrics=metrics)
    if isinstance(state_dict, Mapping) and not snapshot.is_sharded:
        if exchange.rank != 0:
            return directory / name
        exchange = RankExchange()  # rank 0 writes alone
    return write_checkpoint(directory, id, snapshot, exchange, best=None if metric is None else Best("metric"))


def load_checkpoint(path: str | Path, *, map_location: object = "cpu", verify: str = "full") -> StateDict:
    """Return a saved state. Each rank reads separately, and tensors that were split over ranks are returned in full.

    Args:
        path: a checkpoint, a run folder (the newest valid one), `"last"` or `"best"` of the current run, a `.safetensors` file, or a `.pt`
            or `.pth` file, which is read with `weights_only=True`.
        map_location: device of the tensors.
        verify: `"full"` checks every hash, `"size"` the sizes, `"off"` nothing.

    Raises:
        CheckpointError: there is no valid checkpoint.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = save_checkpoint({"epoch": 3}, "first", path=folder)
    >>> load_checkpoint(folder)["epoch"]
    3
    """
    mode = layout.check_verify(verify)
    directory = checkpoint_directory(None if path in (layout.LAST, layout.BEST) else path)

    def find() -> CheckpointPath:
        return find_checkpoint_path(best_folder(directory) if path == layout.BEST else directory)

    place = find()
    if place.kind == "file":
        return read_file(place.path, map_location)
    device = choose_device(map_location or "cpu")  # type: ignore[arg-type]
    return state_of(CheckpointReader(verify=mode, map_location=device).read_at(find))


def state_of(loaded: Loaded) -> Any:
    """Return the state in its original form: a dict, or what a Context's `load_state_dict` takes."""
    return unpack(loaded.state) if loaded.kind == "dict" else loaded.state


def read_file(path: Path, map_location: object = "cpu") -> Any:
    """Read a file of another program."""
    read = read_safetensors if path.suffix == ".safetensors" else read_torch_file
    return read(path, map_location)


def best_folder(directory: Path) -> Path:
    """Return the checkpoint that `best` points to."""
    folder = layout.read_pointer(directory, layout.BEST)
    if folder is None:
        raise CheckpointNotFoundError(
            f"no best checkpoint in {directory}: none was saved with a metric. Use 'last', or "
            "Checkpointer(best='eval/acc', mode='max')."
        )
    return folder


def checkpoint_directory(path: str | Path | None) -> Path:
    """Return the folder for checkpoints: the one given, else the current run's."""
    if path is not None:
        return absolute(path)
    run = current_run()
    if run is None:
        raise CheckpointError(
            "no run is active, so the checkpoint folder is unknown. Give one: path='runs/a/checkpoints' (dir= "
            "for a Checkpointer), or start the program as an experiment."
        )
    return run.folder / layout.CHECKPOINTS
