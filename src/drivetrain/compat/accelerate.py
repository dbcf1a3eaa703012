"""accelerate's objects and files: a user's own `Accelerator`, and training-state folders that its `save_state` wrote.

For trainers that override `_create_accelerator` as in pytorch-accelerated, the Accelerator chooses device, precision, gradient scaler and
DDP settings, and its other members (trackers, `log`, `accumulate`) stay within reach; the loop runs on `TrainerRuntime`. accelerate is
never imported here: an Accelerator can only exist where the user has imported it.

Of a folder, weights, optimizer, scheduler and scaler are read with safetensors and `weights_only=True`; nothing else is opened. The folder
has the epoch to go on in, not the place in it, and its random states are a pickle, which is left alone: the run goes on from the start of
that epoch with random numbers of its own. What cannot be read safely, or is not whole, is rejected with a way out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError, ResumeError, warn
from drivetrain.core.types import Settings, StateDict
from drivetrain.module.precision import Precision
from drivetrain.module.wrapping import load_clean_state_dict
from drivetrain.train import loaders
from drivetrain.train.accelerator import TrainerRuntime

_ELSEWHERE = {
    "FSDP": "Trainer(strategy=['parallel_mode', 'fsdp'])",
    "DEEPSPEED": "Trainer(strategy=['parallel_mode', 'fsdp'])",
    "MEGATRON_LM": "Trainer(strategy='auto')",
    "TP": "Trainer(strategy='auto')",
}


def wrap_accelerator(given: object, precision: str | Precision | None = None) -> Any:
    """Return a runtime around accelerate's own `Accelerator`; anything else as it is."""
    is_accelerate = any(base.__module__.split(".")[0] == "accelerate" for base in type(given).__mro__)
    return AccelerateRuntime(given, precision) if is_accelerate else given


class AccelerateRuntime(TrainerRuntime):
    """Runs the loop where an Accelerator says; what the loop does not need is asked of the Accelerator itself."""

    def __init__(self, accelerator: Any, precision: str | Precision | None = None):
        self.accelerator = accelerator
        _reject_unused(accelerator)
        super().__init__(accelerator.device, accelerator.mixed_precision if precision is None else precision)
        if self.scaler is not None and accelerator.scaler is not None:
            self.scaler = accelerator.scaler  # so that its own `backward` and ours scale alike

    def __getattr__(self, name: str) -> Any:
        if name == "accelerator":  # not set yet, as while a copy is being made
            raise AttributeError(name)
        return getattr(self.accelerator, name)

    def prepare_model(self, model: object, **ddp_kwargs: object) -> Any:
        """Wrap a model for gradient averaging with the Accelerator's settings of DDP."""
        handler = getattr(self.accelerator, "ddp_handler", None)
        return super().prepare_model(model, **{**(handler.to_kwargs() if handler is not None else {}), **ddp_kwargs})


