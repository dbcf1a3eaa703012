"""Apply a plan to a Context: one pass over its methods in their fixed order, with the mesh, the wrapping, the move to the device
and the optimizer in between. The Context may belong to a hand-written loop, to `auto_accelerate`, or be the Trainer's State.

The whole plan is checked before anything changes. If a step still fails, the model is restored and the error is raised again. Parameter
names and state-dict keys of the user's module do not change. DDP is the only outer wrapper.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain.context.context import Context
from drivetrain.context.moving import move_to_device
from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError, UnsupportedMethodError, warn
from drivetrain.core.types import Batch, Settings
from drivetrain.module.accumulation import Count
from drivetrain.module.compilation import JointStep, LossGraph
from drivetrain.module.ddp import wrap_ddp
from drivetrain.module.loss_items import UNKNOWN, LossItems
from drivetrain.module.optimizers import MasterCopies, requires_closure
from drivetrain.module.pipeline_parts import RemoteModule
from drivetrain.module.pipeline_schedule import PipelinedModel, free_other_stages
from drivetrain.module.wrapping import is_fully_sharded, unwrap, wrapping_of
from drivetrain.runtime.ranks import clear_data_ranks, is_master
from drivetrain.strategy.batching import plan_batch
from drivetrain.strategy.mesh import build_mesh
from drivetrain.strategy.method import Stage
from drivetrain.strategy.optimizer_recipe import OptimizerRecipe, recipe_of
from drivetrain.strategy.plan_layout import PlanLayout, mesh_of_copies
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.snapshot import ModelSnapshot, ProcessSettings, materialise

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.strategy.stepping import Stepping
    from drivetrain.strategy.value import Strategy

LossFunc = Callable[[Any, Any], Any]
PrepareInput = Callable[[Any, torch.device], Any]


@dataclass(eq=False)
class Application:
    """A plan that is being applied to a Context: what methods may read, and what they request from the training loop.

    `model` and `optimizer` are those of the Context; to set them is to change the Context.
    """

    context: Context
    plan: ResolvedPlan
    recipe: OptimizerRecipe | None = None
    own_loss_func: LossFunc | None = None
    """The loss function, unless the Context is a State, which has one."""
    prepare_input: PrepareInput | None = None
    sample: Callable[[nn.Module], Any] | None = None
    """Runs a model on a few samples and returns its outputs; None without data."""
    _: KW_ONLY
    mesh: Any = None
    """torch's DeviceMesh; None on one process."""
    whole: nn.Module | None = None
    """The model of which `model` holds some stages, while a plan with a pipeline is applied."""
    autocast_dtype: torch.dtype | None = None
    """The type of forward and loss; sharding gathers parameters in it."""
    scaler_dtype: torch.dtype | None = None
    """The type of the gradients, if it decides whether they must be scaled."""
    skip_nonfinite: bool = False
    count_items: Callable[[Any], Count] | None = None
    """Counts what the loss of prepared input is a mean over; None: by `items`, else by samples."""
    items: LossItems = UNKNOWN
    """What the loss is a mean over, if it was found."""
    outputs_are_read: bool = False
    """Whether anything but the loss reads the outputs of a model that trains, so that they must not be split."""
    loss_graph: LossGraph = "apart"
    """Whether the loop can call model and loss function as one compiled graph."""
    joint: JointStep | None = None
    """Model and loss function as one graph, where the plan compiles them so."""
    output_position: int = 1
    """Which argument of the loss is the model's output: `(input, output)` here, `(output, target)` in the Trainer."""
    stepping: "Stepping" = field(init=False)
    """The accumulation window of a hand-written loop; the Trainer has its own."""
    notes: list[str] = field(default_factory=list)
    """Notes of the methods from when they were applied."""
    ddp_settings: Settings = field(default_factory=dict)
    input_changes: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    loss_changes: list[Callable[[LossFunc], LossFunc]] = field(default_factory=list)
    recipe_changes: list[Callable[[OptimizerRecipe], None]] = field(default_factory=list)
    """What is done to the recipe after the methods of the optimizer's own stage."""

    @property
    def device(self) -> torch.device:
        """The device on which the Context is, or will be."""
        return self.context._device or self.plan.site.device

    @property
    def model(self) -> nn.Module:
        """The Context's model."""
        return self.context.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.context.model = model

    @property
    def optimizer(self) -> "Optimizer | None":
        """The Context's optimizer; a State holds a tuple of them."""
        if isinstance(self.context, State):
            return self.context.optimizers[0] if self.context.optimizers else None
        return getattr(self.context, "optimizer", None)

    @optimizer.setter
    def optimizer(self, optimizer: "Optimizer | None") -> None:
        if isinstance(self.context, State):
            self.context.optimizers = () if optimizer is None else (optimizer,)
        else:
            self.context.optimizer = optimizer

    @property
    def loss_func(self) -> LossFunc | None:
        """The loss function. Setting it changes the Context if that has one."""
        return self.context.loss_fn if isinstance(self.context, State) else self.own_loss_func

    @loss_func.setter
    def loss_func(self, loss_func: LossFunc) -> None:
        self.own_loss_func = loss_func
        if isinstance(self.context, State):
            self.context.loss_fn = loss_func
        elif hasattr(self.context, "loss_func"):
            self.context.loss_func = loss_func

    @property
    def scaler(self) -> "torch.amp.GradScaler | None":
        """The Context's gradient scaler."""
        return getattr(self.context, "scaler", None)

    @property
    def whole_model(self) -> nn.Module:
        """The model. While a pipeline is being built, the model of which this rank's stages are a part."""
        return self.model if self.whole is None else self.whole

    def held(self, named: Mapping[str, Any]) -> Settings:
        """Return the entries whose names are modules that this rank holds. A pipeline stage does not hold all of them."""
        here = {name for name, module in self.model.named_modules() if not isinstance(module, RemoteModule)}
        return {name: value for name, value in named.items() if name in here}

    def axis_mesh(self, axis: str) -> Any:
        """Return the part of the mesh along one axis."""
        return self.mesh[axis] if self.mesh.ndim > 1 else self.mesh

    def sample_arguments(self) -> tuple[tuple[Any, ...], Settings] | None:
        """Return what the model is called with for a few samples, without running it; None without samples."""
        seen: list[tuple[tuple[Any, ...], Settings]] = []

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: Settings) -> None:
            seen.append((args, kwargs))
            raise _ArgumentsCaptured

        if self.sample is None:
            return None
        hook = self.model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
        with suppress(_ArgumentsCaptured):
            try:
                self.sample(self.model)
            finally:
                hook.remove()
        return seen[0] if seen else None

    def note(self, text: str) -> None:
        """Add a remark to `explain()`."""
        self.notes.append(text)

    def prepared(self, data: Batch, device: torch.device | str | None = None) -> Any:
        """Return the model's input for a batch of the loader: on the device, and changed as the plan requires."""
        target = self.device if device is None else torch.device(device)
        return prepared_input(data, target, self.prepare_input, self.input_changes)


