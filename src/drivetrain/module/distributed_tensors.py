"""What the other files need to know about DTensors, without importing DTensor first."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def is_dtensor(value: object) -> bool:
    """Return whether a value is a sharded or replicated tensor. DTensor is not imported for this."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which is all of an ordinary tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def like_sharded(value: Tensor, sharded: Tensor) -> Tensor:
    """Return this rank's shards of a full tensor, with the layout of `sharded`, without communication."""
    from torch.distributed.tensor import distribute_tensor

    full = value.detach().to(device=local_part(sharded).device)
    return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)  # type: ignore[attr-defined]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all of a tensor. All ranks of a sharded one must call this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def fit_tensor(value: Tensor, live: Tensor) -> Tensor:
    """Return `value` full or sharded like `live`. Gathering a sharded value needs all its ranks."""
    if is_dtensor(live):
        if not is_dtensor(value):
            return like_sharded(value, live)
        if (value.device_mesh, value.placements) != (live.device_mesh, live.placements):  # type: ignore[attr-defined]
            return value.redistribute(live.device_mesh, live.placements)  # type: ignore[attr-defined]
        return value
    return whole_tensor(value)


@torch.no_grad()
def synchronise(tensors: list[Tensor], mesh: DeviceMesh) -> None:
    """Copy the values of the first rank of the mesh to all its ranks."""
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        for tensor in tensors:
            if tensor.is_meta:
                continue
            buffer = tensor.detach().to(mesh.device_type).contiguous()
            dist.broadcast(buffer, group=group, group_src=0)
            if buffer.data_ptr() != tensor.data_ptr():
                tensor.copy_(buffer)