def _reject_unused(accelerator: Any) -> None:
    """Raise for settings of an Accelerator that would silently have no effect here."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _ELSEWHERE:
        raise ConfigError(
            f"_create_accelerator returned an Accelerator with distributed_type={kind}, which is not supported: accelerate's plugins wrap "
            f"the model in their own loop. Use {_ELSEWHERE[kind]} instead, and an Accelerator without that plugin."
        )
    steps = getattr(accelerator, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise ConfigError(
            f"_create_accelerator returned an Accelerator with gradient_accumulation_steps={steps}. Give it to "
            f"train(gradient_accumulation_steps={steps}) instead."
        )


METADATA = ("trainer_metadata.pt", "trainer_metadata.json")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
OPTIMIZER, SCALER = "optimizer.bin", "scaler.pt"
_PARTS = "pytorch_model_fsdp* optimizer_[0-9]*.bin model_[0-9]*.safetensors *.index.json mp_rank_* zero_*".split()
SCHEDULERS = ("scheduler.bin", "custom_checkpoint_0.pkl")
"""A scheduler that accelerate prepared, and one that was registered with it, as pytorch-accelerated does at every save."""
WAY_OUT = (
    "Load the folder in the program that wrote it, call trainer.save_checkpoint('model.pt') there, and trainer.load_checkpoint('model.pt') "
    "here."
)


def recognizes(folder: Path) -> bool:
    """Return whether a folder was written by accelerate or pytorch-accelerated, and not by us."""
    is_ours = (folder / "manifest.json").exists()
    return folder.is_dir() and not is_ours and _first_file(folder, (*METADATA, *WEIGHTS, OPTIMIZER)) is not None


def restore(state: State, folder: Path) -> None:
    """Load the folder into a state whose next epoch is then the one the folder names."""
    several = [path for pattern in _PARTS for path in folder.glob(pattern)]
    if several:
        raise ResumeError(
            f"{folder} holds a state in several parts ({several[0].name}), which only accelerate can join. {WAY_OUT}"
        )
    metadata = _read_metadata(folder)
    weights = _first_file(folder, WEIGHTS)
    if weights is None:
        raise ResumeError(f"{folder} holds no weights: expected {' or '.join(WEIGHTS)}. {WAY_OUT}")
    # Everything is read before anything is changed.
    tensors = _read_tensors(weights)
    optimizer, scheduler = (next(iter(held), None) for held in (state.optimizers, state.schedulers))
    parts = (
        ("optimizer", _first_file(folder, (OPTIMIZER,)), optimizer),
        ("scaler", _first_file(folder, (SCALER,)), state.scaler),
        ("scheduler", _first_file(folder, SCHEDULERS), scheduler),
    )
    found = [(name, _read_tensors(path), holder) for name, path, holder in parts if path is not None]
    for name, _, holder in found:
        if holder is None and name != "scaler":  # a run in another precision needs no scaler
            raise ValueError(
                f"{folder} holds the state of the {name}, but the Trainer has none. Create the {name} as in the run that "
                "wrote it, or load the weights alone with load_checkpoint."
            )
    load_clean_state_dict(state.model, tensors)
    for name, saved, holder in found:
        if holder is not None:
            try:
                holder.load_state_dict(saved)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ResumeError(
                    f"{folder}: the state of the {name} does not fit {type(holder).__name__} ({type(error).__name__}: {error}). Use the "
                    f"{name} of the run that wrote it."
                ) from None
    state.custom_entries = metadata
    # The run begins at the start of an epoch; counts within it follow from the loader's length, where it has one.
    clock, batches, epochs = state.clock, loaders.length(state.dataloader), int(metadata["current_epoch"]) - 1
    clock.reset()
    clock.epoch = epochs
    if batches is not None:
        clock.batch = epochs * batches
        clock.step = epochs * -(-batches // state.accumulation_steps)
    if any(folder.glob("random_states_*.pkl")):
        warn(
            f"{folder}: its random states are a pickle, which is not loaded for safety; shuffling and dropout continue with different "
            "random numbers."
        )


def _read_metadata(folder: Path) -> Settings:
    path = _first_file(folder, METADATA)
    if path is None:
        raise ResumeError(
            f"{folder} does not record the next epoch: {METADATA[0]} is missing. Written by accelerate alone? {WAY_OUT}"
        )
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ResumeError(f"{path} is not JSON ({error}). {WAY_OUT}") from None
    else:
        content = _read_tensors(path)
    epoch = content.get("current_epoch") if isinstance(content, Mapping) else None
    if type(epoch) is not int or epoch < 1:
        raise ResumeError(f"{path}: current_epoch is {epoch!r}, expected the number of the next epoch, from 1.")
    return dict(content)


def _read_tensors(path: Path) -> StateDict:
    """Read one file without running anything that is in it."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # damage shows in many ways
        raise ResumeError(
            f"{path} cannot be read safely ({str(error).partition(chr(10))[0]}). It is damaged, or holds objects other than tensors and "
            f"plain values. {WAY_OUT}"
        ) from None


def _first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)
