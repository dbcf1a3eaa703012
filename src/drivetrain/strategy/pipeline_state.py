"""The state of a pipelined session as that of the whole model, and back: so that a run goes on under another strategy.

Each rank saves its own stages, which is enough to resume on the same mesh. For any other mesh the stages are joined on rank 0, under the
user's own names, and each rank takes its share of such a state when it loads one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from drivetrain.context.codec import pack, unpack
from drivetrain.context.optimizers import save_optimizer
from drivetrain.context.table import parameter_names
from drivetrain.core.errors import StateError
from drivetrain.module.clean_state import clean_state_dict
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.pipeline_schedule import PipelinedModel
from drivetrain.runtime.ranks import is_master

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext


def joined_state(ctx: "PlanContext", state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's state with model and optimizer of all stages, on rank 0; the others take part and get nothing."""
    pipeline = ctx.model
    assert isinstance(pipeline, PipelinedModel)
    own: dict[str, Any] = {"model": dict(clean_state_dict(pipeline))}
    if ctx.optimizer is not None:
        own["optimizer"] = save_optimizer(ctx.optimizer, parameter_names(ctx))
        if not all("param_names" in group for group in own["optimizer"]["param_groups"]):
            raise StateError(
                f"the state of {type(ctx.optimizer.inner).__name__} does not know its parameters by name, so the stages of the pipeline "
                "cannot be joined. Save each rank's state_dict() and resume on the same mesh."
            )
    own = tree_map_only(Tensor, _full, own)
    if 0 not in dist.get_process_group_ranks(pipeline.group):
        return {}
    stages: list[Any] | None = [None] * dist.get_world_size(pipeline.group) if is_master() else None
    dist.gather_object(own, stages, dst=0, group=pipeline.group)
    if stages is None:
        return {}
    state = {**state, "model": pack({name: value for stage in stages for name, value in stage["model"].items()})}
    if ctx.optimizer is not None:
        state["optimizer"] = pack(_joined_optimizer([stage["optimizer"] for stage in stages]))
    return tree_map_only(Tensor, _full, state)


STAGES = "pipeline_stages"
"""Where the state of one rank says which stages it holds."""


def with_stages(pipeline: PipelinedModel, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of this rank's stages with a note of which they are."""
    return {**state, STAGES: _stages(pipeline)}


def _stages(pipeline: PipelinedModel) -> dict[str, Any]:
    return {"own": list(pipeline.own), "starts": list(pipeline.split.starts)}


def check_stages(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without the note of its stages; stages that are not this rank's are refused."""
    saved = state.get(STAGES)
    if saved is not None and not (isinstance(model, PipelinedModel) and dict(saved) == _stages(model)):
        now = (
            "the model is whole now"
            if not isinstance(model, PipelinedModel)
            else f"this rank has {_said(_stages(model))} now"
        )
        raise StateError(
            f"this state holds one rank's part of a pipeline, {_said(saved)}, and {now}. It resumes on the mesh and with the split it was "
            "saved under. For another plan, save context.state_dict(full=True), called on all ranks, which joins the stages."
        )
    return {name: value for name, value in state.items() if name != STAGES}


def _said(stages: Mapping[str, Any]) -> str:
    own = ", ".join(map(str, stages["own"]))
    return f"stage {own} of {len(stages['starts']) + 1} (cut before {', '.join(stages['starts'])})"


def own_share(ctx: "PlanContext", state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without what belongs to stages of other ranks; one that has only this rank's stages stays as it is."""
    pipeline = ctx.model
    assert isinstance(pipeline, PipelinedModel)
    others = pipeline.all_names - set(clean_state_dict(pipeline))
    result = dict(state)
    if isinstance(state.get("model"), Mapping):
        model = unpack(state["model"])
        result["model"] = pack({name: value for name, value in model.items() if name not in others})
    if isinstance(state.get("optimizer"), Mapping):
        result["optimizer"] = pack(_share_of_optimizer(unpack(state["optimizer"]), others))
    return result


def _full(tensor: Tensor) -> Tensor:
    full = tensor.detach()
    return (full.full_tensor() if is_dtensor(full) else full).cpu()  # type: ignore[attr-defined]


def _joined_optimizer(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one optimizer state of several, with parameters numbered anew in the order of groups, then stages."""
    counts = {len(stage["param_groups"]) for stage in stages}
    if len(counts) > 1:
        raise StateError(
            f"the optimizers of the pipeline's stages have {sorted(counts)} parameter groups. Return the same groups on every rank, empty "
            "ones where a stage has none of the parameters."
        )
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for members in zip(*(stage["param_groups"] for stage in stages)):
        group = {**members[0], "params": [], "param_names": []}
        for stage, member in zip(stages, members):
            for key, name in zip(member["params"], member["param_names"]):
                group["params"].append(number)
                group["param_names"].append(name)
                if key in stage["state"]:
                    joined["state"][number] = stage["state"][key]
                number += 1
        joined["param_groups"].append(group)
    return joined


def _share_of_optimizer(saved: dict[str, Any], others: frozenset[str]) -> dict[str, Any]:
    groups, dropped = [], set()
    for group in saved.get("param_groups", ()):
        names = group.get("param_names")
        if names is None or len(names) != len(group["params"]):
            return saved
        kept = []
        for key, name in zip(group["params"], names):
            if name in others or name.removeprefix("model.") in others:
                dropped.add(key)
            else:
                kept.append((key, name))
        groups.append({**group, "params": [key for key, _ in kept], "param_names": [name for _, name in kept]})
    state = {key: value for key, value in saved["state"].items() if key not in dropped}
    return {**saved, "state": state, "param_groups": groups}
