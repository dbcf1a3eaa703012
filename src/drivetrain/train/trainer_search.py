"""`Trainer(strategy="auto")`: the Trainer's training as a value that a search can try, and what a plan for its loop may hold.

A trial runs in another process, where there is no Trainer. What the default hooks do with a batch is a pure function of its form and the
loss function, and travels; hooks that somebody overrides may do anything, so nothing is tried then, and the plan says so.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError, DrivetrainWarning
from drivetrain.core.event import Event
from drivetrain.core.types import Batch, Settings
from drivetrain.module.precision import Precision, parse_precision
from drivetrain.runtime.ranks import get_num_processes, is_master, num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.optimizer_recipe import recipe_of
from drivetrain.strategy.registry import method_names
from drivetrain.strategy.search.constraints import SearchConstraints
from drivetrain.strategy.search.decision import plain_plan
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.process import refuse_inside_trial
from drivetrain.strategy.value import Strategy, fingerprint
from drivetrain.train.auto import read_samples
from drivetrain.train.batches import BatchForm, WholeForm, carried_loss
from drivetrain.train.resuming import ddp_settings
from drivetrain.train.settings import TrainSettings

if TYPE_CHECKING:
    from drivetrain.core.plugin import Plugin
    from drivetrain.train.trainer import Trainer

SAME_AS_ALGORITHM = {"TorchCompile": "native_dynamo", "ChannelsLast": "channels_last", "FP8Linear": "fp8"}
"""Algorithms that do what a method does; asking for both is a conflict."""
NEED_TORCH_OPTIMIZER = ("zero1", "zero2", "fsdp", "half", "fused_optimizer", "cpu_offload")
_NOT_IN_THE_LOOP = ("tensor_parallel", "pipeline_parallel", "sequence_parallel")
"""Methods whose plans have fewer data ranks than processes, so that `per_device_batch_size` would be another batch over all of them; a
pipeline cannot run in the Trainer's loop at all."""
_HOOKS = (
    "calculate_train_batch_loss", "forward", "compute_loss", "backward_step", "optimizer_step",
)  # fmt: skip
"""What a trial would have to call to run this Trainer's own step."""


@dataclass(frozen=True)
class CallByForm:
    """Calls a model with a batch as the Trainer does."""

    form: BatchForm

    def __call__(self, model: nn.Module, batch: Batch) -> object:
        args, kwargs = self.form.arguments(batch)
        return model(*args, **kwargs)


@dataclass(frozen=True)
class LossByForm:
    """The Trainer's loss as a function of batch and output; without a loss function it is what the output carries."""

    form: BatchForm
    loss_func: Callable[..., Any] | None = None

    def __call__(self, batch: Batch, outputs: object) -> Any:
        if self.loss_func is None:
            return carried_loss(outputs)
        loss = self.loss_func(self.form.predictions(outputs), self.form.targets(batch))
        if isinstance(loss, Mapping):
            return loss["loss"] if "loss" in loss else sum(loss.values())
        return loss


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What planning needs to know of a Trainer that is about to train."""

    state: State
    """Model, loss and optimizer, which the plan changes."""
    settings: TrainSettings | None
    device: torch.device
    strategy: object = None
    """The plan in any form that `Strategy.load` reads, or "auto"."""
    strict: bool = False
    time_limit: float | None = None
    precision: str | Precision | None = None
    """As it was requested; None leaves it to the plan."""
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
    """Prints how the search goes; None where the Trainer prints nothing."""

    @property
    def optimizer(self) -> object:
        """The optimizer as it was given, or None."""
        return self.state.optimizers[0] if self.state.optimizers else None

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, where it is one that a plan can make again."""
        return self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None

    @property
    def algorithms(self) -> "Sequence[Plugin]":
        """The algorithms of the run."""
        return self.state.algorithms


def request_of(trainer: "Trainer") -> PlanRequest:
    """Return what planning needs to know of a Trainer."""
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


def search_plan(request: PlanRequest) -> Strategy:
    """Return the best plan for what the Trainer is about to do; its model, loader and random states stay as they are.

    A search that fails does not end a training, unless `strict`: the plan is then the one that needs the least memory, where none fits by
    prediction, else one that changes nothing.
    """
    refuse_inside_trial("Trainer(strategy='auto')")
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
                warnings.warn(f"strategy='auto': {cause} It is tried all the same.", DrivetrainWarning, stacklevel=2)
            return replace(plan, failure=None, reasons=(*plan.reasons, f"search: {cause} It is used all the same"))
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
    if request.algorithms:
        notes.append("search: plans were compared without the Trainer's algorithms")
    return replace(plan, fingerprint=mark, reasons=(*plan.reasons, *notes))


def constraints_of(request: PlanRequest) -> SearchConstraints:
    """Return what a plan for the Trainer's loop may hold: its own settings win, and all processes are data ranks."""
    excluded, included = set(_NOT_IN_THE_LOOP), []
    for algorithm in request.algorithms:
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
    """Return the training as a value, and why it cannot be tried, or None where it can."""
    samples, model, loss_func = _samples(request), request.state.model, request.state.loss_fn
    obstacle = None
    if request.overridden_hook is not None:
        obstacle = f"the Trainer overrides {request.overridden_hook}, which runs only in the Trainer itself"
    form = request.find_form(samples, model, loss_func is not None)
    if obstacle is None and isinstance(form, WholeForm):
        obstacle = "the model computes its own loss(outputs, batch), which a trial's model cannot be asked for"
    settings: Settings = {}
    if request.torch_optimizer is not None:
        recipe = recipe_of(request.torch_optimizer, model)
        settings = {"optim_func": recipe.build, "optim_args": recipe.settings, "optim_param_func": recipe.groups}
    elif obstacle is None:
        obstacle = f"the optimizer is a {type(request.optimizer).__name__}, which a trial cannot make again"
    task = TrainingTask(
        model=model,
        call=CallByForm(form),
        loss_func=None if obstacle is not None else LossByForm(form, loss_func),
        samples=samples,
        global_batch_size=_global_batch(request),
        **settings,
    )
    return task.follow(), obstacle


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
            f"strategy='auto' needs a few samples, and reading them from a {type(dataset).__name__} would use them up. Give train() a "
            "dataset or a torch DataLoader, or give the plan."
        )
    random_state = capture_rng()
    try:
        return read_samples(dataset, collate)
    finally:
        restore_rng(random_state)