class _ArgumentsCaptured(Exception):
    """Ends a call of the model when its arguments are known."""


def prepared_input(
    data: Batch,
    device: torch.device,
    prepare_input: Callable[[Any, torch.device], Any] | None = None,
    changes: Sequence[Callable[[Tensor], Tensor]] = (),
) -> Any:
    """Return data as the model takes it: prepared by the user's function or moved, then converted tensor by tensor."""
    if prepare_input is None:
        data = move_to_device(device, data, non_blocking=True)
    else:
        data = prepare_input(data, device)
    return change_tensors(data, changes) if changes else data


def change_tensors(value: object, changes: Sequence[Callable[[Tensor], Tensor]]) -> Any:
    """Apply functions to every tensor in nested containers and return the result."""

    def change(tensor: Tensor) -> Tensor:
        for function in changes:
            tensor = function(tensor)
        return tensor

    return tree_map_only(Tensor, change, value)


def check_model(model: object, where: str = "auto_accelerate") -> None:
    """Raise unless the model is a plain module that is not yet wrapped, sharded or compiled."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: model is a {type(model).__name__}; expected a torch.nn.Module.")
    for name, module in model.named_modules():
        if (wrapping := wrapping_of(module)) is not None:
            part = f"its part {name!r}" if name else "it"
            raise TypeError(
                f"{where}: the model ({type(model).__name__}) must be plain, and {part} is already wrapped ({wrapping}). Pass the "
                "model itself; the plan wraps it."
            )


def shape(app: Application) -> Application:
    """Apply a resolved plan to model, optimizer and loss. On an error the model and the settings of the process are restored."""
    _check_optimizer(app)
    before, settings = ModelSnapshot(app.model), ProcessSettings.capture()
    model, layout = app.model, app.context._layout
    try:
        _shape(app)
    except BaseException:
        before.restore()
        settings.restore()
        app.model, app.whole, app.context._layout = model, None, layout
        clear_data_ranks()
        raise
    if app.whole is not None:
        assert isinstance(app.model, PipelinedModel)
        free_other_stages(app.whole, app.model)
        app.whole = None
    if app.loss_func is not None:
        for change in app.loss_changes:
            app.loss_func = change(app.loss_func)
    return app


def _check_optimizer(app: Application) -> None:
    """Reject an optimizer whose step cannot work with the plan, or on the split parameters that it makes."""
    build, plan = None if app.recipe is None else app.recipe.build, app.plan
    _check_closure(app, build)
    if not (isinstance(build, type) and issubclass(build, torch.optim.Adafactor)):
        return
    found = [method.name for _, method, _ in plan.steps if method.shards_axis is not None]
    found += ["a tensor axis"] if plan.site.axis("tensor") > 1 else []
    found += ["data ranks with a pipeline"] if plan.site.axis("pipe") > 1 and plan.data_ranks > 1 else []
    if found:
        raise UnsupportedMethodError(
            f"Adafactor and {found[0]} cannot be used together: torch's Adafactor squares row and column norms in place, which is not "
            "supported for sharded parameters. Use zero1 or plain data parallelism with it, or another optimizer."
        )


def _check_closure(app: Application, optimizer: object) -> None:
    """Reject an optimizer, or the class of one, that evaluates the loss itself. The Trainer can do that with the model's own parameters."""
    replaces = any(m.shards_axis is not None or m.splits_optimizer or m.copies_parameters for _, m, _ in app.plan.steps)
    is_trainer = isinstance(app.context, State)
    # SAM, which can also be repeated on replaced parameters.
    is_repeated = bool(getattr(optimizer, "needs_closure", False))
    if (requires_closure(optimizer) and not (is_trainer and not replaces)) or (is_repeated and not is_trainer):
        name = getattr(optimizer, "__name__", type(optimizer).__name__.removeprefix(MasterCopies.__name__))
        other = "Trainer with algorithms=[SAM()]" if is_repeated else "Trainer without a plan"
        raise UnsupportedMethodError(
            f"{name} evaluates the loss itself (its step needs a closure), which the plan does not support. Use another optimizer, or the "
            f"{other}."
        )


