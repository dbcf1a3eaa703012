"""Save and restore the state of a run that a plan has spread over ranks, on request as the state of the whole model.

Each rank of a pipeline saves its own stages, which is enough to resume on the same mesh. For any other mesh the stages are joined
on rank 0 under the user's own names, and each rank takes its part when it loads such a state.

With a tensor axis, `fully_shard` splits a parameter that the tensor plan does not split over the data ranks alone: every tensor rank has
all of its shards, which a checkpoint would see as different tensors with one name. So they are saved as shards with copies on one mesh
of all ranks, and converted back when a state is loaded. Nothing is communicated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from drivetrain.context.context import Context
from drivetrain.context.loading import Saving, parameter_names
from drivetrain.context.optimizers import save_optimizer
from drivetrain.core.errors import StateError
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import is_dtensor, whole_tensor
from drivetrain.module.pipeline_schedule import PipelinedModel
from drivetrain.module.wrapping import clean_state_dict, named_clean_parameters
from drivetrain.runtime.codec import pack, unpack
from drivetrain.runtime.collectives import create_once_per_group
from drivetrain.runtime.ranks import is_master
from drivetrain.strategy.method import Site

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

STAGES = "pipeline_stages"
"""Where the state of one rank says which stages it holds."""
COPIES = "copies"
"""The name of the tensor axis in the mesh on which such tensors are shown; it tells them from those that a plan splits."""


@dataclass(frozen=True)
class PlanLayout:
    """What a plan adds to the Context that it was applied to: how its state is saved and loaded."""

    mesh: DeviceMesh | None = None
    copies: DeviceMesh | None = None
    """The mesh on which parameters that are sharded once for each tensor rank are saved."""

    def save(self, context: Context, full: bool) -> StateDict:
        """Return the state of every item. `full` also joins the stages of a pipeline, on rank 0."""
        model = getattr(context, "model", None)
        if isinstance(model, PipelinedModel):
            state = Saving(context, full=False).pack(context, "")
            return joined_state(context, state) if full else {**state, STAGES: _stages(model)}
        state = Saving(context, full).pack(context, "")
        return state if full or self.copies is None else with_copies(state, self.copies)

    def own_part(self, context: Context, state: StateDict) -> StateDict:
        """Return this rank's part of a saved state. From the state of a whole model a pipeline takes its own stages."""
        model = getattr(context, "model", None)
        state = check_stages(model, state)
        if isinstance(model, PipelinedModel):
            state = own_share(context, state)
        if self.copies is not None:
            assert self.mesh is not None
            state = without_copies(state, self.mesh)
        return state


def joined_state(context: Context, state: StateDict) -> StateDict:
    """Return on rank 0 the state with model and optimizer of all stages. The other ranks take part and return nothing for them."""
    pipeline = context.model
    assert isinstance(pipeline, PipelinedModel)
    own: StateDict = {"model": dict(clean_state_dict(pipeline))}
    optimizer = getattr(context, "optimizer", None)
    if optimizer is not None:
        own["optimizer"] = save_optimizer(optimizer, parameter_names(context))
        if not all("param_names" in group for group in own["optimizer"]["param_groups"]):
            raise StateError(
                f"the state of {type(optimizer.inner).__name__} has no parameter names, so the stages of the pipeline cannot be "
                "joined. Save each rank's state_dict() and resume on the same mesh."
            )
    own = tree_map_only(Tensor, _full, own)
    if 0 not in dist.get_process_group_ranks(pipeline.group):
        return {}
    stages: list[Any] | None = [None] * dist.get_world_size(pipeline.group) if is_master() else None
    # Pickled: tensors of any number, and whatever a user's optimizer keeps in its groups.
    dist.gather_object(own, stages, dst=0, group=pipeline.group)
    if stages is None:
        return {}
    model = {name: value for stage in stages for name, value in stage["model"].items()}
    by_first = {pipeline.plain_names.get(name, name): value for name, value in model.items()}
    model |= {
        name: by_first[first]
        for name in sorted(pipeline.all_names - set(model))  # other names of what a stage holds by one
        if (first := pipeline.plain_names.get(name, name)) in by_first
    }
    state = {**state, "model": pack(model)}
    if optimizer is not None:
        state["optimizer"] = pack(_joined_optimizer([stage["optimizer"] for stage in stages]))
    return tree_map_only(Tensor, _full, state)


def _stages(pipeline: PipelinedModel) -> StateDict:
    return {"own": list(pipeline.own), "starts": list(pipeline.split.starts)}


def check_stages(model: object, state: Mapping[str, Any]) -> StateDict:
    """Return a state without the record of its stages. Stages that do not belong to this rank are an error."""
    saved = state.get(STAGES)
    if saved is not None and not (isinstance(model, PipelinedModel) and dict(saved) == _stages(model)):
        now = "the model is whole now"
        if isinstance(model, PipelinedModel):
            now = f"this rank has {_shown(_stages(model))} now"
        raise StateError(
            f"this state holds one rank's part of a pipeline, {_shown(saved)}, but {now}. Resume it on the same mesh with the same "
            "split. For another plan, save context.state_dict(full=True), called on all ranks, which joins the stages."
        )
    return {name: value for name, value in state.items() if name != STAGES}


