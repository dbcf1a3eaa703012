"""Batches on their way to the device, a few ahead of the one in use.

The copy of the next batch runs on a side stream from page-locked memory, while the device works on this one. Before a batch is
handed out the consumer's stream waits for its copy (the host does not), and its tensors are recorded on that stream, so that their
memory is not given to the next copy too early. On the CPU nothing of this exists: the loader does not come here.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from drivetrain.context.moving import move_to_device
from drivetrain.data.order import BatchInfo

Pairs = Iterator[tuple[BatchInfo, Any]]


def to_device(pairs: Pairs, device: torch.device, depth: int) -> Pairs:
    """Yield the batches on `device`, with `depth` more of them already on their way."""
    if device.type == "cpu":
        return ((info, move_to_device(device, batch)) for info, batch in pairs)
    module = torch.get_device_module(device)
    if depth == 0 or not hasattr(module, "Stream"):
        return ((info, move_to_device(device, pin(batch), non_blocking=True)) for info, batch in pairs)
    return _ahead(pairs, _SideStream(module, device), depth)


def pin(batch: Any) -> Any:
    """Return the batch in page-locked memory; tensors that are there already are not copied."""
    tensors = tensors_of(batch)
    if tensors is not None and all(tensor.device.type != "cpu" or tensor.is_pinned() for tensor in tensors):
        return batch
    return pin_memory(batch)


def _ahead(pairs: Pairs, side: "_SideStream", depth: int) -> Pairs:
    under_way: deque[tuple[BatchInfo, Any]] = deque()
    for info, batch in pairs:
        under_way.append((info, side.send(batch)))
        if len(under_way) > depth:
            ready, parcel = under_way.popleft()
            yield ready, side.receive(parcel)
    while under_way:
        ready, parcel = under_way.popleft()
        yield ready, side.receive(parcel)


class _SideStream:
    """Copies on a stream of their own, handed over to the consumer's stream without making the host wait."""

    def __init__(self, module: Any, device: torch.device):
        self.module, self.device = module, device
        self.stream = module.Stream(device)

    def send(self, batch: Any) -> tuple[Any, list[Tensor] | None, Any]:
        if tensors_of(batch) is None:
            return (
                batch,
                None,
                None,
            )  # an object that moves itself: its memory cannot be recorded, so it moves when it is used
        pinned = pin(batch)
        with self.module.stream(self.stream):
            moved = move_to_device(self.device, pinned, non_blocking=True)
            sent = self.module.Event()
            sent.record(self.stream)
        return moved, tensors_of(moved), sent

    def receive(self, parcel: tuple[Any, list[Tensor] | None, Any]) -> Any:
        batch, tensors, sent = parcel
        if tensors is None:
            return move_to_device(self.device, batch, non_blocking=True)
        consumer = self.module.current_stream(self.device)
        consumer.wait_event(sent)
        for tensor in tensors:
            tensor.record_stream(consumer)
        return batch


def tensors_of(value: Any) -> list[Tensor] | None:
    """Return every tensor of a batch, or None if part of it is an object that keeps its tensors to itself.

    >>> len(tensors_of({"x": torch.zeros(1), "pair": (torch.zeros(2), "text")}))
    2
    """
    found: list[Tensor] = []
    return found if _collect(value, found) else None


def _collect(value: Any, found: list[Tensor]) -> bool:
    if isinstance(value, Tensor):
        found.append(value)
        return True
    if isinstance(value, Mapping):
        return all(_collect(item, found) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_collect(item, found) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return all(_collect(getattr(value, field.name), found) for field in fields(value))
    return not callable(getattr(value, "to", None)) or isinstance(value, type)
