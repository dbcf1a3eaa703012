"""What the loop needs from its environment: device, ranks, backward, clipping, gathering.

The Trainer keeps one of these as `runtime`, and under the name `_accelerator` for code written for pytorch-accelerated: the
members that such code calls are here, on top of `drivetrain.runtime`.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.core.arguments import naming
from drivetrain.core.containers import leaves
from drivetrain.core.display import print_if_possible
from drivetrain.core.errors import ConfigError, DistributedError
from drivetrain.core.files import atomic_write
from drivetrain.core.lazy import Slot
from drivetrain.module import stepper
from drivetrain.module.accumulation import AccumulationWindow
from drivetrain.module.ddp import wrap_ddp
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.precision import Precision, parse_precision
from drivetrain.module.stepper import Stepper
from drivetrain.module.wrapping import is_wrapped, unwrap
from drivetrain.runtime.collectives import distributed_barrier, gather_rows
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.group import join_launched_world
from drivetrain.runtime.ranks import get_local_rank, get_num_processes, get_rank, is_distributed
from drivetrain.train import loaders
from drivetrain.train.batches import map_tensors

T = TypeVar("T")

FOREIGN_RUNTIME: Slot[Callable[[object, str | Precision | None], "TrainerRuntime"]] = Slot("train.accelerator")
"""Creates a runtime from another library's accelerator."""


def as_runtime(given: object, precision: str | Precision | None = None) -> "TrainerRuntime":
    """Return the runtime for the result of `_create_accelerator`: itself, or one around another library's accelerator."""
    return given if isinstance(given, TrainerRuntime) else FOREIGN_RUNTIME.load()(given, precision)


def _fact(read: Callable[[], T]) -> T:
    """Return a property that asks a function about this process."""
    return property(lambda runtime: read())  # type: ignore[return-value]


def _unsupported(name: str, advice: str) -> Callable[..., None]:
    """Return a method of accelerate's that raises and says what to use instead."""

    def method(runtime: "TrainerRuntime", *args: object, **kwargs: object) -> None:
        raise DistributedError(f"{name}({', '.join(map(repr, args))}): {advice}")

    return method


