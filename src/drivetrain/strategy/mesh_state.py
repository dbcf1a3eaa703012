"""The state of a session in which some parameters are sharded once for each rank of the `tensor` axis.

Beside a tensor axis, `fully_shard` cuts a parameter that no plan splits over the data ranks alone: every tensor rank has a complete set of
shards, each on a mesh of its own. To whoever saves them these would be different tensors of one name. So they are shown as what they
are, shards with copies, on one mesh of all ranks, and taken back from there when a state is loaded. Nothing is sent.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from drivetrain.module.distributed_tensors import is_dtensor

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext

COPIES = "copies"
"""The name of the tensor axis in the mesh on which such tensors are shown; it tells them from those that a plan splits."""


def mesh_of_copies(ctx: "PlanContext") -> Any:
    """Return the mesh of all ranks with its tensor axis renamed, or None where nothing needs it; every rank must call this."""
    site = ctx.plan.site
    if site.axis("tensor") == 1 or site.axis("tensor") == site.world or site.axis("pipe") > 1:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    names = tuple(COPIES if name == "tensor" else name for name in ctx.mesh.mesh_dim_names)
    return DeviceMesh(ctx.device.type, ctx.mesh.mesh, mesh_dim_names=names)


def with_copies(state: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Return a state whose shards of single tensor ranks are shown on the mesh of all."""

    shown: dict[int, Tensor] = {}  # a tied parameter stays one tensor

    def show(tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return tensor
        own = tensor.device_mesh.mesh_dim_names or ()  # type: ignore[attr-defined]
        if "tensor" in own or not set(own) <= set(mesh.mesh_dim_names):
            return tensor
        from torch.distributed.tensor import Replicate

        layouts = dict(zip(own, tensor.placements))  # type: ignore[attr-defined]
        if id(tensor) not in shown:
            shown[id(tensor)] = _placed(tensor, mesh, [layouts.get(name, Replicate()) for name in mesh.mesh_dim_names])
        return shown[id(tensor)]

    return tree_map_only(Tensor, show, state)


def without_copies(state: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Return a state whose tensors with copies are those of this tensor rank again."""

    def take(tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor) or COPIES not in (tensor.device_mesh.mesh_dim_names or ()):  # type: ignore[attr-defined]
            return tensor
        layouts = dict(zip(tensor.device_mesh.mesh_dim_names, tensor.placements))  # type: ignore[attr-defined]
        names = [name for name in mesh.mesh_dim_names if name != "tensor"]
        kept = [name for name in names if mesh[name].size() > 1] or names
        return _placed(tensor, mesh[tuple(kept)], [layouts[name] for name in kept])

    return tree_map_only(Tensor, take, state)


def _placed(tensor: Any, mesh: Any, layouts: list[Any]) -> Any:
    """Return the same local tensor in another layout of the same whole."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.to_local(), mesh, layouts, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
