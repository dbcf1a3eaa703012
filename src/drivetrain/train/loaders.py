"""What the loop needs from its data: loaders that are built, placed, limited and measured.

A loader that the Trainer builds is a `SmartDataLoader`: it delivers on the device, tracks its position and counts samples over
all ranks. A loader that the user built is used unchanged; what it does not report is determined in other ways.
"""

import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain.context.moving import move_to_device
from drivetrain.context.state import length as length
from drivetrain.core.arguments import check_count
from drivetrain.core.containers import with_environment, with_last
from drivetrain.core.errors import ConfigError, warn
from drivetrain.core.types import Settings
from drivetrain.data.columns import find_columns
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.order import keeps_state
from drivetrain.data.workers import guard_workers
from drivetrain.runtime.device import usable_cpus
from drivetrain.runtime.ranks import (
    clear_data_ranks,
    data_rank,
    data_ranks_belong_to_trainer,
    get_num_processes,
    is_distributed,
    num_data_ranks,
    set_data_ranks,
)
from drivetrain.runtime.seeds import seed_worker
from drivetrain.train.settings import TrainSettings

if TYPE_CHECKING:
    from drivetrain.train.accelerator import TrainerRuntime
    from drivetrain.train.loop import TrainerLoop
    from drivetrain.train.run import SharedParts
    from drivetrain.train.trainer import Trainer


def use_data_ranks(shared: "SharedParts") -> None:
    """Read the samples that a Trainer's plan assigns to this rank. The plan of another Trainer applies to that one only."""
    if shared.data_ranks is not None:
        set_data_ranks(*shared.data_ranks, of_trainer=True)
    elif data_ranks_belong_to_trainer():
        clear_data_ranks()


def is_ready_loader(data: object) -> TypeGuard[Iterable[object]]:
    """Return whether this is a loader, and not a dataset to build one for."""
    if isinstance(data, DataLoader | DataLoaderSlice):
        return True
    stages = getattr(data, "pipeline", None)  # webdataset's loader is an IterableDataset that reads from torch's
    if isinstance(stages, list) and any(isinstance(stage, DataLoader) for stage in stages):
        return True
    return not isinstance(data, Dataset) and hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


class LoaderWrapper:
    """Adds something to a loader. Everything else is delegated to it."""

    def __init__(self, dl: Any):
        self.dl = dl

    def __len__(self) -> int:
        return len(self.dl)

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # not set yet, as while a copy is being made
            raise AttributeError(name)
        return getattr(self.dl, name)


class EvaluationLoaders(LoaderWrapper):
    """The loaders of several evaluation sets, by name. Any other attribute is that of the first."""

    def __init__(self, loaders: Mapping[str, Any]):
        super().__init__(next(iter(loaders.values())))
        self._loaders = dict(loaders)

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return the names and loaders, in the user's order."""
        return self._loaders.items()

    def __iter__(self) -> Iterator[object]:
        return itertools.chain.from_iterable(self._loaders.values())

    def __len__(self) -> int:
        return sum(map(len, self._loaders.values()))


def set_names(loader: object) -> list[str] | None:
    """Return the names of the evaluation sets: none for a single one, and None without a loader."""
    if isinstance(loader, EvaluationLoaders):
        return [name for name, _ in loader.items()]
    return None if loader is None else []


def map_loaders(function: Callable[[Any], Any], loader: object) -> Any:
    """Apply a function to a loader, or to each of several evaluation loaders."""
    if isinstance(loader, EvaluationLoaders):
        return EvaluationLoaders({name: function(one) for name, one in loader.items()})
    return function(loader)


def make_evaluation_loaders(trainer: "Trainer", batch_size: int, kwargs: Settings | None) -> Any:
    """Return the loader of the evaluation data, or one for each of several sets given as a mapping of names."""
    data = trainer.eval_dataset
    if not isinstance(data, Mapping) or isinstance(data, Dataset) or find_columns(data) is not None:
        return trainer.create_eval_dataloader(batch_size, kwargs)
    if not data or not all(isinstance(name, str) and name for name in data):
        raise ConfigError(
            f"eval_dataset={{{', '.join(map(repr, data))}}}: expected a dataset, or datasets by name such as "
            "{'clean': dataset, 'noisy': other_dataset}."
        )
    made = {}
    try:
        for name, trainer.eval_dataset in data.items():  # the hook builds the loader of `self.eval_dataset`
            made[name] = trainer.create_eval_dataloader(batch_size, kwargs)
    finally:
        trainer.eval_dataset = data
    return EvaluationLoaders(made)


