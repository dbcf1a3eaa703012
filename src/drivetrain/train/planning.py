"""`Trainer(strategy=...)`: the plan shapes the trainer's state, by the same code that shapes a hand-written loop's Context.

The Trainer has its own loop, so what concerns the loop is handed to it: the precision becomes the runtime's, micro-batches the
settings'. Model and optimizer are transformed here, before weights are loaded; a second `train()` finds them transformed already and
only puts the DDP shell back.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.context.moving import move_to_device
from drivetrain.core.errors import ConfigError, ConflictError, UnsupportedMethodError
from drivetrain.module.precision import PRECISIONS, Precision, parse_precision
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.ranks import get_num_processes, is_master
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.apply import PlanContext, change_tensors, check_model, shape
from drivetrain.strategy.optimizer_recipe import recipe_of
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.value import Strategy
from drivetrain.train.trainer_search import NEED_TORCH_OPTIMIZER, SAME_AS_ALGORITHM, search_plan

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
    plan = _automatic(trainer) if is_auto else Strategy.load(trainer.strategy)
    world = get_num_processes()
    if plan.mesh is not None and _size(plan) != world:
        plan = plan.rescale(world)
    resolved = resolve_plan(plan, model=model, device=trainer.device, world=world, strict=trainer.strict)
    _check(trainer, resolved)
    optimizer = trainer.optimizer if isinstance(trainer.optimizer, torch.optim.Optimizer) else None
    recipe = None if optimizer is None else recipe_of(optimizer, model)
    ctx = PlanContext(model, resolved, recipe, trainer.loss_func, sample=_sample_runner(trainer))
    ctx.output_position = 0
    shape(ctx)
    if ctx.input_changes:
        unwrap(ctx.model).register_forward_pre_hook(ChangeInputs(ctx.input_changes), with_kwargs=True)
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
    micro = resolved.config("micro_batch")
    if micro is not None and trainer.settings is not None and trainer.settings.microbatch_size is not None:
        raise ConfigError(
            f"train(microbatch_size={trainer.settings.microbatch_size!r}) and the plan's micro_batch both split the batch. Give one of "
            "them."
        )
    for axis, name in (("pipe", "pipeline"), ("tensor", "tensor"), ("sequence", "sequence")):
        if resolved.site.axis(axis) > 1:
            why = (
                "a pipeline runs forward, loss and backward as one schedule, so the Trainer's events and hooks between them cannot happen"
                if axis == "pipe"
                else f"the Trainer counts every process as a data rank, so a {axis!r} axis would weigh gradients wrongly"
            )
            raise UnsupportedMethodError(f"{why}. Use auto_accelerate with a loop of your own for {name} parallelism.")


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
