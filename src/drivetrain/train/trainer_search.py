"""`Trainer(strategy="auto")`: the Trainer's training as a value that a search can try, and what a plan for its loop may hold.

A trial runs in another process, where there is no Trainer. What the default hooks do with a batch is a pure function of its form and the
loss function, and travels; hooks that somebody overrides may do anything, so nothing is tried then, and the plan says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.core.errors import ConfigError, PlanInfeasible
from drivetrain.core.event import Event
from drivetrain.module.precision import parse_precision
from drivetrain.runtime.ranks import get_num_processes, num_data_ranks
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.fingerprint import fingerprint
from drivetrain.strategy.optimizer_recipe import recipe_of
from drivetrain.strategy.registry import method_names
from drivetrain.strategy.search.wishes import Wishes
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.nesting import refuse_inside_trial
from drivetrain.strategy.value import Strategy
from drivetrain.train.auto import read_samples
from drivetrain.train.batches import BatchForm, WholeForm, carried_loss
from drivetrain.train.setup import is_overridden

SAME_AS_ALGORITHM = {"TorchCompile": "native_dynamo", "ChannelsLast": "channels_last", "FP8Linear": "fp8"}
"""Algorithms that do what a method does; asking for both is a conflict."""
NEED_TORCH_OPTIMIZER = ("zero1", "zero2", "fsdp", "half", "fused_optimizer", "cpu_offload")
_NOT_IN_THE_LOOP = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")
"""Methods whose plans have fewer data ranks than processes, so that `per_device_batch_size` would be another batch over all of them; a
pipeline cannot run in the Trainer's loop at all."""
_HOOKS = (
    "calculate_train_batch_loss", "forward", "compute_loss", "backward_step", "optimizer_step", "_find_form",
)  # fmt: skip
"""What a trial would have to call to run this Trainer's own step."""


@dataclass(frozen=True)
class CallByForm:
    """Calls a model with a batch as the Trainer does."""

    form: BatchForm

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        args, kwargs = self.form.arguments(batch)
        return model(*args, **kwargs)


@dataclass(frozen=True)
class LossByForm:
    """The Trainer's loss as a function of batch and output; without a loss function it is what the output carries."""

    form: BatchForm
    loss_func: Any = None

    def __call__(self, batch: Any, outputs: Any) -> Any:
        if self.loss_func is None:
            return carried_loss(outputs)
        loss = self.loss_func(self.form.predictions(outputs), self.form.targets(batch))
        if isinstance(loss, Mapping):
            return loss["loss"] if "loss" in loss else sum(loss.values())
        return loss


def search_plan(trainer: Any) -> Strategy:
    """Return the best plan for what the Trainer is about to do; its model, loader and random states stay as they are."""
    from drivetrain.strategy.search.find import find_plan

    refuse_inside_trial("Trainer(strategy='auto')")
    task, obstacle = make_task(trainer)
    device = torch.device(trainer.device)
    plan = find_plan(task, device=device, world=get_num_processes(), constraints=wishes_of(trainer), on_progress=None)
    if plan.failure is not None:
        raise PlanInfeasible(f"strategy='auto': {plan.failure.message}")
    mark = fingerprint(trainer.model, device, get_num_processes(), task.global_batch_size)
    notes = [] if obstacle is None else [f"search: no plan was tried, because {obstacle}"]
    if trainer._algorithms:
        notes.append("search: plans were compared without the Trainer's algorithms")
    return replace(plan, fingerprint=mark, reasons=(*plan.reasons, *notes))


