"""Averages a unit's gradients over ranks when DDP's own reducer cannot.

One flat tensor per type and about 25 MB, in the fixed order of the parameters, all on their way at once. A gradient that is
missing here counts as zero; if it is missing everywhere it stays missing, so that optimizers treat it as on one process.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 1024 * 1024
Group = Any


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """Replace each gradient by its mean over the ranks of the group."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    world = dist.get_world_size(group)
    flags = torch.tensor([p.grad is not None for p in trained], dtype=torch.float32, device=trained[0].device)
    on_the_way = [(bucket, *_send(bucket, world, group)) for bucket in _buckets(trained)]
    some_missing = any(p.grad is None for p in trained)
    work = dist.all_reduce(flags, group=group, async_op=True)
    for bucket, flat, sending in on_the_way:
        sending.wait()
        parts = flat.split([p.numel() for p in bucket])
        for p, part in zip(bucket, parts):
            if p.grad is None:
                p.grad = part.view_as(p).clone()
            else:
                p.grad.copy_(part.view_as(p))
    work.wait()
    if some_missing:  # rare, so this read of a few flags is not worth avoiding
        for p, ranks_with_gradient in zip(trained, flags.tolist()):
            if ranks_with_gradient == 0:
                p.grad = None


@torch.no_grad()
def sum_over_ranks(value: float | Tensor, device: torch.device, group: Group) -> Tensor:
    """Return the sum of a number over the ranks of the group, left on the device."""
    total = torch.as_tensor(
        value, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device
    ).clone()
    dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def copy_buffers_from_first_rank(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Give all ranks the first rank's buffers, as DDP does in the forward passes it synchronises."""
    if not ddp.broadcast_buffers:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in ddp.module.buffers():
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, group=ddp.process_group, group_src=0)
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
            buffer.copy_(part.view_as(buffer))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for p in parameters:
        full = size + p.numel() * p.element_size() > BUCKET_BYTES
        if bucket and (full or (p.dtype, p.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += p.numel() * p.element_size()
    if bucket:
        yield bucket


def _send(bucket: list[nn.Parameter], world: int, group: Group) -> tuple[Tensor, Any]:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(world)
    return flat, dist.all_reduce(flat, group=group, async_op=True)
