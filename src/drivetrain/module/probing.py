"""Run a module as a test: without changing its buffers, or on fake tensors, which need neither memory nor arithmetic.

The input of a block is inferred from its layers: images with the channels of its first convolution, or sequences as wide as its
first norm or matrix. A block that needs more than that cannot be tried, and the result is None.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

_SIDE, _ROWS, _LENGTH = 16, 2, 8


def keeps_shape(block: nn.Module) -> bool | None:
    """Return whether a block returns a tensor of its input's shape; None if it cannot be tried."""
    shape = _likely_input(block)
    if shape is None:
        return None
    try:
        out = _run_on_fake_tensor(block, shape)
    except Exception:  # other arguments are needed, another shape is expected, or the code cannot be followed
        return None if not _resizes(block) else False
    return isinstance(out, Tensor) and tuple(out.shape) == shape


def _likely_input(block: nn.Module) -> tuple[int, ...] | None:
    for module in block.modules():
        if isinstance(module, _ConvNd):
            dims = len(module.kernel_size)
            return (_ROWS, module.in_channels, *([_SIDE] * dims))
        if isinstance(module, nn.LayerNorm):
            return (_ROWS, _LENGTH, *module.normalized_shape)
        if isinstance(module, nn.Linear):
            return (_ROWS, _LENGTH, module.in_features)
        if isinstance(module, nn.MultiheadAttention):
            return (_ROWS, _LENGTH, module.embed_dim)
    return None


def _resizes(block: nn.Module) -> bool:
    """Return whether some convolution of a block changes the size of its image."""
    return any(
        isinstance(module, _ConvTransposeNd) or (isinstance(module, _ConvNd) and max(module.stride) > 1)
        for module in block.modules()
    )


def _run_on_fake_tensor(block: nn.Module, shape: tuple[int, ...]) -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    generator = torch.get_rng_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            state = {
                name: mode.from_tensor(tensor.detach()) for name, tensor in block.state_dict(keep_vars=True).items()
            }
            reference = next((tensor for tensor in state.values() if tensor.is_floating_point()), None)
            x = (
                torch.empty(shape)
                if reference is None
                else torch.empty(shape, dtype=reference.dtype, device=reference.device)
            )
            return torch.func.functional_call(block, dict[str, Tensor](state), (x,), tie_weights=True)
    finally:
        torch.set_rng_state(generator)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore running statistics and other buffers afterwards, in place, so that compiled or recorded code finds them at the same
    address.

    The host waits for the device at the end.
    """
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
def buffers_copied(model: nn.Module) -> Iterator[None]:
    """Use copies of a model's buffers inside a context. The originals are not written, so a backward pass that needs them can
    follow.
    """
    held = [(child, name, buffer) for child in model.modules() for name, buffer in child._buffers.items()]
    for child, name, buffer in held:
        child._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for child, name, buffer in held:
            child._buffers[name] = buffer
