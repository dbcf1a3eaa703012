"""Decisions that `train()` makes once, before its loop."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.context.state import State
from drivetrain.core.arguments import naming
from drivetrain.core.errors import ConfigError, ConfigTypeError, DrivetrainWarning
from drivetrain.core.event import Event
from drivetrain.core.intervals import Interval
from drivetrain.module.full_state import give_parts_again
from drivetrain.module.precision import warn_unscaled_float16
from drivetrain.optim.state_schedule import compile_state_schedule
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.ranks import num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.train import loaders, resuming
from drivetrain.train.accelerator import as_runtime
from drivetrain.train.arguments import check_loss_func, check_model
from drivetrain.train.callbacks.watching import MetricWatch
from drivetrain.train.checks import (
    check_optimizer,
    check_plateau,
    check_schedule_length,
    check_scheduler,
    check_watched_metrics,
)
from drivetrain.train.generation import check_generates
from drivetrain.train.gradients import Gradients
from drivetrain.train.items import LossCounting
from drivetrain.train.keeping import prepare_checkpoints
from drivetrain.train.plain_hooks import find_plain_hooks
from drivetrain.train.recovery import prepare_guard
from drivetrain.train.run_config import TrainerRunConfig, count_update_steps
from drivetrain.train.settings import RunLimits, TrainSettings
from drivetrain.train.step_losses import StepLosses


def prepare_training(
    trainer: Any, train_kwargs: dict[str, Any] | None, eval_kwargs: dict[str, Any] | None, until_end: ExitStack
) -> None:
    """Build loaders, place the model, make the scheduler, restore: everything before the first event of the run.

    `until_end` is closed when the run has ended.
    """
    settings = trainer.settings
    check_model(trainer.model, trainer.loss_func, trains=True)
    check_loss_func(trainer.loss_func, trainer.optimizer)
    check_optimizer(trainer)
    check_generation(trainer, trainer._generate)
    prepare_checkpoints(settings, trainer._own_folders, until_end)
    if isinstance(trainer.model, nn.Module):
        give_parts_again(trainer.model)
    trainer._stop, trainer._first_batch, trainer._has_agreed = None, True, False
    trainer._unfinished = ""
    loaders.use_data_ranks(trainer)
    is_searched = isinstance(trainer.strategy, str) and trainer.strategy == "auto"
    if is_searched:  # a search asks the loader for its batch size, and makes every process a data rank
        _make_loaders(trainer, train_kwargs, eval_kwargs)
    if trainer.strategy is not None:
        from drivetrain.train.planning import apply_strategy

        apply_strategy(trainer)
        settings = trainer.settings  # a plan may set micro-batches
    if not is_searched:  # how many ranks share the samples is known only now
        _make_loaders(trainer, train_kwargs, eval_kwargs)
    trainer._gradients = Gradients(trainer, settings.gradient_accumulation_steps, settings.nonfinite)
    trainer._train_items, trainer._eval_items = LossCounting(trainer._count_items), {}
    trainer._prepare_model_optimizer_and_dataloaders()
    trainer.runtime = trainer._accelerator = as_runtime(trainer._accelerator)  # an override may have made another one
    trainer.run_config = trainer._create_run_config(
        per_device_batch_size=settings.per_device_batch_size,
        num_epochs=settings.epochs,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        max_num_train_steps=settings.max_num_train_steps,
        gradient_clip_value=settings.gradient_clip_value,
    )
    check_watched_metrics(trainer)
    trainer._limits = RunLimits(settings)
    trainer.state.max_duration = trainer._limits.duration(trainer.run_config.num_local_update_steps_per_epoch)
    _prepare_scheduler(trainer)
    _bind_units(trainer)
    resuming.restore(trainer)


def _make_loaders(trainer: Any, train_kwargs: dict[str, Any] | None, eval_kwargs: dict[str, Any] | None) -> None:
    settings = trainer.settings
    batch_size = settings.per_device_batch_size
    trainer._train_dataloader = trainer.create_train_dataloader(
        batch_size, loaders.with_settings(settings, train_kwargs)
    )
    trainer._eval_dataloader = None
    if trainer.eval_dataset is not None:
        trainer._eval_dataloader = loaders.make_evaluation_loaders(trainer, batch_size, eval_kwargs)


def scale_length(trainer: Any, settings: TrainSettings) -> TrainSettings:
    """Scale the length of the run where that was asked for, by the Trainer's argument or by an algorithm, and say so."""
    ratio = schedule_ratio(trainer)
    if ratio == 1.0:
        return settings
    scaled = settings.scaled(ratio)
    changes = [
        f"{name} {getattr(settings, name)} → {getattr(scaled, name)}"
        for name in ("num_epochs", "max_num_train_steps", "max_duration")
        if getattr(settings, name) is not None
    ]
    trainer.print(f"scale_schedule_ratio={ratio}: {', '.join(changes)}")
    return scaled


