"""Run a model for a trial without leaving a trace in its buffers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put running statistics and the like back afterwards."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
