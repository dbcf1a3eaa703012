"""`Trainer(strategy=...)`: the plan is applied to the Trainer's State by the same code as to a hand-written loop's Context.

The Trainer has its own loop, so what concerns the loop is returned to it: precision, gradient scaler, micro-batches. Where ranks share
samples (tensor and sequence axes) the loop counts, gathers and draws by data ranks. Model and optimizer are transformed before weights are
loaded; a second `train()` finds them transformed already and only restores the DDP shell.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.context.moving import move_to_device
from drivetrain.core.arguments import naming
from drivetrain.core.errors import ConfigError, ConflictError, PlanInfeasible, StrategyError, UnsupportedMethodError
from drivetrain.module.precision import PRECISIONS, Precision, parse_precision
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.ranks import data_group, get_num_processes, is_master, num_data_ranks
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.apply import Application, apply_to_called_model, check_model
from drivetrain.strategy.dry_run import try_plan
from drivetrain.strategy.mesh import mesh_size
from drivetrain.strategy.optimizer_recipe import recipe_of
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.search.decision import plain_plan
from drivetrain.strategy.value import Strategy
from drivetrain.train import loaders
from drivetrain.train.closures import requires_closure
from drivetrain.train.settings import TrainSettings
from drivetrain.train.trainer_search import (
    NEED_TORCH_OPTIMIZER,
    SAME_AS_ALGORITHM,
    PlanRequest,
    make_task,
    request_of,
    search_plan,
)

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer

_FILE = "strategy.json"


@dataclass(frozen=True, kw_only=True)
class PlannedLoop:
    """What a plan asks of the Trainer's loop, beyond what it did to the State."""

    plan: Strategy
    """The plan as it was applied."""
    precision: Precision | None = None
    scaler_dtype: torch.dtype | None = None
    """What gradients are computed in, where the plan decides whether they are scaled."""
    microbatch_size: int | None = None


def apply_strategy(trainer: "Trainer") -> None:
    """Apply the trainer's plan to its State; without a plan, do nothing."""
    if trainer.strategy is None:
        return
    run = trainer.run
    shell = run.shared.planned_model
    if shell is not None and unwrap(shell) is unwrap(trainer.model):
        trainer.model = shell  # an earlier run applied the plan and took the shell off at its end
        return
    planned = apply_to_state(request_of(trainer))
    loaders.keep_data_ranks(run.shared)
    if num_data_ranks() != get_num_processes():  # other ranks hold the same samples
        run.measures.eval_metrics.join(data_group())
        run.measures.train_metrics.join(data_group())
    run.shared.planned_model, trainer.plan = trainer.model, planned.plan
    trainer.run.loss.form = None  # how a batch is passed to the model depends on the loss function
    runtime = trainer.runtime
    if planned.precision is not None:
        runtime.precision = planned.precision
    if planned.scaler_dtype is not None:
        scaled = Precision(name="plan", autocast_dtype=planned.scaler_dtype)
        runtime.scaler = scaled.make_scaler(torch.device(trainer.device))
    settings = trainer.run.settings
    if planned.microbatch_size is not None and settings is not None:
        trainer.run.settings = replace(settings, microbatch_size=planned.microbatch_size)


def apply_to_state(request: PlanRequest) -> PlannedLoop:
    """Find or read the plan, check it against the loop, and apply it to the State."""
    model = request.state.model
    check_model(model, "Trainer(strategy=)")
    is_auto = isinstance(request.strategy, str) and request.strategy == "auto"
    plan = _automatic(request) if is_auto else _given_plan(request.strategy)
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
    autocast = app.autocast_dtype
    plan = replace(
        plan,
        mesh=resolved.axes[::-1],
        reasons=tuple(dict.fromkeys((*plan.reasons, *tried, *resolved.reasons, *app.notes))),
        dropped=resolved.dropped,
    )
    if request.folder is not None and request.writes_files and is_master():
        plan.save(request.folder / _FILE)
    return PlannedLoop(
        plan=plan,
        precision=next((p for p in PRECISIONS.values() if p.autocast_dtype is autocast), None) if autocast else None,
        scaler_dtype=app.scaler_dtype,
        microbatch_size=_microbatch_size(resolved, request.settings),
    )


