"""Split matrices over the ranks of the `tensor` axis. The plan for the layers is given, registered, the model's own, or found by
running a block.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.core.errors import ConflictError, MethodConfigError
from drivetrain.core.types import Settings
from drivetrain.module.distributed_tensors import synchronise
from drivetrain.module.tensor_parallel import STYLES, expand_tp_plan, find_tp_plan, parallelize, split_head
from drivetrain.module.vocabulary_parallel import wrap_loss_for_split_logits
from drivetrain.strategy.method import Method, Option, Site, Stage, config_errors
from drivetrain.strategy.methods.fsdp import SHARDING
from drivetrain.strategy.profile.values import divides_heads
from drivetrain.strategy.registry import find_method
from drivetrain.strategy.snapshot import initialise

if TYPE_CHECKING:
    from drivetrain.module.sequence_pieces_check import PiecePlan
    from drivetrain.strategy.method import Application, Candidate, Effects, SearchScope

_KEPT = 10 / 34
"""Share of a transformer block's activations that stays on every rank."""


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig:
    plan: Any = "auto"
    """Layers and their styles, by dotted name or pattern; "auto": from `register_tp_plan`, from the model, or found by running a block."""
    sequence_parallel: bool = False
    """Whether norms, dropouts and residual sums between split layers run on parts of the sequence, along the same axis."""
    loss_parallel: Literal["auto", True, False] = "auto"
    """Whether the head's logits stay split until the loss; "auto": if the plan was found automatically and there is a loss function."""


