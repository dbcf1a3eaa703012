"""The small tools of pytorch-accelerated: those of ours that have a counterpart there, and a few that exist only for its users."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import Tensor

from drivetrain.runtime.collectives import distributed_barrier
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.group import join_launched_world
from drivetrain.runtime.ranks import get_local_rank, is_master
from drivetrain.runtime.seeds import seed_worker as worker_init_fn
from drivetrain.runtime.seeds import set_seed
from drivetrain.train.callbacks.ema import ModelEma
from drivetrain.train.loaders import LIMIT_BATCHES_ENV_VAR, DataLoaderSlice, LimitBatches, limit_from_environment

__all__ = [
    "LIMIT_BATCHES_ENV_VAR", "DataLoaderSlice", "LimitBatches", "ModelEma", "limit_from_environment", "local_process_zero_first",
    "local_process_zero_only", "remove_padding", "set_seed", "worker_init_fn", "world_process_zero_only",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


def remove_padding(padded_tensor: Tensor, pad_value: float) -> Tensor:
    """Drop the rows that hold nothing but the padding value."""
    is_padding = (padded_tensor == pad_value).unsqueeze(-1).flatten(1).all(dim=1)
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
        join_launched_world(choose_device())  # a download comes before the Trainer
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
        join_launched_world(choose_device())
        try:
            return func(*args, **kwargs) if is_chosen() else None
        finally:
            distributed_barrier()  # also after an error, so that no process waits forever

    return restricted