def _shown(stages: Mapping[str, Any]) -> str:
    own = ", ".join(map(str, stages["own"]))
    return f"stage {own} of {len(stages['starts']) + 1} (cut before {', '.join(stages['starts'])})"


def own_share(context: Context, state: Mapping[str, object]) -> StateDict:
    """Return a state without the entries of other ranks' stages. A state of this rank's stages alone is returned unchanged."""
    pipeline = context.model
    assert isinstance(pipeline, PipelinedModel)
    others = pipeline.all_names - set(clean_state_dict(pipeline))
    result = dict(state)
    if isinstance(state.get("model"), Mapping):
        model = unpack(state["model"])
        result["model"] = pack({name: value for name, value in model.items() if name not in others})
    if isinstance(state.get("optimizer"), Mapping):
        trained = {name for name, _ in named_clean_parameters(pipeline)}
        result["optimizer"] = pack(_share_of_optimizer(unpack(state["optimizer"]), pipeline.all_names - trained))
    return result


def _full(tensor: Tensor) -> Tensor:
    return whole_tensor(tensor.detach()).cpu()


def _joined_optimizer(stages: list[StateDict]) -> StateDict:
    """Return one optimizer state of several, with parameters numbered again in the order of groups, then stages."""
    counts = {len(stage["param_groups"]) for stage in stages}
    if len(counts) > 1:
        raise StateError(
            f"the optimizers of the pipeline's stages have {sorted(counts)} parameter groups. Return the same groups on every rank, empty "
            "ones where a stage has none of the parameters."
        )
    joined: StateDict = {"state": {}, "param_groups": []}
    number, seen = 0, set()
    for members in zip(*(stage["param_groups"] for stage in stages)):
        group = {**members[0], "params": [], "param_names": []}
        for stage, member in zip(stages, members):
            for key, name in zip(member["params"], member["param_names"]):
                if name in seen:  # a tied parameter, which several stages train alike
                    continue
                seen.add(name)
                group["params"].append(number)
                group["param_names"].append(name)
                if key in stage["state"]:
                    joined["state"][number] = stage["state"][key]
                number += 1
        joined["param_groups"].append(group)
    return joined


def _share_of_optimizer(saved: StateDict, others: frozenset[str]) -> StateDict:
    groups, dropped = [], set()
    for group in saved.get("param_groups", ()):
        names = group.get("param_names")
        if names is None or len(names) != len(group["params"]):
            return saved
        kept = {
            key: name
            for key, name in zip(group["params"], names)
            if name not in others and name.removeprefix("model.") not in others
        }
        dropped |= set(group["params"]) - kept.keys()
        groups.append({**group, "params": list(kept), "param_names": list(kept.values())})
    state = {key: value for key, value in saved["state"].items() if key not in dropped}
    return {**saved, "state": state, "param_groups": groups}


def mesh_of_copies(site: Site, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of all ranks with its tensor axis renamed, or None if nothing needs it. Every rank must call this."""
    if mesh is None or site.axis("tensor") in (1, site.world) or site.axis("pipe") > 1:
        return None
    names = tuple(COPIES if name == "tensor" else name for name in mesh.mesh_dim_names or ())
    kind, ranks = site.device.type, mesh.mesh
    return create_once_per_group(
        (kind, names, str(ranks.tolist())), lambda: DeviceMesh(kind, ranks, mesh_dim_names=names)
    )


def with_copies(state: StateDict, mesh: DeviceMesh) -> StateDict:
    """Return a state in which the shards of single tensor ranks are placed on the mesh of all ranks."""

    axes = mesh.mesh_dim_names or ()
    shown: dict[int, Tensor] = {}  # a tied parameter stays one tensor

    def show(tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return tensor
        own = tensor.device_mesh.mesh_dim_names or ()  # type: ignore[attr-defined]
        if "tensor" in own or not set(own) <= set(axes):
            return tensor
        from torch.distributed.tensor import Replicate

        layouts = dict(zip(own, tensor.placements))  # type: ignore[attr-defined]
        if id(tensor) not in shown:
            shown[id(tensor)] = _placed(tensor, mesh, [layouts.get(name, Replicate()) for name in axes])
        return shown[id(tensor)]

    return tree_map_only(Tensor, show, state)


def without_copies(state: StateDict, mesh: DeviceMesh) -> StateDict:
    """Return a state in which tensors with copies are those of this tensor rank again."""

    def take(tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor) or COPIES not in (tensor.device_mesh.mesh_dim_names or ()):  # type: ignore[attr-defined]
            return tensor
        layouts = dict(zip(tensor.device_mesh.mesh_dim_names, tensor.placements))  # type: ignore[attr-defined]
        names = [name for name in mesh.mesh_dim_names or () if name != "tensor"]
        kept = [name for name in names if mesh[name].size() > 1] or names
        return _placed(tensor, mesh[tuple(kept)], [layouts[name] for name in kept])

    return tree_map_only(Tensor, take, state)


def _placed(tensor: Any, mesh: DeviceMesh, layouts: "list[Placement]") -> Tensor:
    """Return the same local tensor in another layout of the same whole."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.to_local(), mesh, layouts, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
