"""Run a module as a test: without lasting changes, or on fake tensors, which need neither memory nor arithmetic."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_map_only

_SIDE, ROWS, LENGTH = 16, 2, 8  # of made-up images and sequences


def keeps_shape(block: nn.Module) -> bool | None:
    """Return whether a block returns a tensor of its input's shape, alone or first in a tuple; None if it cannot be tried.

    The input is an image with the channels of the first convolution, or a sequence as wide as the first norm or matrix.
    """
    shape = _likely_input(block)
    if shape is None:
        return None
    tensors = [tensor for tensor in (*block.parameters(), *block.buffers()) if tensor.is_floating_point()]
    like = tensors[0] if tensors else torch.empty(0)
    try:
        out = call_on_fake_tensors(block, (torch.empty(shape, dtype=like.dtype, device=like.device),))
    except Exception:  # other arguments are needed, another shape is expected, or the code cannot be followed
        resizes = any(
            isinstance(module, _ConvTransposeNd) or (isinstance(module, _ConvNd) and max(module.stride) > 1)
            for module in block.modules()
        )
        return False if resizes else None
    first = out[0] if isinstance(out, tuple) and out else out
    return isinstance(first, Tensor) and tuple(first.shape) == shape


def _likely_input(block: nn.Module) -> tuple[int, ...] | None:
    for module in block.modules():
        if isinstance(module, _ConvNd):
            return (ROWS, module.in_channels, *([_SIDE] * len(module.kernel_size)))
        if isinstance(module, nn.LayerNorm):
            return (ROWS, LENGTH, *module.normalized_shape)
        if isinstance(module, nn.Linear):
            return (ROWS, LENGTH, module.in_features)
        if isinstance(module, nn.MultiheadAttention):
            return (ROWS, LENGTH, module.embed_dim)
    return None


@contextmanager
def silence_torch_logging() -> Iterator[None]:
    """Log nothing that fails on fake tensors: it is reported as the reason why something is not known."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._subclasses")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def call_on_fake_tensors(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None, *, with_graph: bool = False
) -> Any:
    """Return what a model returns for fake copies of its arguments, parameters and buffers, optionally with an autograd graph."""
    random_state = torch.get_rng_state()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor.detach())

    try:
        with silence_torch_logging(), mode, torch.set_grad_enabled(with_graph), on_fake_tensors(model):
            state = {
                name: fake(p).requires_grad_(with_graph and p.is_floating_point())
                for name, p in model.named_parameters()
            }
            state |= {name: fake(buffer) for name, buffer in model.named_buffers()}
            args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
            return call_with_state(model, state, args, kwargs)
    finally:
        torch.set_rng_state(random_state)


def call_with_state(
    model: nn.Module, state: Mapping[str, Tensor], args: tuple[object, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """Return what a model returns with other parameters and buffers, by their first names. The model keeps its own.

    A module may have several names, as blocks that share all weights have. torch would replace its tensors once for each name, and at the
    end restore what the first replacement left.
    """
    own = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    places = {
        f"{path}.{key}".lstrip("."): state[own[id(tensor)]]
        for path, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if own.get(id(tensor)) in state
    }
    return torch.func.functional_call(model, places, args, kwargs, tie_weights=False)


def on_fake_tensors(model: nn.Module) -> AbstractContextManager[None]:
    """Make a transformers model run on fake tensors: without its key-value cache, and with experts as plain products."""
    # Grouped products are fake in bfloat16 alone.
    wanted = {"use_cache": False, "_experts_implementation": "batched_mm"}
    held = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in held if config is not None}
    pairs = product(configs.values(), wanted.items())
    return attributes_set((config, *change) for config, change in pairs if getattr(config, change[0], None))


@contextmanager
def attributes_set(changes: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    """Set attributes, given as (owner, name, value), inside a context."""
    before = []
    try:
        for owner, name, value in changes:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def copy_model(model: nn.Module, known: Mapping[int, object] | None = None) -> nn.Module:
    """Return a deep copy of a model, with `known` objects by id in place of copies.

    torch does not copy tensors with a graph. A forward pass leaves some, such as the weight of an older weight norm; they lose their graph.
    """
    left = [tensor for module in model.modules() for tensor in tensors_in(vars(module)) if not tensor.is_leaf]
    return copy.deepcopy(model, {**{id(tensor): tensor.detach().clone() for tensor in left}, **(known or {})})


def eval_mode(module: nn.Module) -> AbstractContextManager[None]:
    """Set evaluation mode inside a context."""
    return attributes_set((child, "training", False) for child in module.modules())


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and dicts; caches and other objects are ignored."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [x for item in items for x in tensors_in(item)]


def floats_in(value: object) -> list[Tensor]:
    """Return the floating-point tensors of nested lists, tuples and dicts."""
    return [x for x in tensors_in(value) if x.is_floating_point()]


@contextmanager
def restore_buffers_after(model: nn.Module) -> Iterator[None]:
    """Restore buffers afterwards, in place, because compiled code knows their addresses. The host waits for the device at the end."""
    kept = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in kept:
                # Batch normalisation writes its statistics without a new version.
                if buffer._version != version or not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def use_copied_buffers(model: nn.Module) -> Iterator[None]:
    """Use copies of a model's buffers inside a context. The originals are not written, so a backward pass that needs them can follow."""
    held = [(child, name, buffer) for child in model.modules() for name, buffer in child._buffers.items()]
    for child, name, buffer in held:
        child._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for child, name, buffer in held:
            child._buffers[name] = buffer
