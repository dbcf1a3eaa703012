"""Apply a plan: one walk over its methods in their fixed order, with the mesh, the wrapping, the move and the optimizer in between.

The plan is checked whole before anything is touched. If a step fails all the same, the model is put back as it was and the error goes
on: there is never a half-applied model. Parameter names and state-dict keys of the user's module stay what they were; DDP is the one
outer shell.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from drivetrain.context.context import Context
from drivetrain.context.loading import LoadReport
from drivetrain.context.moving import move_to_device
from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.module.pipeline_parts import Elsewhere
from drivetrain.module.pipeline_schedule import PipelinedModel, release_others
from drivetrain.module.wrappers import is_fully_sharded, wrapping_of
from drivetrain.module.wrapping import wrap_ddp
from drivetrain.runtime.ranks import clear_data_ranks, is_master
from drivetrain.strategy.materialising import materialise
from drivetrain.strategy.mesh import build_mesh
from drivetrain.strategy.method import Stage
from drivetrain.strategy.optimizer_recipe import OptimizerRecipe, recipe_of
from drivetrain.strategy.process_settings import ProcessSettings
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.snapshot import ModelSnapshot

if TYPE_CHECKING:
    from drivetrain.strategy.value import Strategy


class PlanContext(Context):
    """The Context that a plan shapes; what methods need to know beside the session's items is transient."""

    transient: ClassVar[frozenset[str]] = frozenset(
        {
            *("plan", "mesh", "recipe", "loss_func", "prepare_input", "sample", "notes"),
            *("ddp_settings", "autocast_dtype", "scaler_dtype", "skip_nonfinite", "stepping"),
            *("input_changes", "loss_changes", "recipe_changes", "output_position", "whole", "copies"),
        }
    )

    model: nn.Module
    optimizer: Any

    def __init__(
        self,
        model: nn.Module,
        plan: ResolvedPlan,
        recipe: OptimizerRecipe | None = None,
        loss_func: Callable[..., Any] | None = None,
        prepare_input: Callable[[Any, torch.device], Any] | None = None,
        sample: Callable[[nn.Module], Any] | None = None,
    ):
        super().__init__(model=model)
        self.optimizer: Any = None
        self.loader: Any = None
        self.lr_scheduler: Any = None
        self.scaler: Any = None
        self._device = plan.site.device
        self.plan, self.recipe, self.loss_func, self.prepare_input = plan, recipe, loss_func, prepare_input
        self.sample = sample
        """Runs a model on a few samples and returns its outputs; None where no data is at hand."""
        self.mesh: Any = None
        self.copies: Any = None
        """The mesh on which parameters that are sharded once for each tensor rank are saved."""
        self.whole: nn.Module | None = None
        """The model of which `model` holds some stages, while a plan with a pipeline is applied."""
        self.notes: list[str] = []
        """What methods found out while they were applied."""
        self.ddp_settings: dict[str, Any] = {}
        self.autocast_dtype: torch.dtype | None = None
        """What forward and loss are computed in; sharding takes it over into its own policy."""
        self.scaler_dtype: torch.dtype | None = None
        """What gradients are computed in, where that decides whether they must be scaled."""
        self.skip_nonfinite = False
        self.input_changes: list[Callable[[Tensor], Tensor]] = []
        self.loss_changes: list[Callable[[Any], Any]] = []
        self.output_position = 1
        """Which argument of the loss is the model's output: `(input, output)` here, `(output, target)` in the Trainer."""
        self.recipe_changes: list[Callable[[OptimizerRecipe], None]] = []
        """What is done to the recipe after the methods of the optimizer's own stage."""
        self.stepping: Any = None

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return the state of every item; `full` also joins the stages of a pipeline, on rank 0."""
        if not (full and isinstance(self.model, PipelinedModel)):
            state = super().state_dict(full=full)
            if isinstance(self.model, PipelinedModel):
                from drivetrain.strategy.pipeline_state import with_stages

                return with_stages(self.model, state)
            if self.copies is None or full:
                return state
            from drivetrain.strategy.mesh_state import with_copies

            return with_copies(state, self.copies)
        from drivetrain.strategy.pipeline_state import joined_state

        return joined_state(self, super().state_dict())

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> LoadReport:
        """Restore a saved state; of a whole model's, a pipeline takes its own stages."""
        from drivetrain.strategy.pipeline_state import check_stages, own_share

        state = check_stages(self.model, state)
        if isinstance(self.model, PipelinedModel):
            state = own_share(self, state)
        if self.copies is not None:
            from drivetrain.strategy.mesh_state import without_copies

            state = without_copies(state, self.mesh)
        return super().load_state_dict(state, strict)

    @property
    def whole_model(self) -> nn.Module:
        """The model, or while a pipeline is built the one it is a part of."""
        return self.model if self.whole is None else self.whole

    def held(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is named after modules that this rank holds; a stage of a pipeline does not hold all."""
        here = {name for name, module in self.model.named_modules() if not isinstance(module, Elsewhere)}
        return {name: value for name, value in named.items() if name in here}

    def note(self, text: str) -> None:
        """Keep a remark for `explain()`."""
        self.notes.append(text)

    def prepared(self, data: Any, device: torch.device | str | None = None) -> Any:
        """Return the model's input for what a loader yields: moved, and changed as the plan asks."""
        place = self.device if device is None else torch.device(device)
        return prepared_input(data, place, self.prepare_input, self.input_changes)


def prepared_input(
    data: Any,
    device: torch.device,
    prepare_input: Callable[[Any, torch.device], Any] | None = None,
    changes: Sequence[Callable[[Tensor], Tensor]] = (),
) -> Any:
    """Return data as a model takes it: prepared by the user's function or moved, then changed tensor by tensor."""
    if prepare_input is None:
        data = move_to_device(device, data, non_blocking=True)
    else:
        data = prepare_input(data, device)
    return change_tensors(data, changes) if changes else data


def change_tensors(value: Any, changes: Sequence[Callable[[Tensor], Tensor]]) -> Any:
    """Return nested containers with every tensor changed."""
    from torch.utils._pytree import tree_map_only

    def change(tensor: Tensor) -> Tensor:
        for function in changes:
            tensor = function(tensor)
        return tensor

    return tree_map_only(Tensor, change, value)


def check_model(model: Any, where: str = "auto_accelerate") -> None:
    """Refuse what is no plain module: something else, or a module that is wrapped, sharded or compiled already."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: model is a {type(model).__name__}; expected a torch.nn.Module.")
    for name, module in model.named_modules():
        if (wrapping := wrapping_of(module)) is not None:
            place = f"its part {name!r}" if name else "it"
            raise TypeError(
                f"{where}: the model ({type(model).__name__}) must be plain, and {place} is already wrapped ({wrapping}). Pass the "
                "model itself; the plan wraps it."
            )


def shape(ctx: PlanContext) -> PlanContext:
    """Apply a resolved plan to a context: model and optimizer. On an error the model and the process's settings are as before."""
    before, settings = ModelSnapshot(ctx.model), ProcessSettings.capture()
    model = ctx.model
    try:
        _shape(ctx)
    except BaseException:
        before.restore()
        settings.restore()
        ctx.model, ctx.whole = model, None
        clear_data_ranks()
        raise
    if ctx.whole is not None:
        assert isinstance(ctx.model, PipelinedModel)
        release_others(ctx.whole, ctx.model)
        ctx.whole = None
    return ctx


def _shape(ctx: PlanContext) -> None:
    plan = ctx.plan
    ctx.mesh = build_mesh(plan.axes, plan.rank_order, ctx.device.type)
    if plan.site.axis("tensor") > 1:
        from drivetrain.strategy.mesh_state import mesh_of_copies

        ctx.copies = mesh_of_copies(ctx)
    for stage in Stage:
        if stage is Stage.SHELL and not _will_be_sharded(plan):
            _place(ctx)
        for own, method, config in plan.steps:
            if own is stage:
                _apply(ctx, stage, partial(method.apply, ctx, config))
        if stage is Stage.SHELL:
            _apply(ctx, stage, partial(_wrap, ctx))
        elif stage is Stage.OPTIMIZER and ctx.recipe is not None:
            for change in ctx.recipe_changes:
                change(ctx.recipe)
            ctx.optimizer = ctx.recipe.make(ctx.model)


def _will_be_sharded(plan: ResolvedPlan) -> bool:
    return any(stage is Stage.SHELL for stage, _, _ in plan.steps)


def _apply(ctx: PlanContext, stage: Stage, act: Callable[[], None]) -> None:
    """Do something to the context's model; in a pipeline, to that part of it which the stage of application means.

    Blocks are found in the whole model, whose modules the pipeline shares. To DDP and `fully_shard` each stage is a model of its own.
    """
    pipeline, dtype = ctx.model, ctx.autocast_dtype
    if not isinstance(pipeline, PipelinedModel):
        act()
        return

    def on(part: nn.Module) -> nn.Module:
        ctx.model, ctx.autocast_dtype = part, dtype
        act()
        return ctx.model

    try:
        if stage is Stage.SHELL:
            pipeline.wrap_parts(on)
        elif stage in (Stage.CHECKPOINT, Stage.COMPILE_BLOCKS):
            assert ctx.whole is not None
            on(ctx.whole)
        else:
            act()
    finally:
        ctx.model = pipeline


def _wrap(ctx: PlanContext) -> None:
    """Average gradients over data and sequence ranks by DDP where nothing else does it."""
    plan = ctx.plan
    if plan.data_ranks * plan.site.axis("sequence") == 1 or is_fully_sharded(ctx.model):
        _warn_unused(ctx)
        return
    reasons = {"tensor": "DDP cannot hold tensor-parallel parameters", "pipe": "DDP's buckets do not follow a schedule"}
    reason = next((text for axis, text in reasons.items() if plan.site.axis(axis) > 1), None)
    if reason is not None:
        from drivetrain.strategy.methods.fsdp import shard_over_data

        shard_over_data(ctx, reshard_after_forward=False)
        _warn_unused(ctx)
        ctx.note(f"data parallel: fully_shard without resharding, because {reason}")
        return
    ctx.model = wrap_ddp(ctx.model, **ctx.ddp_settings)


def _warn_unused(ctx: PlanContext) -> None:
    """Warn of settings of DDP where another way to average gradients is used, or none is needed."""
    given = [name for name, value in ctx.ddp_settings.items() if name != "process_group" and value]
    text = f"{', '.join(given)}: settings of DDP, which this plan does not use, have no effect"
    if given and ctx.plan.site.world > 1 and text not in ctx.notes:
        ctx.note(text)
        if is_master():
            warnings.warn(f"{text}. Leave them out.", DrivetrainWarning, stacklevel=2)


def _place(ctx: PlanContext) -> None:
    """Move the model to its device; one without memory yet gets it, and initialises itself."""
    if any(parameter.is_meta for parameter in ctx.model.parameters()):
        materialise(ctx.model, ctx.device)
    ctx.model.to(ctx.device)


def apply_to_context(plan: "Strategy", context: Context) -> Context:
    """Apply a plan to a user's Context: `model`, and where they are there `optimizer`, `loader` and `loss_func`."""
    from drivetrain.strategy.stepping import finish

    model = getattr(context, "model", None)
    if model is None:
        raise ConfigError(
            f"a plan needs the item 'model' in the Context; it has: {', '.join(context._items()) or 'nothing'}."
        )
    check_model(model, "Strategy.apply")
    resolved = resolve_plan(plan, model=model, device=context.device)
    optimizer, loader = getattr(context, "optimizer", None), getattr(context, "loader", None)
    recipe = None if optimizer is None else recipe_of(optimizer, model)
    loss_func = getattr(context, "loss_func", None)
    if resolved.splitter is not None and loader is None:
        raise ConfigError(f"{resolved.splitter} needs the item 'loader' in the Context, with a global_batch_size.")
    ctx = shape(PlanContext(model, resolved, recipe, loss_func))
    finish(ctx, loader)
    context.model = ctx.model  # type: ignore[attr-defined]
    if ctx.optimizer is not None:
        context.optimizer = ctx.optimizer  # type: ignore[attr-defined]
    if ctx.loader is not None:
        context.loader = ctx.loader  # type: ignore[attr-defined]
    if loss_func is not None:
        context.loss_func = ctx.stepping.loss  # type: ignore[attr-defined]
    if ctx.scaler is not None:
        context.scaler = ctx.scaler  # type: ignore[attr-defined]
    return context
