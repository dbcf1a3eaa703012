"""Running statistics of batch norms, measured again for weights that were not trained step by step.

An average of weights has activations no training batch has seen. Its batch norms get the statistics of a pass over training
data: of this rank's share, then averaged over ranks. The pass reads through a loader of its own and leaves generators, modes and
the place in the data as they were.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from drivetrain.algorithms.utils.passes import autocast_of, bare_model, call_model
from drivetrain.context.moving import move_to_device
from drivetrain.context.state import State
from drivetrain.data.loader import SmartDataLoader
from drivetrain.runtime.ranks import data_group, is_distributed, num_data_ranks
from drivetrain.runtime.seeds import capture_rng, restore_rng


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@torch.no_grad()
def measure_batch_norms(state: State, max_batches: int | None = None) -> bool:
    """Set the running statistics to the mean over a pass of training data; return whether there was anything to do."""
    model = bare_model(state)
    layers = batch_norms(model)
    if not layers or state.train_dataloader is None:
        return False
    kept = capture_rng(), [(module, module.training) for module in model.modules()], [m.momentum for m in layers]
    try:
        model.eval()  # dropout is off; only what is measured trains
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a mean over all batches
            layer.train()
        with autocast_of(state):
            for batch in itertools.islice(_own_pass(state), max_batches):
                call_model(state, batch)
    finally:
        restore_rng(kept[0])
        for module, training in kept[1]:
            module.training = training
        for layer, momentum in zip(layers, kept[2]):
            layer.momentum = momentum
    _average_over_ranks(layers)
    return True


def copy_statistics(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return each running statistic with a copy of its values."""
    found = [buffer for layer in batch_norms(model) for buffer in layer.buffers(recurse=False)]
    return [(buffer, buffer.clone()) for buffer in found]


@torch.no_grad()
def put_statistics(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Write copied statistics back."""
    for buffer, values in copies:
        buffer.copy_(values)


def _own_pass(state: State) -> Iterator[object]:
    """Yield the batches of the present epoch's order, read with a second loader."""
    loader = state.train_dataloader
    if isinstance(loader, SmartDataLoader):
        second = loader.rebuild(loading_bar=False, num_workers=0, **_without_workers(loader))
        second.set_epoch(state.clock.epoch)
        loader = second
    elif isinstance(loader, DataLoader):
        loader = SmartDataLoader.from_loader(loader, loading_bar=False).to(state.device)
    for batch in loader:
        yield move_to_device(state.device, batch)


def _without_workers(loader: SmartDataLoader[Any]) -> dict[str, object]:
    """Return the arguments that only make sense with workers, switched off."""
    off = {"persistent_workers": False, "prefetch_factor": None, "timeout": 0, "worker_init_fn": None}
    return {name: value for name, value in off.items() if name in loader._arguments}


def _average_over_ranks(layers: list[_BatchNorm]) -> None:
    if not is_distributed() or num_data_ranks() == 1:
        return
    for layer in layers:
        for buffer in (layer.running_mean, layer.running_var):
            assert buffer is not None
            dist.all_reduce(buffer, group=data_group())
            buffer.div_(num_data_ranks())
