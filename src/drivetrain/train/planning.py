"""`Trainer(strategy=...)`: the plan is applied to the Trainer's State by the same code as to the Context of a hand-written loop.

The Trainer has its own loop, so everything that concerns the loop is returned to it: precision, gradient scaler, micro-batches.
If ranks share samples (tensor and sequence axes), the loop counts, gathers and draws by data ranks. Model and optimizer are
transformed before weights are loaded. A second `train()` finds them transformed already and only restores the DDP wrapper.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.context.moving import move_to_device
from drivetrain.context.state import State
from drivetrain.core.arguments import naming
from drivetrain.core.errors import (
    ConfigError,
    ConflictError,
    DrivetrainWarning,
    PlanInfeasible,
    StrategyError,
    UnsupportedMethodError,
)
from drivetrain.core.event import Event
from drivetrain.core.types import Settings
from drivetrain.module.precision import PRECISIONS, Precision, parse_precision
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.ranks import data_group, get_num_processes, is_master, num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.apply import Application, apply_to_called_model, check_model
from drivetrain.strategy.dry_run import follow_task, try_plan
from drivetrain.strategy.mesh import mesh_size
from drivetrain.strategy.optimizer_recipe import recipe_of
from drivetrain.strategy.registry import method_names
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.search.constraints import SearchConstraints
from drivetrain.strategy.search.decision import plain_plan
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.process import reject_inside_trial
from drivetrain.strategy.value import Strategy, fingerprint
from drivetrain.train import loaders
from drivetrain.train.auto import read_samples
from drivetrain.train.batches import BatchForm, CallByForm, LossByForm, WholeForm
from drivetrain.train.closures import requires_closure
from drivetrain.train.resuming import ddp_settings
from drivetrain.train.settings import TrainSettings

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


_FILE = "strategy.json"
SAME_AS_ALGORITHM = {"TorchCompile": "native_dynamo", "ChannelsLast": "channels_last", "FP8Linear": "fp8"}
"""Algorithms that do the same as a method; using both is a conflict."""
NEED_TORCH_OPTIMIZER = ("zero1", "zero2", "fsdp", "half", "fused_optimizer", "cpu_offload")
_NOT_IN_THE_LOOP = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")
"""Methods whose plans have fewer data ranks than processes, so that `per_device_batch_size` would be another batch over all of them; a
pipeline cannot run in the Trainer's loop at all."""
_HOOKS = ("calculate_train_batch_loss", "forward", "compute_loss", "backward_step", "optimizer_step")
"""What a trial would have to call to run this Trainer's own step."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What planning needs to know about a Trainer that is about to train."""

    state: State
    """Model, loss and optimizer, which the plan changes."""
    settings: TrainSettings | None
    device: torch.device
    strategy: object = None
    """The plan in any form that `Strategy.load` reads, or "auto"."""
    strict: bool = False
    time_limit: float | None = None
    precision: str | Precision | None = None
    """The requested precision; None: the plan decides."""
    has_scaler: bool = False
    dataset: object = None
    """What `train()` was given: a dataset, or a loader."""
    collate: Callable[..., object] | None = None
    loader: object = None
    """The training loader, where it was made already."""
    find_form: Callable[[object, object, bool], BatchForm]
    outputs_are_read: bool = False
    """Whether anything but the loss function reads the model's outputs in training."""
    has_train_metrics: bool = False
    overridden_hook: str | None = None
    """A hook that a trial would have to call, and that is not the Trainer's own."""
    ddp_settings: Mapping[str, bool] = field(default_factory=dict)
    folder: Path | None = None
    """Where the run's files are; None where it keeps none."""
    writes_files: bool = False
    report: Callable[[str], None] | None = None
    """Prints the progress of the search; None if the Trainer prints nothing."""

    @property
    def optimizer(self) -> object:
        """The optimizer as given, or None."""
        return self.state.optimizers[0] if self.state.optimizers else None

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if a plan can create it again."""
        return self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None


def request_of(trainer: "Trainer") -> PlanRequest:
    """Return what planning needs to know about a Trainer."""
    settings, run = trainer.settings, current_run()
    folder = Path(run.folder) if run is not None else settings.checkpoint_dir if settings is not None else None
    return PlanRequest(
        state=trainer.state,
        settings=settings,
        device=torch.device(trainer.device),
        strategy=trainer.strategy,
        strict=trainer.strict,
        time_limit=trainer.strategy_time_limit,
        precision=trainer.run.shared.options.precision,
        has_scaler=trainer.runtime.scaler is not None,
        dataset=trainer.train_dataset,
        collate=trainer.collate_fn,
        loader=trainer.run.data.train,
        find_form=trainer.run.loss.find_form,
        outputs_are_read=_reads_outputs(trainer),
        has_train_metrics=bool(trainer.run.measures.train_metrics),
        overridden_hook=next((name for name in _HOOKS if trainer.overrides(name)), None),
        ddp_settings=ddp_settings(trainer),
        folder=None if folder is None else Path(folder),
        writes_files=trainer.writes_files,
        report=trainer.print if len(trainer.callback_handler) else None,
    )


def apply_strategy(trainer: "Trainer") -> None:
    """Apply the trainer's plan to its State; without a plan, do nothing."""
    if trainer.strategy is None:
        return
    run = trainer.run
    shell = run.shared.planned_model
    if shell is not None and unwrap(shell) is unwrap(trainer.model):
        trainer.model = shell  # an earlier run applied the plan and took the shell off at its end
        return
    trainer.plan, app = apply_to_state(request_of(trainer))
    loaders.keep_data_ranks(run.shared)
    if num_data_ranks() != get_num_processes():  # other ranks hold the same samples
        run.measures.eval_metrics.join(data_group())
        run.measures.train_metrics.join(data_group())
    run.shared.planned_model = trainer.model
    run.loss.form = None  # how a batch is passed to the model depends on the loss function
    runtime, autocast = trainer.runtime, app.autocast_dtype
    precision = next((p for p in PRECISIONS.values() if p.autocast_dtype is autocast), None) if autocast else None
    if precision is not None:
        runtime.precision = precision
    if app.scaler_dtype is not None:  # the plan decides whether gradients are scaled
        scaled = Precision(name="plan", autocast_dtype=app.scaler_dtype)
        runtime.scaler = scaled.make_scaler(torch.device(trainer.device))
    microbatch_size = _microbatch_size(app.plan, run.settings)
    if microbatch_size is not None and run.settings is not None:
        run.settings = replace(run.settings, microbatch_size=microbatch_size)


