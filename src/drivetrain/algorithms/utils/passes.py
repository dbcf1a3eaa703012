"""Extra passes through the model: to score samples, or to reserve memory, and leave no trace.

A pass outside the loop uses the run's precision and fires no events. It goes around the distributed shell, because nothing is to
be synchronised.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from drivetrain.context.moving import move_to_device
from drivetrain.context.state import State
from drivetrain.core.arguments import accepted_names
from drivetrain.core.containers import leaves
from drivetrain.core.types import Batch
from drivetrain.data.loader import SmartDataLoader
from drivetrain.module.precision import parse_precision
from drivetrain.module.probing import attributes_set
from drivetrain.module.wrapping import num_inputs, own_loss, unwrap
from drivetrain.runtime.ranks import data_group, is_distributed, num_data_ranks
from drivetrain.runtime.seeds import preserve_rng_state


def autocast_of(state: State) -> AbstractContextManager[object]:
    """Return the context in which the run computes losses."""
    if state.precision is None:
        return nullcontext()
    return parse_precision(state.precision).autocast(state.device.type)


def bare_model(state: State) -> nn.Module:
    """Return the user's model, compiled if it is, without what synchronises it."""
    return unwrap(state.model, keep_compile=True)


def call_model(state: State, batch: object) -> Batch:
    """Return the model's outputs for a batch, which meets the model as it does in the loop.

    Algorithms that give the model more than the loader does (`prepare_batch(state, batch) -> batch`, which changes nothing else) do
    so here too. A mapping is spread over those arguments that the model's `forward` has; of a tuple the first entries are the inputs, as
    many as `forward` requires, unless the model computes its own loss.
    """
    model = bare_model(state)
    for algorithm in state.algorithms:
        prepare = getattr(algorithm, "prepare_batch", None)
        batch = batch if prepare is None else prepare(state, batch)
    has_loss = state.loss_fn is not None
    if not has_loss and own_loss(state.model) is not None:
        return model(batch)
    if isinstance(batch, Mapping):
        names = accepted_names(unwrap(model).forward)
        return model(**{name: value for name, value in batch.items() if names is None or name in names})
    if isinstance(batch, list | tuple):
        return model(*batch[: num_inputs(model)]) if has_loss else model(*batch)
    return model(batch)


@contextmanager
def preserve_buffers_and_rng(state: State) -> Iterator[None]:
    """Restore the model's buffers and all generators afterwards: running statistics and dropout continue as without it."""
    kept = [
        (module._buffers, name, buffer, None if buffer is None else buffer.clone())
        for module in bare_model(state).modules()
        for name, buffer in module._buffers.items()
    ]
    with state.preserve_random():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffers, name, buffer, before in kept:
                    buffers[name] = buffer if buffer is None or before is None else buffer.copy_(before)


def warm_up_memory(state: State, batch: object) -> None:
    """Run a batch forward and backward once, so that its memory is reserved; parameters and gradients stay as they are."""
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    is_sharded = any(hasattr(p, "device_mesh") for p in parameters)
    with preserve_buffers_and_rng(state), torch.set_grad_enabled(not is_sharded):
        with autocast_of(state):
            outputs = call_model(state, batch)
        ends = [tensor.float().sum() for tensor in leaves(outputs, Tensor) if tensor.requires_grad]
        if ends:
            # Gradients are returned, not accumulated: no hook of an optimizer or a distributed shell is called.
            torch.autograd.grad(torch.stack(ends).sum(), parameters, allow_unused=True)


# Running statistics of batch norms. An average of weights has activations that no training batch has seen. Its batch norms get the
# statistics of a pass over training data: of this rank's share, then averaged over ranks. The pass reads through a loader of its own and
# leaves generators, modes and the place in the data as they were.


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
    # Dropout is off, only what is measured trains, and the statistics are a mean over all batches.
    modes: list[tuple[object, str, object]] = [(m, "training", m in layers) for m in model.modules()]
    with (
        preserve_rng_state(),
        attributes_set([*modes, *((layer, "momentum", None) for layer in layers)]),
        autocast_of(state),
    ):
        for layer in layers:
            layer.reset_running_stats()
        for batch in itertools.islice(_own_pass(state), max_batches):
            call_model(state, batch)
    if is_distributed() and num_data_ranks() > 1:
        for buffer in (buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)):
            assert buffer is not None
            dist.all_reduce(buffer, group=data_group())
            buffer.div_(num_data_ranks())
    return True


def _own_pass(state: State) -> Iterator[object]:
    """Yield the batches of the present epoch's order, read with a second loader."""
    loader = state.train_dataloader
    if isinstance(loader, SmartDataLoader):
        # Arguments that only make sense with workers are switched off.
        off = {"persistent_workers": False, "prefetch_factor": None, "timeout": 0, "worker_init_fn": None}
        off = {name: value for name, value in off.items() if name in loader._arguments}
        loader = loader.rebuild(loading_bar=False, num_workers=0, **off)
        loader.set_epoch(state.clock.epoch)
    elif isinstance(loader, DataLoader):
        loader = SmartDataLoader.from_loader(loader, loading_bar=False).to(state.device)
    for batch in loader:
        yield move_to_device(state.device, batch)