def _prepare_scheduler(trainer: Any) -> None:
    """Make this run's scheduler; one that an earlier run made is dropped, one the user assigned stays."""
    if trainer._scheduler_is_ours:
        trainer.scheduler = None
    if trainer.create_scheduler_fn is not None:
        check_scheduler(trainer)
        trainer.scheduler = _make_scheduler(trainer)
        trainer._scheduler_is_ours = True
    if isinstance(trainer.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        check_plateau(trainer)
        trainer.settings = replace(trainer.settings, scheduler_interval="epoch")
    trainer._schedules_each_step = trainer.settings.scheduler_interval == "step"


def _make_scheduler(trainer: Any) -> Any:
    given = trainer.create_scheduler_fn
    try:
        scheduler = call_seed_form(trainer.create_scheduler, trainer.optimizer)
    except TypeError as error:
        raise ConfigTypeError(
            f"create_scheduler_fn={given!r} cannot make a scheduler of the optimizer alone: {error}. Fill in its other arguments, "
            "for example with functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)."
        ) from error
    if not any(callable(getattr(scheduler, name, None)) for name in ("step", "step_update")):
        raise ConfigTypeError(
            f"create_scheduler_fn={given!r} returned {scheduler!r} ({type(scheduler).__name__}), expected a scheduler with step()."
        )
    return scheduler


def compile_scheduler(trainer: Any) -> Any:
    """Return torch's scheduler for a function of the state."""
    return compile_state_schedule(trainer.create_scheduler_fn, trainer.state, schedule_ratio(trainer))


def schedule_ratio(trainer: Any) -> float:
    """Return by how much the run is scaled: the Trainer's argument, else what an algorithm asked for."""
    ratio = trainer.scale_schedule_ratio
    return getattr(trainer.state, "scale_schedule_ratio", 1.0) if ratio == 1.0 else ratio


def _bind_units(trainer: Any) -> None:
    """Tell the units of an `OptimSet` how long the run is, so that schedules know their length."""
    if trainer._units is None:
        return
    batches, epochs = loaders.length(trainer._train_dataloader), trainer.settings.epochs
    total = None if batches is None or epochs is None else batches * epochs
    dtype = trainer._accelerator.precision.autocast_dtype
    trainer._units.bind(total_steps=total, steps_per_epoch=batches, autocast_dtype=dtype)


def prepare_loop(trainer: Any) -> None:
    """Decide once what the loop would otherwise ask at every step; guests of FIT_START have had their say."""
    settings, state, engine = trainer.settings, trainer.state, trainer.engine
    trainer._batches_per_epoch = loaders.length(trainer._train_dataloader)
    _check_equal_lengths(trainer._batches_per_epoch)
    trainer._gradients.use_loader(trainer._train_dataloader)
    trainer._sample_source = loaders.smart_loader(trainer._train_dataloader)
    reads_index = any("sample_index" in getattr(plugin, "reads", ()) for plugin in engine.plugins)
    trainer._may_pad = trainer._sample_source is not None and trainer._gradients.window.world > 1
    trainer._wants_index = reads_index and trainer._sample_source is not None
    trainer._repeat.prepare()
    trainer._ddp = isinstance(trainer.model, nn.parallel.DistributedDataParallel)
    trainer._microbatch_size = choose_microbatch_size(trainer)
    trainer._gradients.settle()
    trainer._listens_before_loss = engine.listens(Event.BEFORE_LOSS)
    trainer._saw_forward = trainer._saw_loss = False
    check_schedule_length(trainer)
    trainer._plateau_watch = MetricWatch(settings.scheduler_metric, greater_is_better=False)
    trainer._plateau_watch.start(trainer, forget=True)
    trainer._eval_every = trainer._eval_interval = None
    if trainer._eval_dataloader is not None:
        trainer._eval_interval = interval_inside_epochs(settings, state, trainer._batches_per_epoch)
        if trainer._eval_interval is not None:
            trainer._eval_interval.resume(trainer._saved_evaluations)
            trainer._eval_every = trainer._eval_interval.due
        elif callable(decide := settings.eval_interval):
            trainer._eval_every = lambda clock: bool(decide(state, Event.BATCH_END))
    _log_steps(trainer)
    clips = settings.gradient_clip_norm is not None or settings.gradient_clip_value is not None
    trainer._clips = clips or is_overridden(trainer, "_clip_gradients")
    trainer._tracks_its_own_way = is_overridden(trainer, "_update_loss_tracker")
    prepare_guard(trainer)
    looks_on = engine.listens(Event.AFTER_TRAIN_BATCH) or engine.listens(Event.BEFORE_STEP)
    trainer._norm_is_tested = settings.gradient_clip_norm is not None and trainer._units is None and not looks_on
    trainer._plain = find_plain_hooks(trainer)
    trainer._boundary_work = bool(
        trainer._vote is not None
        or trainer._eval_every is not None
        or trainer._limits.end_inside_epochs
        or trainer._good is not None
        or (trainer._keeper is not None and trainer._keeper.saves_inside_epochs)
        or current_run() is not None  # an experiment may look on at every boundary
    )
    trainer._eval_metrics.to(trainer.device)
    trainer._train_metrics.to(trainer.device)
    state.clock.start(shared=trainer._vote is not None)


def check_generation(trainer: Any, arguments: Mapping[str, Any] | None) -> None:
    """Reject a model that cannot generate where that is asked for."""
    if arguments is not None:
        check_generates(trainer.model, is_overridden(trainer, "calculate_generation_batch"))


def _log_steps(trainer: Any) -> None:
    """Attach the means that loggers get every few updates, on all ranks if any of them has a logger."""
    every, state, engine = trainer.settings.log_time, trainer.state, trainer.engine
    is_heard = any(all_gather_values(every.value > 0 and bool(trainer.logbook.loggers)))
    if is_heard:
        interval = Interval(every, state.max_duration, trainer._batches_per_epoch)
        interval.reset(state.clock)
        is_padding = trainer._is_padding if trainer._may_pad else None
        trainer._step_losses = StepLosses(interval, trainer._train_items, is_padding, engine.plugins)
        if trainer._saved_step_losses is not None:
            trainer._step_losses.load_state_dict(trainer._saved_step_losses)
    if is_heard or any(isinstance(plugin, StepLosses) for plugin in engine.plugins):  # those of an earlier run
        engine.set_plugins(trainer._plugins())


def _check_equal_lengths(batches: int | None) -> None:
    """Refuse loaders of different lengths on several processes: the shorter one would leave the others waiting for ever."""
    lengths = all_gather_values(batches)
    if len(set(lengths)) > 1:
        listing = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
        raise ConfigError(
            f"the training loaders of the ranks have different numbers of batches ({listing}), and ranks train in step. Give every "
            "rank the same dataset, which the Trainer splits, or loaders of one length."
        )


_TRAINER = tuple(f"drivetrain.train.{name}" for name in ("trainer", "loop", "evaluation_loop", "meeting", "hooks"))
"""Where the Trainer's own methods are."""


def is_overridden(trainer: Any, name: str) -> bool:
    """Whether a subclass, or somebody on the instance, put an own method in place of the Trainer's."""
    owner = next(cls for cls in type(trainer).__mro__ if name in vars(cls))
    return name in vars(trainer) or owner.__module__ not in _TRAINER


def resolve_optimizer(trainer: Any) -> None:
    """Turn units, a mapping of them or a configuration into an `OptimSet`; a torch optimizer is never touched.

    A run with a torch optimizer imports nothing of `drivetrain.optim`.
    """
    trainer._units = None
    optimizer = trainer.optimizer
    if isinstance(optimizer, torch.optim.Optimizer) or not _describes_units(optimizer):
        return
    from drivetrain.optim.config import as_optim_set

    shared: dict[str, Any] = {"accum_grad": trainer.settings.gradient_accumulation_steps}
    if trainer.settings.gradient_clip_norm is not None:
        shared["grad_clip"] = trainer.settings.gradient_clip_norm
    with naming("optimizer", optimizer):
        trainer.optimizer = trainer._units = as_optim_set(optimizer, trainer.get_model(), **shared)
    trainer._accelerator.scaler = None  # units scale for themselves


def _describes_units(optimizer: Any) -> bool:
    if isinstance(optimizer, str | Path | Mapping):
        return True
    return any(base.__module__.startswith("drivetrain.optim.") for base in type(optimizer).__mro__) or (
        inspect.isfunction(optimizer)
    )


def make_run_config(
    trainer: Any,
    num_epochs: int | None,
    gradient_accumulation_steps: int,
    max_num_train_steps: int | None,
    gradient_clip_value: float | None,
) -> TrainerRunConfig:
    """Collect the facts of a run; counts are None where the loader has no length."""
    settings, runtime = trainer.settings, trainer._accelerator
    processes, shares = runtime.num_processes, num_data_ranks()
    per_device = batch_size_of_loader(trainer._train_dataloader)
    eval_per_device = batch_size_of_loader(trainer._eval_dataloader)
    batches = loaders.length(trainer._train_dataloader) if trainer._train_dataloader is not None else None
    accumulation = max(1, gradient_accumulation_steps)
    steps, local_steps = (None, None) if batches is None else count_update_steps(batches, shares, accumulation)
    if max_num_train_steps is None and num_epochs is not None and steps is not None:
        max_num_train_steps = num_epochs * steps + 1
    return TrainerRunConfig(
        num_epochs=num_epochs,
        train_per_device_batch_size=per_device,
        train_dl_kwargs=trainer._train_dl_kwargs,
        eval_per_device_batch_size=eval_per_device,
        eval_dl_kwargs=trainer._eval_dl_kwargs,
        gradient_accumulation_steps=gradient_accumulation_steps,
        gradient_clip_value=gradient_clip_value,
        train_total_batch_size=None if per_device is None else per_device * shares * accumulation,
        eval_total_batch_size=None if eval_per_device is None else eval_per_device * shares,
        num_update_steps_per_epoch=steps,
        num_local_update_steps_per_epoch=local_steps,
        max_num_train_steps=max_num_train_steps,
        is_local_process_zero=runtime.is_local_main_process,
        is_world_process_zero=runtime.is_main_process,
        is_distributed=processes > 1,
        mixed_precision=runtime.mixed_precision,
        num_processes=processes,
        gradient_clip_norm=settings.gradient_clip_norm if settings else None,
        max_duration=str(settings.max_duration) if settings and settings.max_duration else None,
        microbatch_size=settings.microbatch_size if settings else None,
        precision=runtime.mixed_precision,
        seed=trainer.state.seed,
    )


def batch_size_of_loader(loader: Any) -> int | None:
    """Return the batch size per process that a loader was built with, or None."""
    size = getattr(getattr(loader, "dl", loader), "batch_size", None)
    return size if isinstance(size, int) else None


def check_eval_batch_size(trainer: Any) -> None:
    """Warn where an evaluation loader of the user's own would make processes wait or repeat samples."""
    loaders.map_loaders(_check_eval_loader, trainer._eval_dataloader)


def _check_eval_loader(loader: Any) -> None:
    if loaders.smart_loader(loader) is not None or num_data_ranks() == 1:
        return
    batches = loaders.length(loader)
    if batches is not None and batches == 0:
        raise ValueError("the evaluation loader has no batches on this process. Use a smaller batch size.")
    warnings.warn(
        f"the evaluation loader ({type(loader).__name__}) was built by the user and is not split over the "
        f"{num_data_ranks()} data ranks here: each evaluates all of it.",
        DrivetrainWarning,
        stacklevel=3,
    )


def interval_inside_epochs(settings: TrainSettings, state: State, batches_per_epoch: int | None) -> Interval | None:
    """Return how often to evaluate inside epochs, or None when evaluation waits for their ends or a function decides."""
    every = settings.eval_time
    if every is None or every.value <= 0:
        return None
    interval = Interval(every, state.max_duration, batches_per_epoch)
    if interval.is_per_epoch:
        return None
    interval.reset(state.clock)
    return interval


def choose_microbatch_size(trainer: Any) -> int | None:
    """Return the number of rows a batch is split into, or None for no split."""
    asked = trainer.settings.microbatch_size
    if asked != "auto":
        return asked
    if torch.device(trainer.device).type == "cpu":
        return None  # a CPU swaps before it runs out: there is nothing to find
    from drivetrain.train.microbatching import find_microbatch_size

    return find_microbatch_size(trainer)


def call_seed_form(create_scheduler: Callable[..., Any], optimizer: Any) -> Any:
    """Call the scheduler hook; an override that takes a parameter, as older ones do, receives the optimizer."""
    try:
        wants_optimizer = len(inspect.signature(create_scheduler).parameters) == 1
    except (TypeError, ValueError):
        wants_optimizer = False
    return create_scheduler(optimizer) if wants_optimizer else create_scheduler()


def prepare_precision(trainer: Any) -> None:
    """Refuse a precision the device cannot run, before the first step, and convert the layers of an 8-bit one."""
    model = trainer.model
    if isinstance(model, nn.Module) and any(p.dtype is torch.float16 and p.requires_grad for p in model.parameters()):
        warn_unscaled_float16("the model has trainable float16 weights, whose gradients cannot be scaled")
    runtime, on_cpu = trainer._accelerator, torch.device(trainer.device).type == "cpu"
    if runtime.precision.autocast_dtype is torch.float16 and (
        on_cpu or (runtime.scaler is None and trainer._units is None)
    ):
        warn_unscaled_float16(f"precision='fp16' on {trainer.device} has no gradient scaler")
    if trainer._accelerator.mixed_precision != "fp8" or not isinstance(trainer.model, nn.Module):
        return
    from drivetrain.module.fp8 import convert_linears_to_fp8, supports_fp8

    device = torch.device(trainer.device)
    if not supports_fp8(device):
        raise ConfigError(
            f"precision='fp8' needs a CUDA device of compute capability 8.9 or newer; this run is on {device}. Use 'bf16' here."
        )
    convert_linears_to_fp8(trainer.model)
