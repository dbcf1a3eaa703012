"""Checkpoints of a run: when it saves by itself, and saving and loading by hand.

By hand there is one `.pt` file of weights and optimizer, or a folder with everything a run needs. The file has the layout of
pytorch-accelerated's, so files travel both ways; it is written under another name and renamed, and loads with `weights_only=True`. The
folder is a checkpoint of `drivetrain.checkpoint`: verified, without pickle, exact.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from drivetrain.context.state import State
from drivetrain.core.containers import map_items
from drivetrain.core.errors import CheckpointError, NonFiniteStateError, warn
from drivetrain.core.files import absolute
from drivetrain.core.time import Interval
from drivetrain.core.types import StateDict
from drivetrain.module.accumulation import AccumulationWindow
from drivetrain.module.finite import nonfinite_state
from drivetrain.module.wrapping import clean_state_dict, load_clean_state_dict
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.train.accelerator import TrainerRuntime
from drivetrain.train.agreement import Agreement
from drivetrain.train.failures import LastGoodState
from drivetrain.train.settings import AnyPath, TrainSettings, parse_time

if TYPE_CHECKING:
    from drivetrain.checkpoint.checkpointer import Checkpointer
    from drivetrain.checkpoint.progress import Restored

_LOADABLE = (bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, np.generic)
RESERVED = ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict")


def prepare_folder_for(settings: TrainSettings, own_folders: set[Path], until_end: ExitStack) -> None:
    """Test the checkpoint folder and lock it until the run has ended.

    Checkpoints of another run are an error unless this one resumes from them, or an earlier run of the same Trainer wrote them.
    """
    if settings.checkpoint_dir is None:
        return
    from drivetrain.checkpoint.folder import prepare_folder

    folder = absolute(settings.checkpoint_dir)
    is_new = settings.resume_from is None and not settings.overwrite_checkpoints and folder.resolve() not in own_folders
    until_end.enter_context(prepare_folder(folder, fresh=is_new))
    own_folders.add(folder.resolve())


class CheckpointSchedule:
    """Saves the state of a run at step and epoch boundaries: at intervals, at the end, and on request of a callback.

    Inside an epoch that is after a batch, with an open accumulation window's gradients as part of the state; at an epoch's end
    it is after evaluation. What callbacks ask for in the middle of a step waits for the next boundary with a closed window.
    """

    def __init__(
        self,
        state: State,
        settings: TrainSettings,
        batches_per_epoch: int | None,
        window: AccumulationWindow,
        agreement: Agreement,
        report: Callable[[str], None],
    ):
        self._state, self._window, self._agreement, self._report = state, window, agreement, report
        self._ignores_nonfinite = settings.nonfinite.action == "ignore"
        self._waiting: list[Callable[[], None]] = []
        self._saved_at: tuple[int, int] | None = None
        self.last: AnyPath | None = None
        """The checkpoint that the run was resumed from, or the last that it has written."""
        self.good: LastGoodState | None = None  # the state that replaces one with NaN or infinity
        self.checkpointer: Checkpointer | None = None
        self._every: Interval | None = None
        self.saves_inside_epochs = False
        if settings.checkpoint_dir is None:
            return
        mode = "auto" if settings.async_checkpoint else False
        self.checkpointer = _checkpointer(  # the run acts on signals
            state, keep=settings.keep_checkpoints, dir=settings.checkpoint_dir, async_save=mode, signals=False
        )
        if settings.checkpoint_every is not None:
            every = parse_time("checkpoint_every", settings.checkpoint_every)
            self._every = Interval(every, state.max_duration, batches_per_epoch)
            self.saves_inside_epochs = not self._every.is_per_epoch

    def start(self) -> None:
        """Start counting intervals from the current position."""
        if self._every is not None:
            self._every.reset(self._state.clock)

    def save_at_boundary(self, save: Callable[[], None]) -> None:
        """Save at the next boundary."""
        self._waiting.append(save)

    def at_batch_end(self, run_ends: bool) -> None:
        """Save between two batches if it is due."""
        if self._waiting and self._window.count == 0:
            waiting, self._waiting = self._waiting, []
            for save in waiting:
                save()
        if self._every is not None and (run_ends or (self.saves_inside_epochs and self._every.due(self._state.clock))):
            self.save()

    def at_epoch_end(self, run_ends: bool) -> None:
        """Save after an epoch and its evaluation if it is due."""
        every = self._every
        if every is not None and ((every.is_per_epoch and every.due(self._state.clock)) or run_ends):
            self.save()

    def save(self, final: bool = False) -> None:
        """Write a checkpoint now, unless one was just written. A final save raises if it fails."""
        clock, writer = self._state.clock, self.checkpointer
        if writer is None or (self._saved_at == (clock.epoch, clock.batch) and writer.last_failure is None):
            return
        self._saved_at = (clock.epoch, clock.batch)
        try:
            history = self._state.history
            latest = {name: history.get_latest_metric(name) for name in history.get_metric_names()}
            metrics = {name: float(value) for name, value in latest.items() if isinstance(value, int | float)}
            self.last = writer.save(id=f"ep{clock.epoch}-ba{clock.batch}", metrics=metrics, final=final)
        except NonFiniteStateError as error:  # on all ranks
            if self.good is not None:
                self.good.restore()
                self._report(f"{error} Rolled back to the state after update {self.good.step}.")
            elif final or self._ignores_nonfinite:
                warn(str(error))
            else:
                self._agreement.is_reached = True
                raise
        else:
            if self.good is not None:
                self.good.take()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def finish(self) -> None:
        """Wait for the last save of the run; raise if it failed."""
        if self.checkpointer is not None:
            self.checkpointer.finish()

    def settle(self) -> None:
        """Wait for the current save without raising, after another error."""
        if self.checkpointer is not None:
            self.checkpointer.settle()


def _checkpointer(state: State, **settings: Any) -> "Checkpointer":
    from drivetrain.checkpoint.checkpointer import Checkpointer  # only runs that save import it

    return Checkpointer(state, **settings)


def save_checkpoint(
    state: State,
    runtime: TrainerRuntime,
    path: AnyPath,
    custom: Mapping[str, object] | None,
    *,
    optimizer: bool,
    scheduler: bool,
    per_node: bool,
    writes: bool,
) -> None:
    """Write model, optimizer and scheduler, together with custom entries. All ranks must call this."""
    check_entries(custom)
    model = state.model
    optimizers, schedulers = state.optimizers[:1] if optimizer else (), state.schedulers[:1] if scheduler else ()
    found = nonfinite_state({"model": model, "optimizer": next(iter(optimizers), None)})
    if any(all_gather_values(bool(found))):
        warn(f"{path} was not written: {', '.join(found[:5]) or 'a rank'} hold NaN or infinity.")
        return
    content = {"model_state_dict": clean_state_dict(model) if isinstance(model, nn.Module) else model.state_dict()}
    for held in optimizers:
        content["optimizer_state_dict"] = _plain_numbers(held.state_dict())
    for held in schedulers:
        content["scheduler_state_dict"] = _plain_numbers(plain_scheduler_state(held))
    content.update(_plain_numbers(dict(custom or {})))
    if writes:
        runtime.save(content, path, save_on_each_node=per_node)
    runtime.wait_for_everyone()


def load_checkpoint(
    state: State, runtime: TrainerRuntime, path: AnyPath, *, optimizer: bool, scheduler: bool
) -> StateDict:
    """Load a file into model, optimizer and scheduler. Everything is checked before anything changes."""
    runtime.wait_for_everyone()
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint at {path}. Expected a file that save_checkpoint wrote.")
    content = _read(Path(path), runtime.device)
    if "model_state_dict" not in content:
        raise ValueError(
            f"{path} holds {', '.join(map(str, content))}, expected 'model_state_dict'; it was not written by save_checkpoint."
        )
    wanted = [("optimizer", state.optimizers)] if optimizer else []
    wanted += [("scheduler", state.schedulers)] if scheduler else []
    wanted = [(name, held) for name, held in wanted if f"{name}_state_dict" in content]
    for name, held in wanted:
        if not held:
            raise ValueError(
                f"{path} holds the state of the {name}, but the Trainer has none. Create the {name} first, or pass load_{name}=False."
            )
        if isinstance(held[0], torch.optim.Optimizer):
            given, own = map(_group_sizes, (content["optimizer_state_dict"], held[0].state_dict()))
            if given != own:
                raise ValueError(
                    f"{path} holds an optimizer whose groups have {given} parameters, and those of the Trainer's have {own}. Make the "
                    "same groups first, or pass load_optimizer=False."
                )
    load_clean_state_dict(state.model, content["model_state_dict"])
    for name, held in wanted:
        load = held[0].load_state_dict if hasattr(held[0], "load_state_dict") else held[0].__dict__.update
        load(content[f"{name}_state_dict"])
    return content


def _group_sizes(optimizer: StateDict) -> list[int]:
    return [len(group["params"]) for group in optimizer["param_groups"]]


def _read(path: Path, device: object) -> StateDict:
    """Return the entries of a checkpoint file; whatever else is in it, or goes wrong, is one error."""
    from drivetrain.checkpoint.reader import read_torch_file

    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder. load_checkpoint reads a file; use load_training_state for a folder."
        )
    content = read_torch_file(path, device)
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise CheckpointError(f"{path} holds a {kind}, not a checkpoint: expected a dict with 'model_state_dict'.")
    if not isinstance(content.get("model_state_dict", {}), Mapping):
        kind = type(content["model_state_dict"]).__name__
        raise CheckpointError(f"{path} holds a 'model_state_dict' that is a {kind}, expected a dict of tensors.")
    return content


def save_state(state: State, folder: AnyPath, custom: Mapping[str, object]) -> None:
    """Write the whole state to a folder."""
    state.custom_entries = {"current_epoch": state.clock.epoch + 1, **custom}
    try:
        _checkpointer(state, dir=folder, keep=1, async_save=False).save(id="state", final=True)
    except NonFiniteStateError as error:
        warn(str(error))


def load_state(state: State, folder: AnyPath) -> StateDict:
    """Restore model, optimizer and counters from a folder, and return its entries; `train()` restores the rest when it exists."""
    from drivetrain.checkpoint.reader import find_checkpoint_path
    from drivetrain.checkpoint.snapshot import reading_from
    from drivetrain.checkpoint.store import load_checkpoint as read

    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"no training state at {folder}: the path does not exist.")
    saved, place = read(path), find_checkpoint_path(path)
    with reading_from(state, place.path if place.kind == "directory" else place.path.parent):
        state.load_state_dict(saved, strict=False)
    return dict(saved.get("custom_entries") or {})


def restore_from(state: State, folder: AnyPath) -> "Restored | None":
    """Restore from a checkpoint folder, or from the newest valid checkpoint in a folder of them."""
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"resume_from: no checkpoint at {folder}: the path does not exist.")
    is_checkpoint = (path / "manifest.json").exists()
    reader = _checkpointer(state, dir=path.parent if is_checkpoint else path, keep=None, async_save=False)
    return reader.restore(path if is_checkpoint else "last")


def plain_scheduler_state(scheduler: Any) -> StateDict:
    """Return a scheduler's state without functions. They are created again with the scheduler."""
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else getattr(scheduler, "__dict__", {})
    return {name: value for name, value in state.items() if _is_loadable(value)}


def check_entries(custom: Mapping[str, object] | None) -> None:
    """Raise for custom entries that use a reserved name or cannot be loaded safely."""
    for name, value in (custom or {}).items():
        if name in RESERVED:
            raise TypeError(f"checkpoint_kwargs[{name!r}]: this name is reserved for the checkpoint itself.")
        if not _is_loadable(value):
            raise TypeError(
                f"checkpoint_kwargs[{name!r}] is a {type(value).__name__}, which cannot be loaded back safely. Use tensors, numbers, "
                "strings and containers of them."
            )


def _is_loadable(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_loadable(key) and _is_loadable(item) for key, item in value.items())
    if type(value) is list or type(value) is tuple or type(value) is set:
        return all(map(_is_loadable, value))
    return value is None or isinstance(value, _LOADABLE)


def _plain_numbers(value: object) -> Any:
    """Return a value with numpy's numbers, such as a learning rate of `np.logspace`, as Python's: those can be loaded back."""
    return value.item() if isinstance(value, np.generic) else map_items(value, _plain_numbers)
