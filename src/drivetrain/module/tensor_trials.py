"""What a block is tried on: random weights, inputs as the model gives them, and a comparison of the results.

This tests without a process group whether a block that is split over ranks would still compute the same.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import BaseTorchFunctionMode

from drivetrain.module.blocks import BlockGroup
from drivetrain.module.probing import LENGTH, ROWS, call_with_state, eval_mode, floats_in
from drivetrain.module.tensor_parallel import features, is_splittable

_TOLERANCE = 1e-4


class BlockTrial:
    """One block with made-up weights, and with the arguments that its model gives it or made-up ones."""

    def __init__(self, block: nn.Module, given: Any, length: int = LENGTH):
        self.block, self.state = block, random_state_dict(block)
        self.args: tuple[Any, ...]
        self.kwargs: dict[str, Any]
        self.args, self.kwargs = given or _random_inputs(block, length)

    def call(self, state: Mapping[str, Tensor], args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Tensor]:
        """Return the floating-point tensors that the block returns."""
        with BaseTorchFunctionMode():  # torch's encoder layers take no fused path while a mode is active
            return floats_in(call_with_state(self.block, state, args, dict(kwargs)))

    def parameters(self) -> dict[int, str]:
        """Return the names of the made-up parameters by identity."""
        owners = {name: self.block.get_submodule(name.rpartition(".")[0]) for name in self.state}
        return {id(t): name for name, t in self.state.items() if name.rpartition(".")[2] in owners[name]._parameters}


@contextmanager
def isolated_trial(block: nn.Module) -> Iterator[None]:
    """Run trials of a block inside a context, in evaluation mode and with a fixed seed. No change of state remains."""
    # A simulation may have entered a fake-tensor mode, but a trial needs values.
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]), eval_mode(block):
        torch.manual_seed(0)
        yield


class _CallCaptured(Exception):
    """Ends a run of the whole model when every family has been reached."""


def inputs_of_blocks(model: nn.Module, families: list[BlockGroup], length: int = LENGTH) -> dict[nn.Module, Any]:
    """Return what the first block of each family is called with when the model reads a few tokens; empty if it is not known."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None or not all(map(_is_real, [*model.parameters(), *model.buffers()])):
        return {}
    seen: dict[nn.Module, object] = {}

    def note(block: nn.Module, args: object, kwargs: object) -> None:
        seen.setdefault(block, (_plain(args), _plain(kwargs)))
        if len(seen) == len(families):
            raise _CallCaptured

    with ExitStack() as hooks:
        for family in families:
            hooks.enter_context(family.members[0].register_forward_pre_hook(note, with_kwargs=True))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), eval_mode(model):
                most = min(embedding.num_embeddings, 100)
                tokens = torch.randint(0, most, (ROWS, length)).to(embedding.weight.device)
                names = inspect.signature(model.forward).parameters
                model(tokens, **({"decoder_input_ids": tokens} if "decoder_input_ids" in names else {}))
        except _CallCaptured:
            pass
        except Exception:  # the model wants something other than tokens; each block is then tried on its own
            return {}
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


def _random_inputs(block: nn.Module, length: int) -> tuple[tuple[Tensor, ...], dict[str, object]]:
    """Return a random sequence as wide as the block's first norm or matrix."""
    for module in block.modules():
        shape = getattr(module, "normalized_shape", None)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and shape:
            return (torch.randn(ROWS, length, *shape),), {}
        if isinstance(module, nn.MultiheadAttention):
            return (torch.randn(ROWS, length, module.embed_dim),), {}
        if is_splittable(module):
            return (torch.randn(ROWS, length, features(module, "rowwise")),), {}
    return (), {}


def random_state_dict(block: nn.Module) -> dict[str, Tensor]:
    """Return random parameters, because initial ones may be zero and hide a difference. Buffers with values are kept."""
    state: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        shape = tuple(parameter.shape)
        state[name] = torch.randn(shape) / max(1, shape[-1]) ** 0.5 if len(shape) > 1 else torch.rand(shape) + 0.5
    for name, buffer in block.named_buffers():
        shape = tuple(buffer.shape)
        if _is_real(buffer):
            state[name] = _plain(buffer)
        elif buffer.is_floating_point():
            state[name] = torch.randn(shape)
        else:
            state[name] = torch.full(shape, buffer.dtype is torch.bool, dtype=buffer.dtype)
    return state


def _is_real(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def structure_of(block: nn.Module) -> tuple[Any, ...]:
    """Return what two blocks must share to be split in the same way."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return shapes, tuple((name, type(module).__name__) for name, module in block.named_modules())


def agree(expected: list[Tensor], found: list[Tensor]) -> bool:
    """Return whether tensors are equal up to rounding."""
    if [x.shape for x in expected] != [x.shape for x in found]:
        return False
    return all(bool((a - b).abs().max() <= _TOLERANCE * a.abs().max()) for a, b in zip(expected, found))