def apply_to_state(request: PlanRequest) -> tuple[Strategy, Application]:
    """Find or read the plan, check it against the loop, and apply it to the State. Return the applied plan."""
    model = request.state.model
    check_model(model, "Trainer(strategy=)")
    is_auto = isinstance(request.strategy, str) and request.strategy == "auto"
    plan = _plan_of(request, is_auto)
    world = get_num_processes()
    if plan.mesh is not None and mesh_size(plan.mesh) != world:
        plan = plan.rescale(world)
    try:
        resolved = resolve_plan(plan, model=model, device=request.device, world=world, strict=request.strict)
        _check(request, resolved)
    except StrategyError as error:
        if not is_auto or request.strict:
            raise
        plan = plain_plan(str(error), plan)
        resolved = resolve_plan(plan, model=model, device=request.device, world=world)
    tried = () if is_auto else _verify(request, plan, resolved)
    optimizer = request.torch_optimizer
    recipe = None if optimizer is None else recipe_of(optimizer, model)
    app = Application(request.state, resolved, recipe, sample=_sample_runner(request))
    app.output_position, app.outputs_are_read = 0, request.outputs_are_read
    app.ddp_settings.update(request.ddp_settings)
    apply_to_called_model(app)
    plan = replace(
        plan,
        mesh=resolved.axes[::-1],
        reasons=tuple(dict.fromkeys((*plan.reasons, *tried, *resolved.reasons, *app.notes))),
        dropped=resolved.dropped,
    )
    if request.folder is not None and request.writes_files and is_master():
        plan.save(request.folder / _FILE)
    return plan, app


