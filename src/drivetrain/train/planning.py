"""`Trainer(strategy=...)`: the plan shapes the trainer's state, by the same code that shapes a hand-written loop's Context.

The Trainer has its own loop, so what concerns the loop is handed to it: the precision becomes the runtime's, micro-batches the
settings'. Where ranks share samples (tensor and sequence axes) the loop counts, gathers and draws by data ranks. Model and optimizer are
transformed here, before weights are loaded; a second `train()` finds them transformed already and only puts the DDP shell back.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.context.moving import move_to_device
from drivetrain.core.arguments import naming
from drivetrain.core.errors import ConfigError, ConflictError, UnsupportedMethodError
from drivetrain.module.precision import PRECISIONS, Precision, parse_precision
from drivetrain.module.wrappers import is_fully_sharded
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.ranks import data_group, get_num_processes, is_master, num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.apply import PlanContext, change_tensors, check_model, shape
from drivetrain.strategy.optimizer_recipe import recipe_of
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.value import Strategy
from drivetrain.train import loaders
from drivetrain.train.closures import requires_closure
from drivetrain.train.metrics import _is_torchmetrics
from drivetrain.train.resuming import ddp_settings
from drivetrain.train.trainer_search import NEED_TORCH_OPTIMIZER, SAME_AS_ALGORITHM, looks_at_outputs, search_plan

_FILE = "strategy.json"


def apply_strategy(trainer: Any) -> None:
    """Apply the trainer's plan to its model and optimizer; without a plan, do nothing."""
    if trainer.strategy is None:
        return
    shell = getattr(trainer, "_planned_model", None)
    if shell is not None and unwrap(shell) is unwrap(trainer.model):
        trainer.model = shell  # an earlier run applied the plan and took the shell off at its end
        return
    model = trainer.model
    check_model(model, "Trainer(strategy=)")
    is_auto = isinstance(trainer.strategy, str) and trainer.strategy == "auto"
    plan = _automatic(trainer) if is_auto else _given_plan(trainer.strategy)
    world = get_num_processes()
    if plan.mesh is not None and _size(plan) != world:
        plan = plan.rescale(world)
    resolved = resolve_plan(plan, model=model, device=trainer.device, world=world, strict=trainer.strict)
    _check(trainer, resolved)
    optimizer = trainer.optimizer if isinstance(trainer.optimizer, torch.optim.Optimizer) else None
    recipe = None if optimizer is None else recipe_of(optimizer, model)
    # Without a loss function to tell it about, a found tensor plan leaves the head whole, and the outputs are what guests expect.
    has_split_head = resolved.site.axis("tensor") > 1 and not looks_at_outputs(trainer)
    loss_func = trainer.loss_func if has_split_head or resolved.site.axis("tensor") == 1 else None
    ctx = PlanContext(model, resolved, recipe, loss_func, sample=_sample_runner(trainer))
    ctx.output_position = 0
    ctx.ddp_settings.update(ddp_settings(trainer))
    shape(ctx)
    loaders.keep_data_ranks(trainer)
    _join_metrics(trainer)
    if ctx.input_changes:
        unwrap(ctx.model).register_forward_pre_hook(ChangeInputs(ctx.input_changes), with_kwargs=True)
    if is_fully_sharded(ctx.model):
        ctx.model.register_forward_hook(_reshard)
    trainer.model = trainer._planned_model = ctx.model
    if optimizer is not None:
        trainer.optimizer = ctx.optimizer
    if trainer.loss_func is not None:
        for change in ctx.loss_changes:
            trainer.loss_func = change(trainer.loss_func)
    _hand_over(trainer, ctx)
    trainer.plan = replace(
        plan,
        mesh=resolved.axes[::-1],
        reasons=tuple(dict.fromkeys((*plan.reasons, *resolved.reasons, *ctx.notes))),
        dropped=resolved.dropped,
    )
    _keep(trainer)


def _given_plan(strategy: Any) -> Strategy:
    with naming("strategy", strategy):
        return Strategy.load(strategy)


def _automatic(trainer: Any) -> Strategy:
    """Return the plan of the run that is resumed, or find one."""
    folder = _folder(trainer)
    if trainer.settings is not None and trainer.settings.resume_from is not None and folder is not None:
        kept = Path(folder) / _FILE
        if kept.is_file():
            return Strategy.load(kept)
    return search_plan(trainer)