def _given_plan(strategy: object) -> Strategy:
    with naming("strategy", strategy):
        return Strategy.load(strategy)


def _automatic(request: PlanRequest) -> Strategy:
    """Return the plan of the run that is resumed, or find one."""
    if request.settings is not None and request.settings.resume_from is not None and request.folder is not None:
        kept = request.folder / _FILE
        if kept.is_file():
            return Strategy.load(kept)
    return search_plan(request)


def _verify(request: PlanRequest, plan: Strategy, resolved: ResolvedPlan) -> tuple[str, ...]:
    """Compare one step of the plan with one of the plain model on copies, parameter by parameter; return what was found."""
    try:
        task, obstacle = make_task(request)
    except ConfigError as error:
        return (f"dry run: left out, because {error}",)
    if obstacle is not None:
        return (f"dry run: left out, because {obstacle}",)
    micro, accumulation = resolved.batch_split
    rows = resolved.data_ranks * (micro or 1) * (accumulation or 1)
    outcome = try_plan(plan, replace(task, global_batch_size=rows), device=request.device)
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
    for algorithm in request.algorithms:
        same = SAME_AS_ALGORITHM.get(type(algorithm).__name__)
        if same in names:
            raise ConflictError(
                f"the algorithm {type(algorithm).__name__} and the method {same} of the plan do the same. Leave one of them out."
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
            f"{', '.join(sorted(names & set(NEED_TORCH_OPTIMIZER)))}: these methods need a torch optimizer, and the Trainer has a "
            f"{type(request.optimizer).__name__}."
        )
    if "chunked_cross_entropy" in names and request.has_train_metrics:
        raise ConflictError(
            "train_metrics compare the model's outputs, and with chunked_cross_entropy a model that trains returns what its last layer is "
            "given. Leave one of them out; metrics= of evaluations work."
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
            "a pipeline runs forward, loss and backward as one schedule, so the Trainer's events and hooks between them cannot happen. Use "
            "auto_accelerate with a loop of your own for pipeline parallelism."
        )
    if resolved.site.axis("tensor") > 1 or resolved.site.axis("sequence") > 1:
        _check_shared_samples(request, resolved)


def check_graphs(names: set[str], settings: TrainSettings, splits: bool) -> None:
    """Reject recorded kernels with accumulation: the next recording would write over gradients that are still to be added to."""
    accumulates = settings.gradient_accumulation_steps > 1 or settings.microbatch_size is not None or splits
    if "cuda_graphs" in names and accumulates:
        raise UnsupportedMethodError(
            "cuda_graphs with accumulated gradients is not right in the Trainer: a recorded backward pass writes over the gradients of the "
            "one before. Leave out cuda_graphs, or the accumulation and micro-batches."
        )


def _check_shared_samples(request: PlanRequest, resolved: ResolvedPlan) -> None:
    """Reject what would go wrong where several ranks work on the same samples."""
    sequence, optimizer = resolved.config("sequence_parallel"), request.torch_optimizer
    if sequence is not None and sequence.batch_sp_processing_fn is not None:
        raise UnsupportedMethodError(
            "sequence_parallel: batch_sp_processing_fn gives each rank a part of the batch, and the Trainer's hooks, losses and metrics "
            "see whole batches. Leave it out, so that the blocks run on pieces, or use auto_accelerate with a loop of your own."
        )
    if optimizer is None:
        raise UnsupportedMethodError(
            f"a tensor or sequence axis needs a torch optimizer, and the Trainer has a {type(request.optimizer).__name__}, whose units "
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
            f"{type(optimizer).__name__} evaluates the loss more than once and treats all parameters as one vector, which those of a "
            "tensor axis, whole and in parts, are not. Use another optimizer, or a data axis."
        )
    tensor = resolved.config("tensor_parallel")
    if tensor is not None and tensor.loss_parallel is True and request.outputs_are_read:
        raise UnsupportedMethodError(
            "tensor_parallel: with loss_parallel=True the outputs in training are split over ranks, and train_metrics, an algorithm, a "
            "callback or an overridden hook looks at them. Leave loss_parallel out."
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