def _shape(app: Application) -> None:
    plan = app.plan
    app.mesh = build_mesh(plan.axes, plan.rank_order, app.device.type)
    app.context._layout = PlanLayout(app.mesh, mesh_of_copies(plan.site, app.mesh))
    for stage in Stage:
        # Sharding places the model itself.
        if stage is Stage.SHELL and not any(own is stage for own, _, _ in plan.steps):
            if any(parameter.is_meta for parameter in app.model.parameters()):
                materialise(app.model, app.device)
            app.model.to(app.device)
        for own, method, config in plan.steps:
            if own is stage:
                _apply(app, stage, partial(method.apply, app, config))
        if stage is Stage.SHELL:
            _apply(app, stage, partial(_wrap, app))
        elif stage is Stage.OPTIMIZER and app.recipe is not None:
            for change in app.recipe_changes:
                change(app.recipe)
            app.optimizer = app.recipe.make(app.model)
            _check_closure(app, getattr(app.optimizer, "optim", app.optimizer))


def _apply(app: Application, stage: Stage, act: Callable[[], None]) -> None:
    """Do something to the context's model; in a pipeline, to that part of it which the stage of application means.

    Blocks are found in the whole model, whose modules the pipeline shares. To DDP and `fully_shard` each stage is a model of its own.
    """
    pipeline = app.model
    if not isinstance(pipeline, PipelinedModel):
        act()
        return

    def on(part: nn.Module) -> nn.Module:
        app.model = part
        act()
        return app.model

    try:
        if stage is Stage.SHELL:
            pipeline.wrap_parts(on)
        elif stage in (Stage.CHECKPOINT, Stage.COMPILE_BLOCKS):
            assert app.whole is not None
            on(app.whole)
        else:
            act()
    finally:
        app.model = pipeline


