"""What a block is tried on: random weights, inputs as the model gives them, and a comparison of the results.

This tests without a process group whether a block that is split over ranks would still compute the same.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.module.blocks import BlockGroup
from drivetrain.module.tensor_parallel import features, is_splittable

_ROWS, LENGTH = 2, 8
_TOLERANCE = 1e-4


class _SeenCall(Exception):
    """Ends a run of the whole model when every family has been reached."""


def inputs_of_blocks(model: nn.Module, families: list[BlockGroup], length: int = LENGTH) -> dict[nn.Module, Any]:
    """Return what the first block of each family is called with when the model reads a few tokens; empty if it is not known."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None or any(not _is_real(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        return {}
    seen: dict[nn.Module, object] = {}

    def note(block: nn.Module, args: Any, kwargs: Any) -> None:
        kept = {key: _plain(value) for key, value in kwargs.items()}
        seen.setdefault(block, (tuple(map(_plain, args)), kept))
        if len(seen) == len(families):
            raise _SeenCall

    hooks = [family.members[0].register_forward_pre_hook(note, with_kwargs=True) for family in families]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), in_evaluation(model):
            tokens = torch.randint(0, min(embedding.num_embeddings, 100), (_ROWS, length)).to(embedding.weight.device)
            names = inspect.signature(model.forward).parameters
            model(tokens, **({"decoder_input_ids": tokens} if "decoder_input_ids" in names else {}))
    except _SeenCall:
        pass
    except Exception:  # the model wants something other than tokens; each block is then tried on its own
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _plain(value: object) -> Any:
    """Return an argument as a trial can use it: tensors on the CPU in float32, no caches."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().clone()
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, str | int | float | bool | None) else None


def made_up_inputs(block: nn.Module, length: int = LENGTH) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a random sequence as wide as the block's first norm or matrix."""
    for module in block.modules():
        shape = getattr(module, "normalized_shape", None)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and shape:
            return (torch.randn(_ROWS, length, *shape),), {}
        if isinstance(module, nn.MultiheadAttention):
            return (torch.randn(_ROWS, length, module.embed_dim),), {}
        if is_splittable(module):
            return (torch.randn(_ROWS, length, features(module, "rowwise")),), {}
    return (), {}


def made_up_state(block: nn.Module) -> dict[str, Tensor]:
    """Return random parameters, because initial ones may be zero and hide a difference. Buffers with values are kept."""
    state: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        shape = tuple(parameter.shape)
        state[name] = torch.randn(shape) / max(1, shape[-1]) ** 0.5 if len(shape) > 1 else torch.rand(shape) + 0.5
    for name, buffer in block.named_buffers():
        if _is_real(buffer):
            state[name] = _plain(buffer)
        elif buffer.dtype is torch.bool:
            state[name] = torch.ones(tuple(buffer.shape), dtype=torch.bool)
        else:
            values = torch.randn(tuple(buffer.shape))
            state[name] = values if buffer.is_floating_point() else torch.zeros_like(values, dtype=buffer.dtype)
    return state


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode inside a context."""
    modes = [(child, child.training) for child in module.modules()]
    for child, _ in modes:
        child.training = False
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


def outside_fake_mode() -> Any:
    """Leave a fake-tensor mode that a simulation may have entered: the test needs values."""
    from torch._subclasses import fake_tensor

    leave = getattr(fake_tensor, "unset_fake_temporarily", None)
    return nullcontext() if leave is None else leave()


def _is_real(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def is_parameter(block: nn.Module, name: str) -> bool:
    """Return whether a name in a block's state belongs to a parameter."""
    owner, _, key = name.rpartition(".")
    return key in block.get_submodule(owner)._parameters


def structure_of(block: nn.Module) -> tuple[Any, ...]:
    """Return what two blocks must share to be split in the same way."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return shapes, tuple((name, type(module).__name__) for name, module in block.named_modules())


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for item in value.values() for x in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [x for item in value for x in tensors_in(item)]
    return []


def agree(expected: list[Tensor], found: list[Tensor]) -> bool:
    """Return whether tensors are equal up to rounding."""
    if [x.shape for x in expected] != [x.shape for x in found]:
        return False
    return all(
        bool((first - second).abs().max() <= _TOLERANCE * first.abs().max()) for first, second in zip(expected, found)
    )
