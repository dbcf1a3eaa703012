"""The mesh of a plan: which ranks share samples, which share parameters, and the process groups between them.

The axis list is in rank order: the first axis varies fastest, so `[("tensor", 4), ("data", 2)]` puts ranks 0 to 3 into one tensor
group. Only `data` is resized to the number of processes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.core.errors import PlanInfeasible, StrategyError
from drivetrain.runtime.collectives import create_once_per_group
from drivetrain.runtime.ranks import clear_data_ranks, get_num_processes, get_rank, set_data_ranks

AXES = ("pipe", "data", "zero", "sequence", "tensor")
"""Outermost first, as a plan that chooses for itself lays them out."""
AXIS_ALIASES = {"pipeline": "pipe", "dp": "data", "fsdp": "zero", "cp": "sequence", "tp": "tensor"}
DATA_AXES = ("data", "zero")
"""Ranks along these read different samples; all others share them."""
GRADIENT_AXES = (*DATA_AXES, "sequence")
"""The mean of gradients over the ranks along these is the gradient of the global batch."""

Axes = tuple[tuple[str, int], ...]


def fit_axes(axes: Axes, world: int) -> Axes:
    """Return the axes with `data` resized so that their product is the number of processes.

    >>> fit_axes((("tensor", 2), ("pipe", 2), ("data", 2)), 16)
    (('tensor', 2), ('pipe', 2), ('data', 4))
    """
    if not axes:
        return (("data", world),)
    sizes = dict(axes)
    others = math.prod(size for axis, size in axes if axis != "data")
    shown = ", ".join(f"{axis} {size}" for axis, size in axes)
    if "data" not in sizes:
        if others != world:
            raise StrategyError(
                f"parallel_mode: the axes {shown} need {others} processes, but there are {world}. Add a 'data' axis, which adapts "
                f"its size, or start {others} processes."
            )
        return axes
    if world % others:
        raise StrategyError(
            f"parallel_mode: the axes {shown} do not fit {world} processes: the axes other than 'data' need a multiple of {others}."
        )
    return tuple((axis, world // others if axis == "data" else size) for axis, size in axes)


def resize_axes(axes: Mapping[str, int], world: int) -> dict[str, int]:
    """Return the axes for another number of processes: tensor, pipe and sequence stay, `zero` keeps its size if possible, `data`
    takes the rest.
    """
    fixed = math.prod(size for axis, size in axes.items() if axis not in DATA_AXES)
    if world % fixed:
        kept = ", ".join(f"{axis} {size}" for axis, size in axes.items() if axis not in DATA_AXES)
        raise PlanInfeasible(f"a world of {world} cannot hold the axes {kept}: it must be a multiple of {fixed}.")
    rest = world // fixed
    result = dict(axes)
    if "zero" in axes:
        result["zero"] = math.gcd(axes["zero"], rest) if "data" in axes else rest
        rest //= result["zero"]
    if rest > 1 or "data" in axes:
        result["data"] = rest
    return result


def mesh_size(mesh: Iterable[tuple[str, int]]) -> int:
    """Return how many processes a mesh has, given as pairs of axis and size."""
    return math.prod(size for _, size in mesh)


def build_mesh(axes: Axes, rank_order: Sequence[int] | None, device_type: str) -> DeviceMesh | None:
    """Return the DeviceMesh of the axes and set which samples this rank reads; None on one process.

    Every rank must call this with the same arguments.
    """
    if get_num_processes() == 1:
        clear_data_ranks()
        return None
    order = None if rank_order is None else tuple(rank_order)
    names, shape = zip(*axes[::-1])

    def make() -> DeviceMesh:
        if order is None:
            return init_device_mesh(device_type, shape, mesh_dim_names=names)
        return DeviceMesh(device_type, torch.tensor(order, device="cpu").view(shape), mesh_dim_names=names)

    mesh = create_once_per_group((axes, order, device_type), make)
    _set_data_ranks(mesh, dict(axes))
    return mesh


def _set_data_ranks(mesh: DeviceMesh, axes: Mapping[str, int]) -> None:
    """Set which share of each global batch this rank reads."""
    present = [axis for axis in DATA_AXES if axes.get(axis, 1) > 1]
    size = math.prod(axes[axis] for axis in present)
    if size == get_num_processes():
        clear_data_ranks()
    elif not present:
        set_data_ranks(0, 1, _group_of_all(mesh, []))
    elif len(present) == 1:
        set_data_ranks(mesh.get_local_rank(present[0]), size, mesh.get_group(present[0]))
    else:
        rank = mesh.get_local_rank("data") * axes["zero"] + mesh.get_local_rank("zero")
        set_data_ranks(rank, size, _group_of_all(mesh, present))


def gradient_group(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return this rank's group along all axes over which gradients are averaged; every rank must call this."""
    present = [name for name in (mesh.mesh_dim_names or ()) if name in GRADIENT_AXES and mesh[name].size() > 1]
    if math.prod(mesh[name].size() for name in present) == get_num_processes():
        return dist.group.WORLD
    return mesh.get_group(present[0]) if len(present) == 1 else _group_of_all(mesh, present)


def _group_of_all(mesh: DeviceMesh, axes: Sequence[str]) -> ProcessGroup | None:
    """Return this rank's group along several axes at once; every rank makes all of them, in one order."""
    names = list(mesh.mesh_dim_names or ())
    kept = [names.index(axis) for axis in axes]
    others = [index for index in range(len(names)) if index not in kept]
    rows = mesh.mesh.permute(*others, *kept).reshape(-1, math.prod(mesh.mesh.shape[index] for index in kept)).tolist()

    def make() -> ProcessGroup | None:
        groups = [dist.new_group(ranks) for ranks in rows]
        return next((group for group, ranks in zip(groups, rows) if get_rank() in ranks), None)

    return create_once_per_group(tuple(map(tuple, rows)), make)
