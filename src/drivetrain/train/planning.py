"""`Trainer(strategy=...)`: the plan is applied to the Trainer's State by the same code as to the Context of a hand-written loop.

The Trainer has its own loop, so everything that concerns the loop is returned to it: precision, gradient scaler, micro-batches.
If ranks share samples (tensor and sequence axes), the loop counts, gathers and draws by data ranks. Model and optimizer are
transformed before weights are loaded. A second `train()` finds them transformed already and only restores the DDP wrapper.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.context.state import State
from drivetrain.core.arguments import naming
from drivetrain.core.errors import (
    ConfigError,
    ConflictError,
    PlanInfeasible,
    StrategyError,
    UnsupportedMethodError,
    warn,
)
from drivetrain.core.event import Event
from drivetrain.core.plain import plain_text
from drivetrain.core.types import Settings
from drivetrain.module.compilation import GRAPH_MODES, LossGraph
from drivetrain.module.precision import PRECISIONS, Precision, parse_precision
from drivetrain.module.wrapping import unwrap, wrapping_of
from drivetrain.runtime.ranks import data_group, data_rank, get_num_processes, is_master, num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import preserve_rng_state
from drivetrain.strategy.apply import Application, apply_to_called_model, check_model
from drivetrain.strategy.dry_run import try_plan, with_counted_loss
from drivetrain.strategy.mesh import mesh_size
from drivetrain.strategy.optimizer_recipe import recipe_of
from drivetrain.strategy.registry import method_names
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.search.constraints import SearchConstraints
from drivetrain.strategy.search.decision import plain_plan
from drivetrain.strategy.task import NUM_SAMPLES, TrainingTask, Uncollated, joined, read_samples
from drivetrain.strategy.trial.process import reject_inside_trial
from drivetrain.strategy.value import Strategy, fingerprint
from drivetrain.train import loaders
from drivetrain.train.arguments import check_graphs
from drivetrain.train.batches import BatchForm, CallByForm, LossByForm, WholeForm, batch_size_of
from drivetrain.train.closures import requires_closure
from drivetrain.train.joint_step import LOSS_HOOKS, loss_graph_of
from drivetrain.train.resuming import ddp_settings
from drivetrain.train.settings import TrainSettings

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


SAME_AS_ALGORITHM = {"TorchCompile": "native_dynamo", "ChannelsLast": "channels_last", "FP8Linear": "fp8"}
"""Algorithms that do the same as a method; using both is a conflict."""
NEED_TORCH_OPTIMIZER = ("zero1", "zero2", "fsdp", "half", "fused_optimizer", "cpu_offload")
_NOT_IN_THE_LOOP = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")
"""Methods whose plans have fewer data ranks than processes, so that `per_device_batch_size` would be another batch over all of them; a
pipeline cannot run in the Trainer's loop at all."""
_HOOKS = (*LOSS_HOOKS, "backward_step", "optimizer_step")
"""What a trial would have to call to run this Trainer's own step."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What planning needs to know about a Trainer that is about to train."""

    state: State  # model, loss and optimizer, which the plan changes
    settings: TrainSettings
    device: torch.device
    strategy: object  # the plan in any form that `Strategy.load` reads, or "auto"
    strict: bool
    time_limit: float | None
    precision: str | Precision | None  # as requested; None: the plan decides
    has_scaler: bool
    dataset: object  # what `train()` was given: a dataset, or a loader
    collate: Callable[..., object] | None
    loader: object  # the training loader, where it was made already
    find_form: Callable[[object, object, bool], BatchForm]
    outputs_are_read: bool  # by anything but the loss function, in training
    loss_graph: LossGraph  # whether model and loss function may be one graph in training
    has_train_metrics: bool
    overridden_hooks: tuple[str, ...]  # which a trial would have to call
    ddp_settings: dict[str, bool]
    file: Path | None  # where the run saves its plan; None where it keeps no files
    report: Callable[[str], None] | None  # prints the progress of the search

    @property
    def optimizer(self) -> object:
        """The optimizer as given, or None."""
        return self.state.optimizers[0] if self.state.optimizers else None

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if a plan can create it again."""
        return self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None

    def form_of(self, batch: object, model: object) -> BatchForm:
        """Return how a batch is passed to a model."""
        return self.find_form(batch, model, self.state.loss_fn is not None)


def request_of(trainer: "Trainer") -> PlanRequest:
    """Return what planning needs to know about a Trainer."""
    run, engine = trainer.run, trainer.engine
    settings, active = trainer.settings or TrainSettings(num_epochs=1), current_run()
    folder = settings.checkpoint_dir if active is None else active.folder
    has_train_metrics = bool(run.measures.train_metrics)
    reading_events = (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.STEP_OUTPUT)
    return PlanRequest(
        state=trainer.state,
        settings=settings,
        device=torch.device(trainer.device),
        strategy=trainer.strategy,
        strict=trainer.strict,
        time_limit=trainer.strategy_time_limit,
        precision=run.shared.options.precision,
        has_scaler=trainer.runtime.scaler is not None,
        dataset=trainer.train_dataset,
        collate=getattr(run.data.train, "collate_fn", trainer.collate_fn),
        loader=run.data.train,
        find_form=run.loss.find_form,
        outputs_are_read=has_train_metrics
        or any(map(engine.listens, reading_events))
        or engine.has_algorithm_for(Event.AFTER_LOSS)
        or any(map(trainer.overrides, LOSS_HOOKS)),
        loss_graph=loss_graph_of(trainer),
        has_train_metrics=has_train_metrics,
        overridden_hooks=tuple(filter(trainer.overrides, _HOOKS)),
        ddp_settings=ddp_settings(run, trainer.state),
        file=None if folder is None else Path(folder) / "strategy.json",
        report=trainer.print if len(trainer.callback_handler) else None,
    )


def apply_strategy(trainer: "Trainer") -> None:
    """Apply the trainer's plan to its State; without a plan, do nothing."""
    if trainer.strategy is None:
        return
    run, runtime = trainer.run, trainer.runtime
    shell = run.shared.planned_model
    if shell is not None and unwrap(shell) is unwrap(trainer.model):
        trainer.model = shell  # an earlier run applied the plan and removed the wrapper at its end
        return
    request = request_of(trainer)
    trainer.plan, app = _apply(request)
    if request.file is not None and trainer.writes_files and is_master():
        trainer.plan.save(request.file)
    is_shared = num_data_ranks() != get_num_processes()
    run.shared.data_ranks = (data_rank(), num_data_ranks(), data_group()) if is_shared else None
    loaders.use_data_ranks(run.shared)
    if is_shared:  # other ranks hold the same samples
        run.measures.eval_metrics.join(data_group())
        run.measures.train_metrics.join(data_group())
    run.shared.planned_model, run.shared.joint = trainer.model, app.joint
    run.loss.form = None  # how a batch is passed to the model depends on the loss function
    if app.autocast_dtype is not None:
        fitting = (one for one in PRECISIONS.values() if one.autocast_dtype is app.autocast_dtype)
        runtime.precision = next(fitting, runtime.precision)
    if app.scaler_dtype is not None:  # the plan decides whether gradients are scaled
        runtime.scaler = Precision(name="plan", autocast_dtype=app.scaler_dtype).make_scaler(request.device)
    size, accumulation = app.plan.batch_split
    if size or accumulation:
        whole = request.settings.global_batch_size
        rows = request.settings.per_device_batch_size if whole is None else whole // app.plan.data_ranks
        size = max(1, -(-rows // (accumulation or 1))) if size is None else size
        run.settings = replace(request.settings, microbatch_size=size)


def _apply(request: PlanRequest) -> tuple[Strategy, Application]:
    """Find or read the plan, check it against the loop, and apply it to the State. Return the applied plan."""
    model, world = request.state.model, get_num_processes()
    is_auto = isinstance(request.strategy, str) and request.strategy == "auto"
    if not is_auto or request.strict or wrapping_of(model) is not None:
        check_model(model, "Trainer(strategy=)")
    if not is_auto:
        with naming("strategy", request.strategy):
            plan = Strategy.load(request.strategy)
    elif request.settings.resume_from is not None and request.file is not None and request.file.is_file():
        plan = Strategy.load(request.file)
    else:
        plan = search_plan(request)
    try:
        if plan.mesh is not None and mesh_size(plan.mesh) != world:
            plan = plan.rescale(world)
        resolved = resolve_plan(plan, model=model, device=request.device, world=world, strict=request.strict)
        _check(request, resolved)
    except StrategyError as error:
        if not is_auto or request.strict:
            raise
        plan = plain_plan(str(error), plan)
        resolved = resolve_plan(plan, model=model, device=request.device, world=world)
    tried = () if is_auto else _verify(request, plan, resolved)
    recipe = None if request.torch_optimizer is None else recipe_of(request.torch_optimizer, model)
    can_read = _has_items(_source(request)[0])
    app = Application(
        request.state, resolved, recipe, sample=partial(_run_samples, request) if can_read else None,
        output_position=0, outputs_are_read=request.outputs_are_read, loss_graph=request.loss_graph,
    )  # fmt: skip
    app.ddp_settings.update(request.ddp_settings)
    apply_to_called_model(app)
    reasons = tuple(dict.fromkeys((*plan.reasons, *tried, *resolved.reasons, *app.notes)))
    return replace(plan, mesh=resolved.axes[::-1], reasons=reasons, dropped=resolved.dropped), app


def _verify(request: PlanRequest, plan: Strategy, resolved: ResolvedPlan) -> tuple[str, ...]:
    """Compare one step of the plan with one of the plain model on copies, parameter by parameter; return what was found."""
    try:
        task, obstacle = make_task(request)
    except ConfigError as error:
        obstacle = str(error)
    if obstacle is not None:
        return (f"dry run: skipped, because {obstacle}",)
    micro, accumulation = resolved.batch_split
    if (micro or accumulation) and isinstance(task.samples, Uncollated):
        rows = batch_size_of(None, joined(task.samples))
        if rows != task.sample_count:
            raise UnsupportedMethodError(
                f"micro_batch: the Trainer cuts the first dimension of tensors, but {task.sample_count} samples that the collate_fn joins "
                f"have {rows} rows there. Remove micro_batch, or use auto_accelerate, whose loader joins each micro-batch."
            )
    parts = resolved.data_ranks * (accumulation or 1)
    rows = micro or max(1, task.global_batch_size // parts)
    outcome = try_plan(plan, replace(task, global_batch_size=parts * rows), device=request.device)
    if outcome.failure is not None:
        raise PlanInfeasible(f"the plan failed its trial ({outcome.failure.kind}): {outcome.failure.message}")
    return outcome.notes


def _run_samples(request: PlanRequest, model: nn.Module) -> object:
    """Return a model's outputs for a few samples of the training data."""
    with preserve_rng_state():
        samples = read_samples(*_source(request))
        form = request.form_of(joined(samples), model)
        return TrainingTask(call=CallByForm(form), samples=samples).run_samples(model)


def _check(request: PlanRequest, resolved: ResolvedPlan) -> None:
    """Reject what contradicts the Trainer's settings, or what it cannot do."""
    names = {method.name for _, method, _ in resolved.steps}
    for algorithm in request.state.algorithms:
        same = SAME_AS_ALGORITHM.get(type(algorithm).__name__)
        if same in names:
            raise ConflictError(
                f"the algorithm {type(algorithm).__name__} and the method {same} of the plan do the same. Remove one of them."
            )
    precise, rebuilt = names & {"amp_native", "half", "fp8"}, names & set(NEED_TORCH_OPTIMIZER)
    if request.precision is not None and precise:
        wanted, amp = parse_precision(request.precision).name, resolved.config("amp_native")
        if amp is None or wanted != {"bfloat16": "bf16", "float16": "fp16"}.get(amp.dtype):
            raise ConfigError(
                f"Trainer(precision={wanted!r}) and the plan's {', '.join(sorted(precise))} differ. Give one of them."
            )
    if request.torch_optimizer is None and rebuilt:
        raise ConfigError(
            f"{', '.join(sorted(rebuilt))}: these methods need a torch optimizer, but the Trainer has a "
            f"{type(request.optimizer).__name__}."
        )
    if "chunked_cross_entropy" in names and request.has_train_metrics:
        raise ConflictError(
            "train_metrics need the model's outputs, but with chunked_cross_entropy the model returns the input of its last layer in "
            "training. Remove one of them; metrics= in evaluations works."
        )
    micro = resolved.config("micro_batch")
    if micro is not None and request.settings.microbatch_size is not None:
        raise ConfigError(
            f"train(microbatch_size={request.settings.microbatch_size!r}) and the plan's micro_batch both split the batch. Give one of "
            "them."
        )
    compiler = resolved.config("native_dynamo")
    records = "cuda_graphs" in names or (compiler is not None and compiler.mode in GRAPH_MODES)
    check_graphs(records, request.settings, splits=micro is not None)
    if resolved.site.axis("pipe") > 1:
        raise UnsupportedMethodError(
            "a pipeline runs forward, loss and backward as one schedule, so the Trainer cannot run its events and hooks between them. "
            "Use auto_accelerate with your own loop for pipeline parallelism."
        )
    if resolved.site.axis("tensor") > 1 or resolved.site.axis("sequence") > 1:
        _check_shared_samples(request, resolved)


def _check_shared_samples(request: PlanRequest, resolved: ResolvedPlan) -> None:
    """Reject what would go wrong where several ranks work on the same samples."""
    sequence, optimizer = resolved.config("sequence_parallel"), request.torch_optimizer
    if sequence is not None and sequence.batch_sp_processing_fn is not None:
        raise UnsupportedMethodError(
            "sequence_parallel: batch_sp_processing_fn gives each rank a part of the batch, but the Trainer's hooks, losses and metrics "
            "need whole batches. Remove it, so that the blocks run on parts of the sequence, or use auto_accelerate with your own loop."
        )
    if optimizer is None:
        raise UnsupportedMethodError(
            f"a tensor or sequence axis needs a torch optimizer, but the Trainer has a {type(request.optimizer).__name__}, whose "
            "units average gradients over all processes. Use one torch optimizer, or a data axis."
        )
    if resolved.site.axis("tensor") == 1:
        return
    dtypes = [
        m.chosen_dtype(config, resolved.site.device) for _, m, config in resolved.steps if hasattr(m, "chosen_dtype")
    ]
    if request.has_scaler or torch.float16 in dtypes:
        raise UnsupportedMethodError(
            "float16 with scaled gradients is not supported with a tensor axis: an overflow on one rank must be seen by all. Use bf16."
        )
    if requires_closure(optimizer) or getattr(optimizer, "needs_closure", False):
        raise UnsupportedMethodError(
            f"{type(optimizer).__name__} evaluates the loss more than once and treats all parameters as one vector, which is not possible "
            "with a tensor axis. Use another optimizer, or a data axis."
        )
    tensor = resolved.config("tensor_parallel")
    if tensor is not None and tensor.loss_parallel is True and request.outputs_are_read:
        raise UnsupportedMethodError(
            "tensor_parallel: with loss_parallel=True the outputs in training are split over ranks, but train_metrics, an algorithm, a "
            "callback or an overridden hook reads them. Remove loss_parallel."
        )


# ---------------------------------------------------------------------- strategy="auto"
# The Trainer's training as a value that a search can try. A trial runs in another process, where there is no Trainer. What the default
# hooks do with a batch is a pure function of its form and the loss function, and travels; hooks that a user overrides may do anything, so
# nothing is tried then, and the plan records it.


def search_plan(request: PlanRequest) -> Strategy:
    """Return the best plan for the coming training run. Model, loader and random states of the Trainer do not change.

    A search that fails does not end a training, unless `strict`: the plan is then the one that needs the least memory, where none fits by
    prediction, else one that changes nothing.
    """
    from drivetrain.strategy.search.find import find_plan

    reject_inside_trial("Trainer(strategy='auto')")
    model, device, world = request.state.model, request.device, get_num_processes()
    constraints = constraints_of(request)
    task, obstacle = make_task(request)
    if task.samples is None or isinstance(task.samples, Uncollated):  # the loop could not cut them
        constraints = replace(constraints, excluded=constraints.excluded | {"micro_batch"})
    try:
        check_model(model, "strategy='auto'")  # a part may be compiled by the model's own code
        plan = find_plan(task, device=device, world=world, constraints=constraints, on_progress=request.report)
        notes = [] if obstacle is None else [f"search: no plan was tried, because {obstacle}"]
        if request.state.algorithms:
            notes.append("search: plans were compared without the Trainer's algorithms")
        mark = fingerprint(model, device, world, task.global_batch_size)
        plan = replace(plan, fingerprint=mark, reasons=(*plan.reasons, *notes))
        if plan.failure is None:
            return plan
        nearest, cause = plan.failure.nearest, plan.failure.message
        if not isinstance(nearest, Strategy):
            return plain_plan(cause, plan)
        nearest.validate(model, device, world)
    except Exception as error:  # whatever goes wrong in a search, the training does not need it
        if request.strict:
            raise
        return plain_plan(f"{type(error).__name__}: {plain_text(error)}")
    if is_master():
        warn(f"strategy='auto': {cause} The plan is still tried.")
    return replace(plan, failure=None, reasons=(*plan.reasons, f"search: {cause} The plan is still used"))


def constraints_of(request: PlanRequest) -> SearchConstraints:
    """Return the constraints on a plan for the Trainer's loop: the Trainer's settings win, and all processes are data ranks."""
    optimizer = request.torch_optimizer
    own = {SAME_AS_ALGORITHM.get(type(algorithm).__name__) for algorithm in request.state.algorithms}
    excluded = {*_NOT_IN_THE_LOOP, *own}
    precision = None if request.precision is None else parse_precision(request.precision).name
    included = [("amp_native", precision)] if precision in ("bf16", "fp16") else []
    if optimizer is None or optimizer.state:
        excluded |= set(NEED_TORCH_OPTIMIZER)  # it cannot be made again, or would lose its state
    if request.settings.microbatch_size is not None:
        excluded.add("micro_batch")
    if request.outputs_are_read:
        excluded.add("chunked_cross_entropy")  # a model that trains returns no logits then
    return SearchConstraints(
        time_limit=120.0 if request.time_limit is None else request.time_limit,
        numerics="mixed" if precision is None or included else "exact",
        excluded=frozenset(method_names()) & excluded,
        included=tuple(included),
        strict=request.strict,
    )


def make_task(request: PlanRequest) -> tuple[TrainingTask, str | None]:
    """Return the training task, and why it cannot be tried, or None if it can."""
    model, given = request.state.model, request.settings
    dataset, collate, count = _source(request)
    source = request.dataset
    is_foreign = loaders.is_ready_loader(source) and not isinstance(source, DataLoader | loaders.DataLoaderSlice)
    if is_foreign or not (isinstance(dataset, Dataset) or _has_items(dataset)):
        raise ConfigError(
            f"strategy='auto' needs a few samples, but reading them from a {type(source).__name__} would consume them. Give train() a "
            "dataset or a torch DataLoader, or give the plan."
        )
    obstacles = [
        f"the Trainer overrides {name}, which runs only in the Trainer itself" for name in request.overridden_hooks
    ]
    samples = first = None
    try:
        samples = read_samples(dataset, collate, count)
        first = joined(samples)
    except Exception as error:  # the first batch raises it again, unless a sampler leaves those samples out
        obstacles.append(f"the first samples could not be read ({type(error).__name__}: {plain_text(error)})")
        samples = None
    form, settings = None if first is None else request.form_of(first, model), Settings()
    if isinstance(form, WholeForm):
        obstacles.append("the model computes its own loss(outputs, batch), which a trial cannot call")
    if request.torch_optimizer is not None:
        recipe = recipe_of(request.torch_optimizer, model)
        settings = {"optim_func": recipe.build, "optim_args": recipe.settings, "optim_param_func": recipe.groups}
    else:
        obstacles.append(f"the optimizer is a {type(request.optimizer).__name__}, which a trial cannot create again")
    size = _loader_batch_size(request) or (given.per_device_batch_size if count else batch_size_of(None, first))
    task = TrainingTask(
        model=model,
        call=nn.Module.__call__ if form is None else CallByForm(form),
        loss_func=None if form is None or obstacles else LossByForm(form, request.state.loss_fn),
        samples=samples,
        global_batch_size=given.global_batch_size or size * num_data_ranks(),
        loss_graph=request.loss_graph,
        **settings,
    )
    return with_counted_loss(task), next(iter(obstacles), None)


def _source(request: PlanRequest) -> tuple[Any, Callable[..., object] | None, int | None]:
    """Return the training dataset, what makes a batch of its samples, and how many to read: None where each item is a batch."""
    source, collate = request.dataset, request.collate
    if not loaders.is_ready_loader(source):
        return source, collate, NUM_SAMPLES
    count = None if getattr(source, "batch_sampler", source) is None else NUM_SAMPLES
    return getattr(source, "dataset", source), getattr(source, "collate_fn", collate), count


def _loader_batch_size(request: PlanRequest) -> int | None:
    """Return the batch size per process of the training loader, or None without one, or where its batches may have any size."""
    loader = request.dataset if request.loader is None else request.loader
    if not loaders.is_ready_loader(loader):
        return None
    return loaders.batch_size_of_loader(loader) or loaders.batch_size_of_loader(getattr(loader, "batch_sampler", None))


def _has_items(dataset: object) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