def _plan_of(request: PlanRequest, is_auto: bool) -> Strategy:
    """Return the plan that was given, that of the run which is resumed, or the best one that a search finds."""
    if not is_auto:
        with naming("strategy", request.strategy):
            return Strategy.load(request.strategy)
    kept = None if request.folder is None else request.folder / _FILE
    if (
        request.settings is not None
        and request.settings.resume_from is not None
        and kept is not None
        and kept.is_file()
    ):
        return Strategy.load(kept)
    return search_plan(request)


def _verify(request: PlanRequest, plan: Strategy, resolved: ResolvedPlan) -> tuple[str, ...]:
    """Compare one step of the plan with one of the plain model on copies, parameter by parameter; return what was found."""
    try:
        task, obstacle = make_task(request)
    except ConfigError as error:
        return (f"dry run: skipped, because {error}",)
    if obstacle is not None:
        return (f"dry run: skipped, because {obstacle}",)
    micro, accumulation = resolved.batch_split
    parts = resolved.data_ranks * (accumulation or 1)
    rows = micro or max(1, task.global_batch_size // parts)
    outcome = try_plan(plan, replace(task, global_batch_size=parts * rows), device=request.device)
    if outcome.failure is not None:
        raise PlanInfeasible(f"the plan failed its trial ({outcome.failure.kind}): {outcome.failure.message}")
    return outcome.notes


def _sample_runner(request: PlanRequest) -> Callable[[nn.Module], object] | None:
    """Return what calls a model with a few samples of the training data, or None where they cannot be had without a loader's help."""
    source = request.dataset
    dataset: Any = getattr(source, "dataset", source)
    collate = getattr(source, "collate_fn", request.collate)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None

    def run(model: nn.Module) -> object:
        random_state, mode = capture_rng(), model.training
        batch = next(iter(DataLoader(dataset, batch_size=min(8, len(dataset)), collate_fn=collate)))
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        batch = move_to_device(device, batch)
        args, kwargs = request.find_form(batch, model, request.state.loss_fn is not None).arguments(batch)
        model.eval()
        try:
            with torch.no_grad():
                return model(*args, **kwargs)
        finally:
            model.train(mode)
            restore_rng(random_state)

    return run


def _check(request: PlanRequest, resolved: ResolvedPlan) -> None:
    """Reject what contradicts the Trainer's settings, or what it cannot do."""
    names = {method.name for _, method, _ in resolved.steps}
    for algorithm in request.state.algorithms:
        same = SAME_AS_ALGORITHM.get(type(algorithm).__name__)
        if same in names:
            raise ConflictError(
                f"the algorithm {type(algorithm).__name__} and the method {same} of the plan do the same. Remove one of them."
            )
    if request.precision is not None and names & {"amp_native", "half", "fp8"}:
        wanted = parse_precision(request.precision)
        amp = resolved.config("amp_native")
        asked = None if amp is None else {"bfloat16": "bf16", "float16": "fp16"}.get(amp.dtype)
        if wanted.name != asked:
            raise ConfigError(
                f"Trainer(precision={wanted.name!r}) and the plan's {', '.join(sorted(names & {'amp_native', 'half', 'fp8'}))} differ. "
                "Give one of them."
            )
    if request.torch_optimizer is None and names & set(NEED_TORCH_OPTIMIZER):
        raise ConfigError(
            f"{', '.join(sorted(names & set(NEED_TORCH_OPTIMIZER)))}: these methods need a torch optimizer, but the Trainer has a "
            f"{type(request.optimizer).__name__}."
        )
    if "chunked_cross_entropy" in names and request.has_train_metrics:
        raise ConflictError(
            "train_metrics need the model's outputs, but with chunked_cross_entropy the model returns the input of its last layer in "
            "training. Remove one of them; metrics= in evaluations works."
        )
    micro = resolved.config("micro_batch")
    if micro is not None and request.settings is not None and request.settings.microbatch_size is not None:
        raise ConfigError(
            f"train(microbatch_size={request.settings.microbatch_size!r}) and the plan's micro_batch both split the batch. Give one of "
            "them."
        )
    if request.settings is not None:
        check_graphs(names, request.settings, splits=micro is not None)
    if resolved.site.axis("pipe") > 1:
        raise UnsupportedMethodError(
            "a pipeline runs forward, loss and backward as one schedule, so the Trainer cannot run its events and hooks between them. "
            "Use auto_accelerate with your own loop for pipeline parallelism."
        )
    if resolved.site.axis("tensor") > 1 or resolved.site.axis("sequence") > 1:
        _check_shared_samples(request, resolved)


def check_graphs(names: set[str], settings: TrainSettings, splits: bool) -> None:
    """Raise for CUDA graphs with accumulation: the next replay would overwrite gradients that are still needed."""
    accumulates = settings.gradient_accumulation_steps > 1 or settings.microbatch_size is not None or splits
    if "cuda_graphs" in names and accumulates:
        raise UnsupportedMethodError(
            "cuda_graphs with gradient accumulation gives wrong gradients in the Trainer: a recorded backward pass "
            "overwrites the gradients of the previous "
            "one. Remove cuda_graphs, or the accumulation and micro-batches."
        )


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
            f"a tensor or sequence axis needs a torch optimizer, but the Trainer has a {type(request.optimizer).__name__}, whose units "
            "average gradients over all processes. Use one torch optimizer, or a data axis."
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


def _microbatch_size(resolved: ResolvedPlan, settings: TrainSettings | None) -> int | None:
    """Return the rows of a micro-batch that the plan requires, or None."""
    size, accumulation = resolved.batch_split
    if settings is None or not (size or accumulation):
        return None
    rows = settings.per_device_batch_size
    if settings.global_batch_size is not None:
        rows = settings.global_batch_size // resolved.data_ranks
    return size if size is not None else max(1, -(-rows // (accumulation or 1)))


# ---------------------------------------------------------------------- strategy="auto"
# The Trainer's training as a value that a search can try. A trial runs in another process, where there is no Trainer. What the default
# hooks do with a batch is a pure function of its form and the loss function, and travels; hooks that a user overrides may do anything, so
# nothing is tried then, and the plan records it.


def search_plan(request: PlanRequest) -> Strategy:
    """Return the best plan for the coming training run. Model, loader and random states of the Trainer do not change.

    A search that fails does not end a training, unless `strict`: the plan is then the one that needs the least memory, where none fits by
    prediction, else one that changes nothing.
    """
    reject_inside_trial("Trainer(strategy='auto')")
    constraints = constraints_of(request)
    task, obstacle = make_task(request)
    if request.strict:
        return _searched(request, task, obstacle, constraints).require_success()
    try:
        plan = _searched(request, task, obstacle, constraints)
        if plan.failure is None:
            return plan
        nearest, cause = plan.failure.nearest, plan.failure.message
        if isinstance(nearest, Strategy):
            nearest.validate(request.state.model, request.device, get_num_processes())
            if is_master():
                warnings.warn(f"strategy='auto': {cause} The plan is still tried.", DrivetrainWarning, stacklevel=2)
            return replace(plan, failure=None, reasons=(*plan.reasons, f"search: {cause} The plan is still used"))
        return plain_plan(cause, plan)
    except Exception as error:  # whatever goes wrong in a search, the training does not need it
        return plain_plan(f"{type(error).__name__}: {error}")


def _searched(
    request: PlanRequest, task: TrainingTask, obstacle: str | None, constraints: SearchConstraints
) -> Strategy:
    from drivetrain.strategy.search.find import find_plan

    world = get_num_processes()
    plan = find_plan(task, device=request.device, world=world, constraints=constraints, on_progress=request.report)
    mark = fingerprint(request.state.model, request.device, world, task.global_batch_size)
    notes = [] if obstacle is None else [f"search: no plan was tried, because {obstacle}"]
    if request.state.algorithms:
        notes.append("search: plans were compared without the Trainer's algorithms")
    return replace(plan, fingerprint=mark, reasons=(*plan.reasons, *notes))


def constraints_of(request: PlanRequest) -> SearchConstraints:
    """Return the constraints on a plan for the Trainer's loop: the Trainer's settings win, and all processes are data ranks."""
    excluded, included = set(_NOT_IN_THE_LOOP), []
    for algorithm in request.state.algorithms:
        if (same := SAME_AS_ALGORITHM.get(type(algorithm).__name__)) is not None:
            excluded.add(same)
    numerics = "mixed"
    if request.precision is not None:
        name = parse_precision(request.precision).name
        included += [("amp_native", name)] if name in ("bf16", "fp16") else []
        numerics = "mixed" if included else "exact"
    optimizer = request.torch_optimizer
    if optimizer is None or optimizer.state:
        excluded |= set(NEED_TORCH_OPTIMIZER)  # it cannot be made again, or would lose its state
    if request.settings is not None and request.settings.microbatch_size is not None:
        excluded.add("micro_batch")
    if request.outputs_are_read:
        excluded.add("chunked_cross_entropy")  # a model that trains returns no logits then
    return SearchConstraints(
        time_limit=120.0 if request.time_limit is None else request.time_limit,
        numerics=numerics,
        excluded=frozenset(excluded & set(method_names())),
        included=tuple(included),
        strict=request.strict,
    )


def _reads_outputs(trainer: "Trainer") -> bool:
    engine = trainer.engine
    return (
        bool(trainer.run.measures.train_metrics)
        or any(engine.listens(event) for event in (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.STEP_OUTPUT))
        or engine.has_algorithm_for(Event.AFTER_LOSS)
        or any(trainer.overrides(name) for name in ("forward", "compute_loss", "calculate_train_batch_loss"))
    )


def make_task(request: PlanRequest) -> tuple[TrainingTask, str | None]:
    """Return the training task, and why it cannot be tried, or None if it can."""
    samples, model, loss_func = _samples(request), request.state.model, request.state.loss_fn
    obstacle = None
    if request.overridden_hook is not None:
        obstacle = f"the Trainer overrides {request.overridden_hook}, which runs only in the Trainer itself"
    form = request.find_form(samples, model, loss_func is not None)
    if obstacle is None and isinstance(form, WholeForm):
        obstacle = "the model computes its own loss(outputs, batch), which a trial cannot call"
    settings: Settings = {}
    if request.torch_optimizer is not None:
        recipe = recipe_of(request.torch_optimizer, model)
        settings = {"optim_func": recipe.build, "optim_args": recipe.settings, "optim_param_func": recipe.groups}
    elif obstacle is None:
        obstacle = f"the optimizer is a {type(request.optimizer).__name__}, which a trial cannot create again"
    task = TrainingTask(
        model=model,
        call=CallByForm(form),
        loss_func=None if obstacle is not None else LossByForm(form, loss_func),
        samples=samples,
        global_batch_size=_global_batch(request),
        **settings,
    )
    return follow_task(task), obstacle


def _global_batch(request: PlanRequest) -> int:
    """Return how many samples all processes take in one pass of the loop."""
    settings = request.settings
    if settings is not None and settings.global_batch_size is not None:
        return settings.global_batch_size
    size = getattr(request.loader, "batch_size", None) or (settings or TrainSettings()).per_device_batch_size
    return size * num_data_ranks()


def _samples(request: PlanRequest) -> object:
    """Return a few samples of the training data without touching the loader; random states stay as they are."""
    source = request.dataset
    dataset, collate = (
        (source.dataset, source.collate_fn) if isinstance(source, DataLoader) else (source, request.collate)
    )
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"strategy='auto' needs a few samples, but reading them from a {type(dataset).__name__} would consume them. Give train() a "
            "dataset or a torch DataLoader, or give the plan."
        )
    random_state = capture_rng()
    try:
        return read_samples(dataset, collate)
    finally:
        restore_rng(random_state)