def _sample_runner(trainer: Any) -> Callable[[nn.Module], Any] | None:
    """Return what calls a model with a few samples of the training data, or None where they cannot be had without a loader's help."""
    source = trainer.train_dataset
    dataset, collate = getattr(source, "dataset", source), getattr(source, "collate_fn", trainer.collate_fn)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None

    def run(model: nn.Module) -> Any:
        random_state, mode = capture_rng(), model.training
        batch = next(iter(DataLoader(dataset, batch_size=min(8, len(dataset)), collate_fn=collate)))
        place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        batch = move_to_device(place, batch)
        args, kwargs = trainer._find_form(batch, model, trainer.loss_func is not None).arguments(batch)
        model.eval()
        try:
            with torch.no_grad():
                return model(*args, **kwargs)
        finally:
            model.train(mode)
            restore_rng(random_state)

    return run


class ChangeInputs:
    """Changes the tensors that a model is called with."""

    def __init__(self, changes: list[Any]):
        self.changes = changes

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return change_tensors(args, self.changes), change_tensors(kwargs, self.changes)


def _reshard(model: nn.Module, args: Any, outputs: Any) -> None:
    """Let go of gathered parameters when no backward will: the optimizer, the next run and a checkpoint look for the sharded ones."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]


def _check(trainer: Any, resolved: ResolvedPlan) -> None:
    """Refuse what the Trainer says otherwise, or cannot do."""
    names = {method.name for _, method, _ in resolved.steps}
    for algorithm in trainer._algorithms:
        same = SAME_AS_ALGORITHM.get(type(algorithm).__name__)
        if same in names:
            raise ConflictError(
                f"the algorithm {type(algorithm).__name__} and the method {same} of the plan do the same. Leave one of them out."
            )
    if trainer._requested_precision is not None and names & {"amp_native", "half", "fp8"}:
        wanted = parse_precision(trainer._requested_precision)
        amp = resolved.config("amp_native")
        asked = None if amp is None else {"bfloat16": "bf16", "float16": "fp16"}.get(amp.dtype)
        if wanted.name != asked:
            raise ConfigError(
                f"Trainer(precision={wanted.name!r}) and the plan's {', '.join(sorted(names & {'amp_native', 'half', 'fp8'}))} differ. "
                "Give one of them."
            )
    if not isinstance(trainer.optimizer, torch.optim.Optimizer) and names & set(NEED_TORCH_OPTIMIZER):
        raise ConfigError(
            f"{', '.join(sorted(names & set(NEED_TORCH_OPTIMIZER)))}: these methods need a torch optimizer, and the Trainer has a "
            f"{type(trainer.optimizer).__name__}."
        )
    if "chunked_cross_entropy" in names and trainer._has_train_metrics:
        raise ConflictError(
            "train_metrics compare the model's outputs, and with chunked_cross_entropy a model that trains returns what its last layer is "
            "given. Leave one of them out; metrics= of evaluations work."
        )
    micro = resolved.config("micro_batch")
    if micro is not None and trainer.settings is not None and trainer.settings.microbatch_size is not None:
        raise ConfigError(
            f"train(microbatch_size={trainer.settings.microbatch_size!r}) and the plan's micro_batch both split the batch. Give one of "
            "them."
        )
    if trainer.settings is not None:
        check_graphs(names, trainer.settings, splits=micro is not None)
    if resolved.site.axis("pipe") > 1:
        raise UnsupportedMethodError(
            "a pipeline runs forward, loss and backward as one schedule, so the Trainer's events and hooks between them cannot happen. Use "
            "auto_accelerate with a loop of your own for pipeline parallelism."
        )
    if resolved.site.axis("tensor") > 1 or resolved.site.axis("sequence") > 1:
        _check_shared_samples(trainer, resolved)


def check_graphs(names: set[str], settings: Any, splits: bool) -> None:
    """Refuse recorded kernels with accumulation: the next recording would write over gradients that are still to be added to."""
    accumulates = settings.gradient_accumulation_steps > 1 or settings.microbatch_size is not None or splits
    if "cuda_graphs" in names and accumulates:
        raise UnsupportedMethodError(
            "cuda_graphs with accumulated gradients is not right in the Trainer: a recorded backward pass writes over the gradients of the "
            "one before. Leave out cuda_graphs, or the accumulation and micro-batches."
        )


def _check_shared_samples(trainer: Any, resolved: ResolvedPlan) -> None:
    """Refuse what would go wrong where several ranks work on the same samples."""
    sequence, optimizer, runtime = resolved.config("sequence_parallel"), trainer.optimizer, trainer._accelerator
    if sequence is not None and sequence.batch_sp_processing_fn is not None:
        raise UnsupportedMethodError(
            "sequence_parallel: batch_sp_processing_fn gives each rank a part of the batch, and the Trainer's hooks, losses and metrics "
            "see whole batches. Leave it out, so that the blocks run on pieces, or use auto_accelerate with a loop of your own."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedMethodError(
            f"a tensor or sequence axis needs a torch optimizer, and the Trainer has a {type(optimizer).__name__}, whose units average "
            "gradients over all processes. Use one torch optimizer, or a data axis."
        )
    if resolved.site.axis("tensor") == 1:
        return
    dtypes = [
        m.chosen_dtype(config, resolved.site.device) for _, m, config in resolved.steps if hasattr(m, "chosen_dtype")
    ]
    if runtime.scaler is not None or torch.float16 in dtypes:
        raise UnsupportedMethodError(
            "float16 with scaled gradients is not supported with a tensor axis: an overflow on one rank must be seen by all. Use bf16."
        )
    if requires_closure(optimizer) or getattr(optimizer, "needs_closure", False):
        raise UnsupportedMethodError(
            f"{type(optimizer).__name__} evaluates the loss more than once and treats all parameters as one vector, which those of a "
            "tensor axis, whole and in parts, are not. Use another optimizer, or a data axis."
        )
    tensor = resolved.config("tensor_parallel")
    if tensor is not None and tensor.loss_parallel is True and looks_at_outputs(trainer):
        raise UnsupportedMethodError(
            "tensor_parallel: with loss_parallel=True the outputs in training are split over ranks, and train_metrics, an algorithm, a "
            "callback or an overridden hook looks at them. Leave loss_parallel out."
        )


def _join_metrics(trainer: Any) -> None:
    """Let metrics of torchmetrics join the data ranks only, where other ranks hold the same samples."""
    if num_data_ranks() == get_num_processes():
        return
    for metrics in (trainer._eval_metrics, trainer._train_metrics):
        for metric in metrics._stateful.values():
            for single in metric.values() if _is_torchmetrics(metric, "MetricCollection") else [metric]:
                single.process_group = data_group()


def _hand_over(trainer: Any, ctx: PlanContext) -> None:
    """Tell the loop about precision and micro-batches."""
    runtime, resolved = trainer._accelerator, ctx.plan
    if ctx.autocast_dtype is not None:
        runtime.precision = next(p for p in PRECISIONS.values() if p.autocast_dtype is ctx.autocast_dtype)
    if ctx.scaler_dtype is not None:
        runtime.scaler = Precision(name="plan", autocast_dtype=ctx.scaler_dtype).make_scaler(
            torch.device(trainer.device)
        )
    micro = resolved.config("micro_batch")
    if micro is not None and trainer.settings is not None and (micro.size or micro.accumulation):
        settings = trainer.settings
        ranks = resolved.data_ranks
        rows = settings.per_device_batch_size
        if settings.global_batch_size is not None:
            rows = settings.global_batch_size // ranks
        size = micro.size if micro.size is not None else max(1, -(-rows // micro.accumulation))
        trainer.settings = replace(settings, microbatch_size=size)


def _keep(trainer: Any) -> None:
    """Write the plan beside the run's other files."""
    folder = _folder(trainer)
    if folder is not None and trainer.writes_files and is_master():
        trainer.plan.save(Path(folder) / _FILE)


def _folder(trainer: Any) -> Any:
    """Return where the run's files are, None where it keeps none."""
    run = current_run()
    return Path(run.folder) if run is not None else trainer.settings.checkpoint_dir if trainer.settings else None


def _size(plan: Strategy) -> int:
    size = 1
    for _, axis in plan.mesh:
        size *= axis
    return size