class TrainerRuntime:
    """Device, precision and process of one trainer."""

    def __init__(self, device: str | torch.device | None = None, precision: str | Precision | None = None):
        with naming("device", device):
            chosen = choose_device(device)
        join_launched_world(chosen)
        with naming("device", device):
            self.device = choose_device("auto" if device is None else device)
        self.precision = parse_precision(precision)
        self.stepper = Stepper(
            None, AccumulationWindow(), scaler=self.precision.make_scaler(self.device), device=self.device
        )
        """The one of the current run, if there is one."""

    # Where this process is.

    num_processes = _fact(get_num_processes)
    process_index = _fact(get_rank)
    local_process_index = _fact(get_local_rank)
    is_main_process = _fact(lambda: get_rank() == 0)
    is_local_main_process = _fact(lambda: get_local_rank() == 0)

    @property
    def mixed_precision(self) -> str:
        return self.precision.name

    @property
    def distributed_type(self) -> str:
        if not is_distributed():
            return "NO"
        return "MULTI_GPU" if self.device.type == "cuda" else "MULTI_CPU"

    def wait_for_everyone(self) -> None:
        """Wait until all processes have reached this call."""
        distributed_barrier()

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print once per node."""
        if self.is_local_main_process:
            print_if_possible(*args, **kwargs)

    # The model.

    def prepare_model(self, model: T, **ddp_kwargs: object) -> T | nn.Module:
        """Wrap a model for gradient averaging if there are several processes."""
        if not is_distributed() or not isinstance(model, nn.Module) or is_wrapped(model):
            return model
        return wrap_ddp(model, self.device, **ddp_kwargs)

    def unwrap_model(self, model: object, keep_torch_compile: bool = True) -> Any:
        """Return the user's own model."""
        return unwrap(model, keep_compile=keep_torch_compile) if isinstance(model, nn.Module) else model

    def prepare(self, *objects: object) -> Any:
        """Move modules to the device and wrap them, and make loaders deliver there. Other objects are returned unchanged."""
        done = list(objects)
        for place, given in enumerate(objects):
            if isinstance(given, nn.Module):
                done[place] = self.prepare_model(given.to(self.device))
            elif isinstance(given, DataLoader):
                done[place] = loaders.deliver(given, self.device)
        return done[0] if len(done) == 1 else tuple(done)

    def no_sync(self, model: object) -> AbstractContextManager[object]:
        """Return a context in which backward does not average gradients over processes."""
        return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context that computes in the run's precision."""
        return self.precision.autocast(self.device.type)

    def join_uneven_inputs(self, *_: object, **__: object) -> AbstractContextManager[None]:
        """Do nothing: shards of unequal size are padded by the loader."""
        return nullcontext()

    def free_memory(self) -> None:
        """Release cached device memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # The step.

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, None if none is needed."""
        return self.stepper.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.stepper.scaler = scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was skipped."""
        return self.stepper.was_skipped is True

    def backward(self, loss: Tensor, **kwargs: object) -> None:
        """Back-propagate, with loss scaling if float16 needs it."""
        self.stepper.backward(loss, **kwargs)

    def step(self, optimizer: object) -> None:
        """Step the optimizer. A scaler skips the step if a gradient overflowed."""
        if optimizer is self.stepper.optimizer:
            self.stepper.step()
        else:
            self.stepper.was_skipped = stepper.step(optimizer, self.scaler)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every entry of the gradients."""
        stepper.clip_grad_value_(parameters, clip_value)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients to at most this norm and return the norm before. Full and sharded gradients may be mixed."""
        return stepper.clip_grad_norm_(parameters, max_norm, norm_type, device=self.device)

    # Several processes.

    def gather(self, tensor: object) -> Any:
        """Concatenate a tensor of all data ranks along its first dimension. The lengths may differ."""
        return map_tensors(gather_rows, tensor) if is_distributed() else tensor

    def pad_across_processes(self, tensor: Tensor, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Tensor:
        """Pad a tensor to the largest size over all data ranks along one dimension."""
        if not is_distributed():
            return tensor
        size = torch.tensor([tensor.shape[dim]], device=self.device)
        largest = int(gather_rows(size).max())
        if largest == tensor.shape[dim]:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = largest - tensor.shape[dim]
        padding = tensor.new_full(shape, pad_index)
        return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)

    # Files.

    def save(self, obj: object, path: str | os.PathLike[str], save_on_each_node: bool = True) -> None:
        """Write an object atomically, once per node or once. All processes must call this if it holds sharded tensors."""
        if is_distributed() and any(map(is_dtensor, leaves(obj, Tensor))):
            obj = map_tensors(lambda tensor: tensor.full_tensor() if is_dtensor(tensor) else tensor, obj)  # type: ignore[attr-defined]
        target = Path(path)
        if target.is_dir():
            raise ConfigError(f"{str(path)!r} is a folder, expected a file such as {str(target / 'model.pt')!r}.")
        if self.is_local_main_process if save_on_each_node else self.is_main_process:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(target) as stream:
                torch.save(obj, stream)

    save_state = _unsupported("save_state", "use trainer.save_training_state(folder), which saves everything.")
    load_state = _unsupported("load_state", "use trainer.load_training_state(folder), or train(resume_from=folder).")
    register_for_checkpointing = _unsupported(
        "register_for_checkpointing",
        "assign the object to the state instead, for example trainer.state.my_object = obj; everything on the state is saved and restored.",
    )


def overrides_runtime(runtime: TrainerRuntime, name: str) -> bool:
    """Return whether a subclass, or an assignment to the instance, replaces a method of the runtime."""
    return name in vars(runtime) or getattr(type(runtime), name, None) is not getattr(TrainerRuntime, name)
