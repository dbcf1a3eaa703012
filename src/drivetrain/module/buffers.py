"""Run a model for a trial without changing its buffers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore running statistics and the like afterwards, in place: what was compiled or recorded finds them at the same address.

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
    """Give a model copies of its buffers for a while. The originals are not written to, so a backward pass that needs them can follow."""
    held = [(child, name, buffer) for child in model.modules() for name, buffer in child._buffers.items()]
    for child, name, buffer in held:
        child._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for child, name, buffer in held:
            child._buffers[name] = buffer