def _wrap(app: Application) -> None:
    """Average gradients over data and sequence ranks by DDP where nothing else does it."""
    plan = app.plan
    if plan.data_ranks * plan.site.axis("sequence") == 1 or is_fully_sharded(app.model):
        _warn_unused(app)
        return
    reasons = {"tensor": "DDP cannot hold tensor-parallel parameters", "pipe": "DDP's buckets do not follow a schedule"}
    reason = next((text for axis, text in reasons.items() if plan.site.axis(axis) > 1), None)
    if reason is not None:
        from drivetrain.strategy.methods.fsdp import Zero2Config, shard_over_data

        shard_over_data(app, Zero2Config())
        _warn_unused(app)
        app.note(f"data parallel: fully_shard without resharding, because {reason}")
        return
    app.model = wrap_ddp(app.model, **app.ddp_settings)


def _warn_unused(app: Application) -> None:
    """Warn of settings of DDP where another way to average gradients is used, or none is needed."""
    given = [name for name, value in app.ddp_settings.items() if name != "process_group" and value]
    text = f"{', '.join(given)}: settings of DDP, which this plan does not use, have no effect"
    if given and app.plan.site.world > 1 and text not in app.notes:
        app.note(text)
        if is_master():
            warn(f"{text}. Remove them.")


def apply_to_called_model(app: Application) -> Application:
    """Apply a plan to a model that the loop calls with the loader's batches. The model converts its inputs itself."""
    shape(app)
    if app.input_changes:
        unwrap(app.model).register_forward_pre_hook(partial(_change_inputs, app.input_changes), with_kwargs=True)
    if is_fully_sharded(app.model):
        app.model.register_forward_hook(_reshard)
    return app


def _change_inputs(
    changes: Sequence[Callable[[Tensor], Tensor]], module: nn.Module, args: object, kwargs: object
) -> tuple[Any, Any]:
    """Convert the tensors that a model is called with."""
    return change_tensors(args, changes), change_tensors(kwargs, changes)


def _reshard(model: nn.Module, args: object, outputs: object) -> None:
    """Release gathered parameters when no backward will: the optimizer, the next run and a checkpoint look for the sharded ones."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]


def apply_to_context(plan: "Strategy", context: Context) -> Context:
    """Apply a plan to the Context of a hand-written loop: `model` and, if present, `optimizer`, `loader` and `loss_func`."""
    from drivetrain.strategy.stepping import finish

    model = getattr(context, "model", None)
    if model is None:
        raise ConfigError(
            f"a plan needs the item 'model' in the Context, which has: {', '.join(context._items()) or 'nothing'}."
        )
    check_model(model, "Strategy.apply")
    resolved = resolve_plan(plan, model=model, device=context.device)
    loader = getattr(context, "loader", None)
    if resolved.splitter is not None:  # checked before anything is changed
        if loader is None:
            raise ConfigError(f"{resolved.splitter} needs the item 'loader' in the Context, with a global_batch_size.")
        if (size := getattr(loader, "global_batch_size", None)) is not None:
            plan_batch(size, resolved.data_ranks, *resolved.batch_split)
        elif resolved.batch_split != (None, None):
            raise ConfigError(f"{resolved.splitter} needs a loader created with global_batch_size=.")
    app = Application(context, resolved, own_loss_func=getattr(context, "loss_func", None))
    app.recipe = None if app.optimizer is None else recipe_of(app.optimizer, model)
    finish(apply_to_called_model(app), loader)
    if app.loss_func is not None:
        app.loss_func = app.stepping.loss
    return context