def default_kwargs(device: torch.device | str, dataset: object, batch_size: int) -> Settings:
    """Return the loader arguments that depend on the machine and the data."""
    world = get_num_processes()
    local_processes = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or world)
    workers = 0 if isinstance(dataset, TensorDataset) else min(8, usable_cpus() // local_processes)
    return {
        "pin_memory": torch.device(device).type == "cuda",
        "batch_size": batch_size,
        "num_workers": workers,
        "worker_init_fn": seed_worker,
    }


_RULES_OUT = {"sampler": {"shuffle"}, "batch_sampler": {"shuffle", "batch_size"}, "global_batch_size": {"batch_size"}}
"""For an argument of a loader, the defaults that it contradicts."""


def merge_kwargs(dataset: object, defaults: Settings, given: Mapping[str, object] | None) -> Settings:
    """Return the loader's arguments. The user's values win, and remove defaults that contradict them."""
    given = dict(given or {})
    merged = {**defaults, **given}
    ruled_out = {"shuffle"} if isinstance(dataset, IterableDataset) else set()
    for name in given.keys() & _RULES_OUT.keys():
        ruled_out |= _RULES_OUT[name]
    if merged.get("num_workers"):
        merged.setdefault("persistent_workers", True)  # workers live for the whole run
    return {name: value for name, value in merged.items() if name in given or name not in ruled_out}


def prepare(device: torch.device | str, loader: object, limit_batches: int | float | None) -> Any:
    """Make a loader deliver this rank's share to the device, and limit it."""
    if isinstance(loader, EvaluationLoaders):
        return map_loaders(lambda one: prepare(device, one, limit_batches), loader)
    loader = deliver(loader, device)
    plain = unsliced(loader)
    if isinstance(plain, DataLoader) and not isinstance(plain, SmartDataLoader):
        guard_workers(plain)
    return limit(loader, limit_batches)


def deliver(loader: object, device: torch.device | str) -> Any:
    """Return a loader that delivers this rank's share, on the device if possible. A torch loader has the attribute `device`."""
    if isinstance(loader, DataLoader) and not isinstance(loader, SmartDataLoader):
        if not is_distributed() or _splits_itself(loader):
            if not hasattr(loader, "device"):
                loader.device = torch.device(device)  # callbacks of accelerate's users ask for it
            return loader
        loader = SmartDataLoader.from_loader(loader)
    if isinstance(loader, SmartDataLoader):
        loader.loading_bar = False
        loader.to(device)
    return loader


def _splits_itself(loader: DataLoader[object]) -> bool:
    from torch.utils.data.distributed import DistributedSampler

    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        return False
    if (sampler.rank, sampler.num_replicas) != (data_rank(), num_data_ranks()):
        raise ConfigError(
            f"the loader's DistributedSampler gives this rank share {sampler.rank} of {sampler.num_replicas}, but the plan needs share "
            f"{data_rank()} of {num_data_ranks()}: ranks of one tensor or sequence group must see the same samples. Give the dataset, or a "
            "plain DataLoader, which the Trainer splits for the plan."
        )
    return True


def warn_if_read_once(purpose: str, settings: TrainSettings, loader: object) -> None:
    """Warn about a loader that has nothing to give after the first epoch."""
    if isinstance(loader, Iterator) and settings.epochs != 1:
        warn(
            f"the {purpose} data is a {type(loader).__name__}, which can be read only once: epochs after the first will be empty. Give "
            "an iterable that can restart, or num_epochs=1."
        )


def check_training_loader(loader: Any, dataset: Any, settings: TrainSettings) -> None:
    """Raise for a loader without batches, and warn about one that can be read only once."""
    warn_if_read_once("training", settings, loader)
    if length(loader) != 0:
        return
    if loader is dataset or not isinstance(loader, SmartDataLoader):
        warn(f"the training loader ({type(loader).__name__}) has no batches: epochs will be empty.")
        return
    size = len(dataset)
    raise ConfigError(
        f"train_dataset has {size} samples, less than one batch of {settings.per_device_batch_size}, and drop_last is "
        f"set. Use a smaller batch, or drop_last=False."
        if size
        else "train_dataset is empty: it has 0 samples. Check the path or the filter it was made with."
    )


def limit(loader: object, batches: int | float | None) -> Any:
    """Return a loader that stops after a number of batches, or a fraction of them."""
    if batches is None:
        return loader
    if isinstance(loader, EvaluationLoaders):
        return map_loaders(lambda one: limit(one, batches), loader)
    if isinstance(batches, float):
        whole = length(loader)
        if whole is None:
            raise ConfigError(
                f"limit {batches!r}: a fraction needs a loader with a length; give a number of batches instead."
            )
        batches = max(1, int(whole * batches))
    return DataLoaderSlice(loader, batches)


def batch_size_of_loader(loader: object) -> int | None:
    """Return the batch size per process that a loader was built with, or None."""
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def unsliced(loader: object) -> Any:
    """Return the loader inside a slice of it."""
    while isinstance(loader, DataLoaderSlice):
        loader = loader.dl
    return loader


def smart_loader(loader: object) -> SmartDataLoader[Any] | None:
    """Return the `SmartDataLoader` inside a loader or a slice of it."""
    loader = unsliced(loader)
    return loader if isinstance(loader, SmartDataLoader) else None


def saves_itself(loader: object) -> bool:
    """Return whether a loader of the user's saves a position of its own, as torchdata's `StatefulDataLoader` does."""
    return keeps_state(loader) and smart_loader(loader) is None


def is_padding(loader: object) -> bool:
    """Return whether the current batch is only padding, because this rank had no samples left."""
    smart = smart_loader(loader)
    return smart is not None and smart.batch_info is not None and smart.batch_info.size == 0


def set_epoch(loader: Any, epoch: int) -> None:
    """Pass the number of the epoch to a loader, or to its sampler."""
    loader = unsliced(loader)
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if part is not None and callable(getattr(type(part), "set_epoch", None)):
            part.set_epoch(epoch)
            return


def mover(device: torch.device | str, loader: object) -> Callable[..., object] | None:
    """Return the function that moves batches of this loader to the device; None if they are already there."""
    smart = smart_loader(loader)
    if (smart is not None and smart.move_output) or torch.device(device).type == "cpu":
        return None
    return partial(move_to_device, device, non_blocking=True)


def look_ahead(loader: Iterable[object], done: int = 0, ahead: int = 1) -> Iterator[tuple[object, bool]]:
    """Yield each batch after the first `done` of an epoch, and whether it is the last, by reading one batch ahead.

    A `SmartDataLoader` knows which one is the last, unless it reads nothing ahead itself. It and every other loader that saves its own
    position must not be read ahead of the loop, because the position counts what the iterator has returned: there no batch is the last.
    Nor is it with `ahead=0`, for a loop that does not need to know.

    >>> list(look_ahead("ab"))
    [('a', False), ('b', True)]
    """
    inner, end = unsliced(loader), None
    while isinstance(loader, DataLoaderSlice):
        end = min((size for size in (end, loader.slice_size) if size is not None), default=None)
        loader = loader.dl
    if end is not None:
        if done >= end:
            return
        loader = itertools.islice(inner, end - done)
    if not ahead or isinstance(inner, SmartDataLoader) or saves_itself(inner):
        for number, batch in enumerate(loader, done + 1):
            info = getattr(inner, "batch_info", None)
            yield batch, number == end or bool(info and info.last)
        return
    yield from with_last(loader)


def move_model(runtime: "TrainerRuntime", model: object, loss_func: object = None) -> Any:
    """Move a model to the device in the run's precision, and what its loss holds, such as weights of classes. Return the model."""
    if isinstance(loss_func, nn.Module):
        loss_func.to(runtime.device)
    if not isinstance(model, nn.Module):
        return model
    model = runtime.precision.cast_parameters(model)
    return model if getattr(model, "hf_device_map", None) else model.to(runtime.device)


def token_counter(batch: object) -> Callable[..., int] | None:
    """Return how to count the tokens of batches like this one, or None for data that is not text."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return lambda batch: batch["input_ids"].numel()
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else None
    if isinstance(first, Tensor) and first.dtype in (torch.int64, torch.int32) and first.dim() == 2:
        return lambda batch: batch[0].numel()
    return None


LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"
_OWN_LIMIT_VARIABLE = "DRIVETRAIN_LIMIT_BATCHES"
_LIMIT_VARIABLES = (_OWN_LIMIT_VARIABLE, LIMIT_BATCHES_ENV_VAR)  # the first that is set wins


class LimitBatches:
    """A context in which every new Trainer runs at most this many batches per epoch. None removes an outer limit.

    >>> with LimitBatches(3):
    ...     limit_from_environment()
    3
    """

    def __init__(self, num_batches: int | None):
        if num_batches is not None:
            check_count("num_batches", num_batches, hint=", or None for no limit")
        self.num_batches = num_batches
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> "LimitBatches":
        text = "none" if self.num_batches is None else str(self.num_batches)
        self._entered.append(with_environment(**dict.fromkeys(_LIMIT_VARIABLES, text)))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def limit_from_environment() -> int | None:
    """Return the limit that the environment sets, or None."""
    name = next((name for name in _LIMIT_VARIABLES if os.environ.get(name)), None)
    if name is None or os.environ[name].strip().lower() == "none":
        return None
    text = os.environ[name].strip()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}={text!r}: expected a number of batches of at least 1, or 'none'.")
    return int(text)


class DataLoaderSlice(LoaderWrapper):
    """The first batches of a loader, or all of them for a size of None."""

    def __init__(self, dl: Any, slice_size: int | None):
        super().__init__(dl)
        self.slice_size = slice_size

    def __iter__(self) -> Iterator[object]:
        return itertools.islice(self.dl, self.slice_size)

    def __len__(self) -> int:
        return len(self.dl) if self.slice_size is None else min(len(self.dl), self.slice_size)


# ---------------------------------------------------------------------- a loop of the user's own
# A subclass may write out the loop over its batches, as pytorch-accelerated's `_run_train_epoch` does, and call hooks and callbacks itself.
# Around each batch it takes, this adds the move to the device, the accumulation window, counting, checkpoints, evaluation, limits, signals.


class CountingLoader(LoaderWrapper):
    """A loader whose batches are counted as they are taken."""

    def __init__(self, trainer: "TrainerLoop", loader: Any):
        super().__init__(loader)
        self._trainer, self.loader = trainer, loader
        self._steps: Generator[object, None, None] | None = None
        self._in_step = False
        self.ended = False
        """Whether a limit or a stop has ended the run."""

    def __iter__(self) -> Iterator[object]:
        self._steps = self._take()
        return self._steps

    def close(self) -> None:
        """Count the batch at which the loop was left early."""
        if self._steps is not None:
            self._steps.close()
        if self._in_step:
            self._finish()

    def _take(self) -> Generator[object, None, None]:
        run, state = self._trainer.run, self._trainer.state
        clock, stepper = state.clock, run.stepper
        self.ended = self._trainer._resume_inside_epoch()
        for state.batch, last in () if self.ended else self._trainer._batches(self.loader):
            run.inside_step = self._in_step = True
            state.batch_output = None
            if not stepper.is_simple:
                stepper.begin(last)
            yield state.batch
            if self._finish():
                break
        if not self.ended or clock.batch_in_epoch == run.data.batches_per_epoch:
            clock.next_epoch()

    def _finish(self) -> bool:
        self._in_step, stepper = False, self._trainer.run.stepper
        closes = stepper.window.closes
        if closes and not stepper.is_simple:
            stepper.end()
        self.ended = self._trainer._finish_batch(closes)
        return self.ended
