"""Extra passes through the model: to score samples, or to reserve memory, and leave no trace.

A pass outside the loop uses the run's precision and fires no events. It goes around the distributed shell, because nothing is to
be synchronised.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from drivetrain.algorithms.utils.parts import tensors_of
from drivetrain.context.state import State
from drivetrain.core.types import Batch
from drivetrain.module.precision import parse_precision
from drivetrain.module.wrapping import unwrap


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
    so here too. A mapping is spread over those arguments that the model's `forward` has; of a tuple the first entry is the input, unless
    the model computes its own loss.
    """
    model = bare_model(state)
    for algorithm in state.algorithms:
        prepare = getattr(algorithm, "prepare_batch", None)
        batch = batch if prepare is None else prepare(state, batch)
    has_loss = state.loss_fn is not None
    if not has_loss and own_loss(state) is not None:
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**_taken(model, batch))
    if isinstance(batch, list | tuple):
        return model(batch[0]) if has_loss else model(*batch)
    return model(batch)


def own_loss(state: State) -> Batch:
    """Return the model's method `loss(outputs, batch)`, or None where it has none."""
    loss = getattr(unwrap(state.model), "loss", None) if isinstance(state.model, nn.Module) else None
    return loss if inspect.ismethod(loss) and len(inspect.signature(loss).parameters) >= 2 else None


def accepted_names(model: nn.Module) -> frozenset[str] | None:
    """Return the names of the model's inputs, or None where it takes any."""
    parameters = inspect.signature(unwrap(model).forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _taken(model: nn.Module, batch: Mapping[str, object]) -> dict[str, object]:
    names = accepted_names(model)
    return {name: value for name, value in batch.items() if names is None or name in names}


@contextmanager
def without_trace(state: State) -> Iterator[None]:
    """Put the model's buffers and torch's generators back afterwards: running statistics and dropout go on as if nothing was."""
    kept = [
        (module._buffers, name, buffer, None if buffer is None else buffer.clone())
        for module in bare_model(state).modules()
        for name, buffer in module._buffers.items()
    ]
    accelerator = None if state.device.type == "cpu" else torch.get_device_module(state.device)
    generators = torch.get_rng_state(), None if accelerator is None else accelerator.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(generators[0])
        if accelerator is not None:
            accelerator.set_rng_state(generators[1])
        with torch.no_grad():
            for buffers, name, buffer, before in kept:
                buffers[name] = buffer if buffer is None or before is None else buffer.copy_(before)


def run_and_forget(state: State, batch: object) -> None:
    """Run a batch forward and backward once, so that its memory is reserved; parameters and gradients stay as they are."""
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    is_sharded = any(hasattr(p, "device_mesh") for p in parameters)
    with without_trace(state), torch.set_grad_enabled(not is_sharded):
        with autocast_of(state):
            outputs = call_model(state, batch)
        ends = [tensor.float().sum() for tensor in tensors_of(outputs) if tensor.requires_grad]
        if ends:
            # Gradients are returned, not accumulated: no hook of an optimizer or a distributed shell hears of them.
            torch.autograd.grad(torch.stack(ends).sum(), parameters, allow_unused=True)
