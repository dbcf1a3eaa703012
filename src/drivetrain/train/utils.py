"""Small tools around the Trainer, under the names by which people who move over know them."""

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.collectives import distributed_barrier
from drivetrain.runtime.ranks import get_local_rank, is_master
from drivetrain.runtime.seeds import seed_worker as worker_init_fn
from drivetrain.runtime.seeds import set_seed

__all__ = [
    "LIMIT_BATCHES_ENV_VAR",
    "DataLoaderSlice",
    "LimitBatches",
    "ModelEma",
    "limit_from_environment",
    "local_process_zero_first",
    "local_process_zero_only",
    "remove_padding",
    "set_seed",
    "worker_init_fn",
    "world_process_zero_only",
]

LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"
_OWN_LIMIT_VARIABLE = "DRIVETRAIN_LIMIT_BATCHES"
_LIMIT_VARIABLES = (_OWN_LIMIT_VARIABLE, LIMIT_BATCHES_ENV_VAR)  # the first that is set wins

P = ParamSpec("P")
R = TypeVar("R")


class LimitBatches:
    """A context in which every new Trainer runs at most so many batches per epoch; None lifts an outer limit.

    >>> with LimitBatches(3):
    ...     limit_from_environment()
    3
    """

    def __init__(self, num_batches: int | None):
        if num_batches is not None and num_batches < 1:
            raise ConfigError(f"num_batches={num_batches}: expected at least 1, or None for no limit.")
        self.num_batches = num_batches
        self._outer: list[dict[str, str | None]] = []

    def __enter__(self) -> "LimitBatches":
        self._outer.append({name: os.environ.get(name) for name in _LIMIT_VARIABLES})
        for name in _LIMIT_VARIABLES:
            os.environ[name] = "none" if self.num_batches is None else str(self.num_batches)
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._outer.pop().items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def limit_from_environment() -> int | None:
    """Return the number of batches the environment allows, or None for all of them."""
    name = next((name for name in _LIMIT_VARIABLES if os.environ.get(name)), None)
    if name is None or os.environ[name].strip().lower() == "none":
        return None
    text = os.environ[name].strip()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}={text!r}: expected a number of batches of at least 1, or 'none'.")
    return int(text)


class DataLoaderSlice:
    """The first batches of a loader, or all of them for a size of None; everything else about it is the loader's."""

    def __init__(self, dl: Any, slice_size: int | None):
        self.dl = dl
        self.slice_size = slice_size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dl, self.slice_size)

    def __len__(self) -> int:
        return len(self.dl) if self.slice_size is None else min(len(self.dl), self.slice_size)

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # not set yet, as while a copy is being made
            raise AttributeError(name)
        return getattr(self.dl, name)


class ModelEma(nn.Module):
    """A copy of a model whose weights follow it slowly: `decay * average + (1 - decay) * new`.

    Floating parameters and buffers are averaged; the others (`num_batches_tracked`) are copied. Override `update_fn`
    for another rule. `module.average.AveragedWeights` is the shadow for sharded or half-precision models; this one is
    a module of its own, which can be called.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999):
        super().__init__()
        if not 0 <= decay <= 1:
            raise ConfigError(
                f"decay={decay}: expected a number from 0 to 1; values near 1, such as 0.999, change slowly."
            )
        self.module = copy.deepcopy(unwrap(model)).requires_grad_(False).eval()
        self.decay = decay

    def update_fn(self, ema_model_weights: Tensor, updated_model_weights: Tensor) -> Tensor:
        """Return the new average of one floating entry."""
        return self.decay * ema_model_weights + (1.0 - self.decay) * updated_model_weights

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take one step towards the model's present weights."""
        averages, weights = self._copy_others(model)
        if type(self).update_fn is not ModelEma.update_fn:
            for average, weight in zip(averages, weights):
                average.copy_(self.update_fn(average, weight))
        elif averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    @torch.no_grad()
    def set(self, model: nn.Module) -> None:
        """Take over the model's present weights."""
        averages, weights = self._copy_others(model)
        if averages:
            torch._foreach_copy_(averages, weights)

    def _copy_others(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Copy entries that have no mean and return the pairs that have one."""
        averages, weights = [], []
        for average, weight in zip(_tensors(self.module), _tensors(unwrap(model))):
            if average.is_floating_point() or average.is_complex():
                averages.append(average)
                weights.append(weight if weight.device == average.device else weight.to(average.device))
            else:
                average.copy_(weight)
        return averages, weights


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def remove_padding(padded_tensor: Tensor, pad_value: float) -> Tensor:
    """Drop the rows that hold nothing but the padding value."""
    is_padding = (padded_tensor == pad_value).reshape(len(padded_tensor), -1).all(dim=1)
    return padded_tensor[~is_padding]


def local_process_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Run a function on the first process of each node; the others wait and get None."""
    return _on_some(func, lambda: get_local_rank() == 0)


def world_process_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Run a function on the first process of all; the others wait and get None."""
    return _on_some(func, is_master)


def local_process_zero_first(func: Callable[P, R]) -> Callable[P, R]:
    """Run a function on the first process of each node, then on the others: for downloads and caches."""

    @wraps(func)
    def ordered(*args: P.args, **kwargs: P.kwargs) -> R:
        if get_local_rank() != 0:
            distributed_barrier()
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            distributed_barrier()

    return ordered


def _on_some(func: Callable[P, R], is_chosen: Callable[[], bool]) -> Callable[P, R | None]:
    @wraps(func)
    def restricted(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return func(*args, **kwargs) if is_chosen() else None
        finally:
            distributed_barrier()  # also after an error, so that no process waits for ever

    return restricted