class TensorParallel(Method):
    """Column-wise and row-wise linear layers."""

    name, group, stage = "tensor_parallel", "parallel", Stage.TENSOR
    Config = TensorParallelConfig
    needs_processes = True
    short = "plan"
    axis: ClassVar[str] = "tensor"
    short_label = ""  # the mesh names it
    why = "matrices are split over the ranks of the tensor axis"

    def parse(self, config: Any = None) -> TensorParallelConfig:
        """Also accept the plan itself, `{layer: style}`."""
        if (
            isinstance(config, dict)
            and config
            and "plan" not in config
            and all(style in tuple(STYLES) for style in config.values())
        ):
            config = {"plan": config}
        return super().parse(config)

    def read(self, values: Settings) -> Settings:
        plan = values.get("plan", "auto")
        if plan == "auto":
            return values
        if not (isinstance(plan, tuple) and plan and all(isinstance(pair, tuple) and len(pair) == 2 for pair in plan)):
            raise self.bad("plan", plan, "'auto' or {layer: style}")
        for name, style in plan:
            if style not in STYLES:
                raise self.bad(f"plan[{name!r}]", style, f"one of {', '.join(STYLES)}")
        values["plan"] = tuple(sorted(plan))
        return values

    def axis_sizes(self, scope: "SearchScope") -> list[int]:
        most = min(scope.world, scope.machine.per_node)
        return [size for size in range(2, most + 1) if divides_heads(scope.profile, size)]

    def fits(self, config: TensorParallelConfig, candidate: "Candidate") -> str | None:
        is_replicated = candidate.data > 1 and not candidate.is_sharded
        return "DDP cannot hold tensor-parallel parameters" if is_replicated else None

    def affect(self, effects: "Effects", config: TensorParallelConfig) -> None:
        ranks = effects.axes.get("tensor", 1)
        effects.parameter_ranks *= ranks
        effects.work_ranks *= ranks
        effects.block_share *= _KEPT + (1 - _KEPT) / ranks
        effects.block_exchanges += ((self.axis, 4 * 2),)  # attention and MLP, forward and backward

    def pinned(
        self, config: TensorParallelConfig, names: Iterable[str], units: tuple[str, ...], repeated: tuple[str, ...]
    ) -> Option:
        """Name the units by which data parallelism over tensor-parallel parameters shards, as zero2 does."""
        own: Option = ((self.name, config),)
        if not units or {*SHARDING, "half"} & set(names):
            return own
        return (*own, ("zero2", find_method("zero2").parse({"wrap": units})))

    def clash(self, config: TensorParallelConfig, others: Mapping[str, Any], device: torch.device) -> str | None:
        """Reject symbolic sizes. With them torch's compiler fails in the backward pass of distributed tensors."""
        if not getattr(others.get("native_dynamo"), "dynamic", None):
            return None
        return (
            "native_dynamo with dynamic=True and tensor_parallel cannot be used together: torch cannot compile split layers for sizes that "
            "vary. Remove dynamic: each size is then compiled for itself. Pad sequences to few different lengths."
        )

    def check(self, config: TensorParallelConfig, site: Site) -> None:
        self.require_axis(site)
        if site.model is not None:
            expanded, _ = self._expanded(config, site)
            if config.sequence_parallel:
                self._pieces(expanded, site)

    def _pieces(self, expanded: dict[str, Any], site: Site) -> Any:
        """Return where blocks run on pieces of the sequence."""
        from drivetrain.module.sequence_pieces_check import find_pieces

        assert site.model is not None
        with config_errors():
            return find_pieces(site.model, expanded, site.axis("tensor"))

    def _expanded(
        self, config: TensorParallelConfig, site: Site, has_loss: bool = False
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the style of each layer, and remarks on where the plan comes from."""
        assert site.model is not None
        size = site.axis("tensor")
        remarks: list[str] = []
        plan: dict[str, Any]
        if config.plan != "auto":
            plan = dict(config.plan)
        elif _has_own_plan(site.model, size):
            plan = find_tp_plan(site.model)
        else:
            from drivetrain.module.tensor_inference import infer_tp_plan

            found = infer_tp_plan(site.model, size)
            plan, remarks = dict(found.styles), ["the plan was found by trying a block", *found.remarks]
        if not plan:
            raise MethodConfigError(
                f"tensor_parallel: there is no plan for {type(site.model).__name__}: {'; '.join(remarks[1:]) or 'no layers make a pair'}. "
                "Pass {'plan': {'layer.name': 'colwise', ...}}, or call drivetrain.register_tp_plan(cls, {...})."
            )
        with config_errors():
            expanded = expand_tp_plan(site.model, plan, size)
        is_found = config.plan == "auto" and has_loss
        is_possible = site.axis("pipe") == 1 and "native_dynamo" not in site.names  # whose loss is elsewhere, or traced
        is_wanted = config.loss_parallel is True or (config.loss_parallel == "auto" and is_found and is_possible)
        if config.loss_parallel is True and site.axis("pipe") > 1:
            raise ConflictError(
                "tensor_parallel: loss_parallel=True and a 'pipe' axis cannot be used together, because the last stage computes the loss. "
                "Remove loss_parallel."
            )
        with_head = split_head(site.model, expanded, size) if is_wanted else None
        if with_head is None and config.loss_parallel is True:
            raise MethodConfigError(
                f"tensor_parallel: loss_parallel=True needs a head that can be split, and {type(site.model).__name__} has none: a linear "
                f"layer with one output for each word of an embedding, in a number that divides over {size} ranks. Remove loss_parallel."
            )
        return with_head or expanded, remarks

    def apply(self, ctx: "Application", config: TensorParallelConfig) -> None:
        place = replace(ctx.plan.site, model=ctx.whole_model)
        expanded, remarks = self._expanded(
            config, place, has_loss=ctx.loss_func is not None and not ctx.outputs_are_read
        )
        pieces = self._pieces(expanded, place) if config.sequence_parallel else None
        expanded = ctx.held(expanded)
        mesh = ctx.axis_mesh("tensor")
        unreduced, prepare = () if pieces is None else pieces.closers, None
        if any(parameter.is_meta for parameter in ctx.model.parameters()):
            prepare = partial(_initialise, ctx, mesh)
        else:
            ctx.model.to(ctx.device)
            synchronise([*ctx.model.parameters(), *ctx.model.buffers()], mesh)  # all ranks cut the same matrices
        ctx.model = parallelize(ctx.model, mesh, expanded, unreduced=unreduced, prepare=prepare)
        if pieces is not None:
            self._run_on_pieces(ctx, mesh, pieces)
        ctx.note(f"tensor_parallel: {len(expanded)} layers over {mesh.size()} ranks")
        if "vocabulary" in expanded.values():
            ctx.loss_changes.append(wrap_loss_for_split_logits)
            ctx.note("tensor_parallel: in training, logits stay split over ranks until the loss")
        for remark in remarks:
            ctx.note(f"tensor_parallel: {remark}")

    def _run_on_pieces(self, ctx: "Application", mesh: DeviceMesh, pieces: "PiecePlan") -> None:
        """Let the blocks that this rank holds run on pieces of the sequence."""
        from drivetrain.module.sequence_pieces import run_on_pieces

        here = replace(
            pieces,
            blocks=ctx.held(pieces.blocks),
            norms=list(ctx.held(dict.fromkeys(pieces.norms))),
            closers=list(ctx.held(dict.fromkeys(pieces.closers))),
        )
        site = ctx.plan.site
        others = site.axis("pipe") > 1 or site.axis("sequence") > 1 or "native_dynamo" in site.names
        run_on_pieces(ctx.model, mesh, here, gather_after_each_block=others)
        where = "within each block" if others else "from the first block to the last"
        ctx.note(
            f"tensor_parallel: {len(here.norms)} norms and the layers after them on parts of the sequence, {where}"
        )


def _initialise(ctx: "Application", mesh: DeviceMesh, name: str, module: nn.Module) -> None:
    """Give one module of a model on the meta device memory, and all ranks the same values."""
    sharding = next(filter(None, map(ctx.plan.config, SHARDING)), None)
    module.to_empty(device=ctx.device, recurse=False)
    initialise(name, module, getattr(sharding, "param_init_fn", None))
    synchronise([*module.parameters(recurse=False), *module.buffers(recurse=False)], mesh)


def _has_own_plan(model: nn.Module, size: int) -> bool:
    """Return whether a registered plan or the model's own can be used; one of transformers needs heads that divide."""
    if not find_tp_plan(model):
        return False
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    texts = [getattr(config, "get_text_config", lambda: None)() for config in configs.values()]
    names = ("num_attention_heads", "num_key_value_heads")
    return all((getattr(text, name, None) or 0) % size == 0 for text in texts for name in names)