def wishes_of(trainer: Any) -> Wishes:
    """Return what a plan for the Trainer's loop may hold: its own settings win, and all processes are data ranks."""
    limit = trainer.strategy_time_limit
    excluded, included = set(_NOT_IN_THE_LOOP), []
    for algorithm in trainer._algorithms:
        if (same := SAME_AS_ALGORITHM.get(type(algorithm).__name__)) is not None:
            excluded.add(same)
    numerics = "mixed"
    if trainer._requested_precision is not None:
        name = parse_precision(trainer._requested_precision).name
        included += [("amp_native", name)] if name in ("bf16", "fp16") else []
        numerics = "mixed" if included else "exact"
    optimizer = trainer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) or optimizer.state:
        excluded |= set(NEED_TORCH_OPTIMIZER)  # it cannot be made anew, or would lose its state
    if trainer.settings.microbatch_size is not None:
        excluded.add("micro_batch")
    if looks_at_outputs(trainer):
        excluded.add("chunked_cross_entropy")  # a model that trains returns no logits then
    known = set(method_names())
    return Wishes(
        time_limit=120.0 if limit is None else limit,
        numerics=numerics,
        excluded=frozenset(excluded & known),
        included=tuple(included),
        strict=trainer.strict,
    )


def looks_at_outputs(trainer: Any) -> bool:
    """Say whether anybody but the loss function is shown the model's outputs in training."""
    engine = trainer.engine
    return (
        trainer._has_train_metrics
        or any(engine.listens(event) for event in (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.STEP_OUTPUT))
        or engine.has_algorithm_for(Event.AFTER_LOSS)
        or any(is_overridden(trainer, name) for name in ("forward", "compute_loss", "calculate_train_batch_loss"))
    )


def make_task(trainer: Any) -> tuple[TrainingTask, str | None]:
    """Return the training as a value, and why it cannot be tried, or None where it can."""
    samples = _samples(trainer)
    obstacle = why_not_tried(trainer)
    form = trainer._find_form(samples, trainer.model, trainer.loss_func is not None)
    if obstacle is None and isinstance(form, WholeForm):
        obstacle = "the model computes its own loss(outputs, batch), which a trial's model cannot be asked for"
    optimizer = trainer.optimizer
    settings: dict[str, Any] = {}
    if isinstance(optimizer, torch.optim.Optimizer):
        recipe = recipe_of(optimizer, trainer.model)
        settings = {"optim_func": recipe.build, "optim_args": recipe.settings, "optim_param_func": recipe.groups}
    elif obstacle is None:
        obstacle = f"the optimizer is a {type(optimizer).__name__}, which a trial cannot make anew"
    loss = None if obstacle is not None else LossByForm(form, trainer.loss_func)
    task = TrainingTask(
        model=trainer.model, call=CallByForm(form), loss_func=loss, samples=samples,
        global_batch_size=global_batch(trainer), **settings,
    )  # fmt: skip
    return task, obstacle


def why_not_tried(trainer: Any) -> str | None:
    """Return which overridden hook stands in the way of trials, or None."""
    from drivetrain.train.trainer import Trainer

    own = [name for name in _HOOKS if getattr(type(trainer), name, None) is not getattr(Trainer, name, None)]
    if own:
        return f"the Trainer overrides {own[0]}, which runs only in the Trainer itself"
    return None


def global_batch(trainer: Any) -> int:
    """Return how many samples all processes take in one pass of the loop."""
    settings = trainer.settings
    if settings.global_batch_size is not None:
        return settings.global_batch_size
    loader = trainer._train_dataloader
    size = getattr(loader, "batch_size", None) or settings.per_device_batch_size
    return size * num_data_ranks()


def _samples(trainer: Any) -> Any:
    """Return a few samples of the training data without touching the loader; random states stay as they are."""
    source = trainer.train_dataset
    dataset, collate = (
        (source.dataset, source.collate_fn) if isinstance(source, DataLoader) else (source, trainer.collate_fn)
    )
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"strategy='auto' needs a few samples, and reading them from a {type(dataset).__name__} would use them up. Give train() a "
            "dataset or a torch DataLoader, or give the plan."
        )
    random_state = capture_rng()
    try:
        return read_samples(dataset, collate)
    finally:
        restore_rng(random_state)
