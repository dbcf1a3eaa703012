"""Saving and loading by hand: one `.pt` file of weights and optimizer, or a folder with everything a run needs.

The file has the layout of pytorch-accelerated's, so files travel both ways; it is written aside and renamed, and loads with
`weights_only=True`. The folder is a checkpoint of `drivetrain.checkpoint`: verified, without pickle, exact.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.core.errors import CheckpointError, DrivetrainWarning, NonFiniteStateError
from drivetrain.module.finite import nonfinite_state
from drivetrain.module.wrapping import clean_state_dict, load_clean_state_dict
from drivetrain.runtime.collectives import all_gather_values

RESERVED = ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict")


def save_checkpoint(
    trainer: Any,
    path: Any,
    custom: Mapping[str, Any] | None,
    save_optimizer: bool,
    save_scheduler: bool,
    save_per_node: bool,
) -> None:
    """Write model, optimizer and scheduler, with custom entries beside them."""
    _check_entries(custom)
    model = trainer.model
    found = nonfinite_state({"model": model, "optimizer": trainer.optimizer if save_optimizer else None})
    if any(all_gather_values(bool(found))):
        _warn_unsaved(f"{path} was not written: {', '.join(found[:5]) or 'a rank'} hold NaN or infinity.")
        return
    content = {"model_state_dict": clean_state_dict(model) if isinstance(model, nn.Module) else model.state_dict()}
    if save_optimizer and trainer.optimizer is not None:
        content["optimizer_state_dict"] = trainer.optimizer.state_dict()
    if save_scheduler and trainer.scheduler is not None:
        content["scheduler_state_dict"] = plain_scheduler_state(trainer.scheduler)
    content.update(custom or {})
    if trainer.writes_files:
        trainer._accelerator.save(content, path, save_on_each_node=save_per_node)
    trainer._accelerator.wait_for_everyone()


def load_checkpoint(trainer: Any, path: Any, load_optimizer: bool, load_scheduler: bool) -> dict[str, Any]:
    """Load a file and put its parts where they belong; everything is checked before anything is changed."""
    trainer._accelerator.wait_for_everyone()
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint at {path}. Written by save_checkpoint(save_path)?")
    content = _read(Path(path), trainer.device)
    if "model_state_dict" not in content:
        raise ValueError(
            f"{path} holds {', '.join(map(str, content))}, expected 'model_state_dict'; it was not written by save_checkpoint."
        )
    wanted = [("optimizer", load_optimizer, trainer.optimizer), ("scheduler", load_scheduler, trainer.scheduler)]
    for name, is_wanted, holder in wanted:
        if is_wanted and f"{name}_state_dict" in content and holder is None:
            raise ValueError(
                f"{path} holds the state of {_article(name)}, and the Trainer has none to give it to. "
                f"Create the {name} first, or pass load_{name}=False."
            )
    load_clean_state_dict(trainer.model, content["model_state_dict"])
    for name, is_wanted, holder in wanted:
        if is_wanted and f"{name}_state_dict" in content:
            holder.load_state_dict(content[f"{name}_state_dict"])
    return content


def _read(path: Path, device: Any) -> dict[str, Any]:
    """Return the entries of a checkpoint file; whatever else is in it, or goes wrong, is one error."""
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder. load_checkpoint reads a file; use load_training_state for a folder."
        )
    from drivetrain.checkpoint.reader import read_torch_file

    content = read_torch_file(path, device)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, not a checkpoint: expected a dict with 'model_state_dict'."
        )
    if not isinstance(content.get("model_state_dict", {}), Mapping):
        kind = type(content["model_state_dict"]).__name__
        raise CheckpointError(f"{path} holds a 'model_state_dict' that is a {kind}, expected a dict of tensors.")
    return content


def save_training_state(trainer: Any, folder: Any, custom: Mapping[str, Any] | None) -> None:
    """Write the whole state to a folder; inside a step, as soon as the state is whole."""
    _check_entries(custom)
    entries = dict(custom or {})
    is_inside_step = trainer.engine is not None and trainer._keeper is not None and trainer._inside_step
    if is_inside_step:
        trainer._keeper.when_whole(lambda: _save_state_now(trainer, folder, entries))
    else:
        _save_state_now(trainer, folder, entries)


def _save_state_now(trainer: Any, folder: Any, custom: dict[str, Any]) -> None:
    if not trainer.writes_files:
        return
    from drivetrain.checkpoint.checkpointer import Checkpointer

    state = trainer.state
    state.custom_entries = {"current_epoch": state.clock.epoch + 1, **custom}
    try:
        Checkpointer(state, dir=folder, keep=1, async_save=False).save(id="state", final=True)
    except NonFiniteStateError as error:
        _warn_unsaved(str(error))


def _warn_unsaved(message: str) -> None:
    warnings.warn(message, DrivetrainWarning, stacklevel=4)


def load_training_state(trainer: Any, folder: Any) -> dict[str, Any]:
    """Restore from a folder and return its entries; the next `train()` goes on from there.

    What is there already is restored now: model, optimizer, counters. Loader and scheduler are made by `train()`, which restores them
    then, from the same folder.
    """
    from drivetrain.checkpoint.reader import find_checkpoint_path
    from drivetrain.checkpoint.snapshot import reading_from
    from drivetrain.checkpoint.store import load_checkpoint as read

    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"no training state at {folder}: the path does not exist.")
    state, place = read(path), find_checkpoint_path(path)
    with reading_from(trainer.state, place.path if place.kind == "directory" else place.path.parent):
        trainer.state.load_state_dict(state, strict=False)
    trainer._resume_next = path
    trainer.run_history._set_epoch(trainer.state.clock.epoch + 1)
    return dict(state.get("custom_entries") or {})


def restore_from(trainer: Any, folder: Any) -> Any:
    """Restore from a checkpoint folder, or from the newest valid checkpoint in a folder of them."""
    from drivetrain.checkpoint.checkpointer import Checkpointer

    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"resume_from: no checkpoint at {folder}: the path does not exist.")
    if (path / "manifest.json").exists():
        return Checkpointer(trainer.state, dir=path.parent, keep=None, async_save=False).restore(path)
    return Checkpointer(trainer.state, dir=path, keep=None, async_save=False).restore("last")


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def plain_scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state without the functions some keep in it; they are made anew with the scheduler."""
    return {name: value for name, value in scheduler.state_dict().items() if _is_loadable(value)}


def _check_entries(custom: Mapping[str, Any] | None) -> None:
    for name, value in (custom or {}).items():
        if name in RESERVED:
            raise TypeError(f"checkpoint_kwargs[{name!r}]: this name is taken by the checkpoint itself.")
        if not _is_loadable(value):
            raise TypeError(
                f"checkpoint_kwargs[{name!r}] is a {type(value).__name__}, which cannot be loaded back safely. Use tensors, numbers, "
                "strings and containers of them."
            )


def _is_loadable(value: Any) -> bool:
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | torch.Tensor | torch.dtype | torch.device
    ):
        return True
    if isinstance(value, Mapping):
        return all(_is_loadable(key) and _is_loadable(item) for key, item in value.items())
    return type(value) in (list, tuple, set) and all(map(_is_loadable, value))
