"""Set up a run: everything that `train()` decides once, before its loop.

`prepare_run` reads from top to bottom: check, make loaders, apply the plan, place model and optimizer, make the scheduler,
restore. After FIT_START, when plugins have made their changes, `prepare_loop` decides what each step would otherwise ask.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain.context.state import State
from drivetrain.core.arguments import check_callable, naming
from drivetrain.core.engine import Engine
from drivetrain.core.errors import ConfigError, DeviceError, warn
from drivetrain.core.event import Event
from drivetrain.core.time import Interval
from drivetrain.core.types import Settings
from drivetrain.module.accumulation import AccumulationWindow
from drivetrain.module.compilation import replays_graphs
from drivetrain.module.full_state import restore_sharded_state_dict
from drivetrain.module.gradient_sync import start_alike
from drivetrain.module.precision import warn_unscaled_float16
from drivetrain.module.probing import restore_buffers_after
from drivetrain.module.stepper import Stepper
from drivetrain.optim.scheduler import OptimScheduler
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.device import is_out_of_memory
from drivetrain.runtime.ranks import num_data_ranks
from drivetrain.runtime.run import current_run
from drivetrain.train import arguments, loaders, resuming
from drivetrain.train.accelerator import as_runtime
from drivetrain.train.batches import batch_size_of, check_generates, split_batch
from drivetrain.train.checkpoints import prepare_folder_for
from drivetrain.train.failures import prepare_recovery
from drivetrain.train.items import LossCounting
from drivetrain.train.joint_step import loss_graph_of
from drivetrain.train.logbook import StepLosses
from drivetrain.train.run import Run, TrainingData
from drivetrain.train.signatures import check_hooks

if TYPE_CHECKING:
    from drivetrain.train.loop import TrainerLoop
    from drivetrain.train.trainer import Trainer


def prepare_run(
    trainer: "Trainer", train_kwargs: Settings | None, eval_kwargs: Settings | None, until_end: ExitStack
) -> None:
    """Fill the trainer's run, up to the first event. `until_end` is closed when the run has ended."""
    run, state = trainer.run, trainer.state
    settings = run.require_settings()
    own_passes = ("calculate_train_batch_loss", "forward", "_perform_forward_and_backward_passes")
    arguments.check_model(state.model, state.loss_fn, trains=not any(map(trainer.overrides, own_passes)))
    arguments.check_loss_func(state.loss_fn, trainer.optimizer)
    arguments.check_optimizer(state, strict=trainer.strict)
    check_hooks(trainer)
    check_generates(trainer, run.generate)
    prepare_folder_for(settings, run.shared.own_folders, until_end)
    if isinstance(state.model, nn.Module):
        restore_sharded_state_dict(state.model)
    run.loss.is_first = True

    loaders.use_data_ranks(run.shared)
    is_searched = isinstance(trainer.strategy, str) and trainer.strategy == "auto"
    if is_searched:  # a search asks the loader for its batch size, and makes every process a data rank
        _make_loaders(trainer, train_kwargs, eval_kwargs)
    if trainer.strategy is not None:
        from drivetrain.train.planning import apply_strategy

        apply_strategy(trainer)
        settings = run.require_settings()  # a plan may set micro-batches
    if not is_searched:  # how many ranks share the samples is known only now
        _make_loaders(trainer, train_kwargs, eval_kwargs)

    run.measures.train_items = LossCounting(run.shared.options.count_items)
    trainer._prepare_model_optimizer_and_dataloaders()
    trainer.runtime = as_runtime(trainer.runtime)  # an override may have made another one
    _make_stepper(trainer)
    if run.units is None:
        run.stepper.clear()  # what an interrupted run, or a window it left open, has collected
    else:
        run.units.zero_grad(all=True)
        for unit in run.units.values():
            unit.closes = True  # the next batch opens a window
    config = run.config = trainer._create_run_config(
        per_device_batch_size=settings.per_device_batch_size,
        num_epochs=settings.epochs,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        max_num_train_steps=settings.max_num_train_steps,
        gradient_clip_value=settings.gradient_clip_value,
    )
    if run.data.evaluation is not None:
        trainer._check_eval_batch_size()
    arguments.check_watched_metrics(trainer.callback_handler, loaders.set_names(run.data.evaluation))
    limits = run.agreement.limits = settings.limits()
    state.max_duration = limits.duration(config.num_local_update_steps_per_epoch)
    _prepare_scheduler(trainer)
    if run.units is not None:  # their schedules must know the length of the run
        batches, epochs = loaders.length(run.data.train), settings.epochs
        run.units.bind(
            total_steps=None if batches is None or epochs is None else batches * epochs,
            steps_per_epoch=batches,
            autocast_dtype=trainer.runtime.precision.autocast_dtype,
        )
    resuming.restore(trainer)


def copy_trainer(trainer: "Trainer", memo: dict[int, object]) -> "Trainer":
    """Return a Trainer of its own, with copies of model, optimizer and plugins. One that has trained cannot be copied."""
    if trainer.run.settings is not None:
        raise ConfigError(
            "a Trainer that has trained cannot be copied: its state belongs to its run. Save it with save_training_state(folder), "
            "build a second Trainer, and call load_training_state(folder) there."
        )
    copied: Trainer = type(trainer).__new__(type(trainer))
    memo[id(trainer)] = copied
    held = {name: value for name, value in vars(trainer).items() if name != "engine"}
    vars(copied).update({name: copy.deepcopy(value, memo) for name, value in held.items()})
    copied.callback_handler = copied.callback_handler  # which tells the copy of changes
    passes = list(trainer.engine._passes)
    copied.engine = Engine(copied.state, copied.logbook, copied._plugins(), passes, trainer.strict, host=copied)
    copied.run.fire = copied.engine.on
    return copied


def prepare_evaluation(
    trainer: "Trainer", batch_size: int, kwargs: Settings | None, limit_batches: int | float | None
) -> None:
    """Prepare an evaluation outside a training run: loaders, model, metrics, configuration."""
    run = trainer.run
    loaders.use_data_ranks(run.shared)
    made = loaders.make_evaluation_loaders(trainer, batch_size, kwargs)
    run.data.evaluation = loaders.prepare(trainer.device, made, limit_batches)
    trainer.model = loaders.move_model(trainer.runtime, trainer.model, trainer.loss_func)
    run.measures.eval_metrics.to(trainer.device)
    run.measures.eval_items = {}
    run.config = trainer._create_run_config(batch_size, 1, 1, None, None)


def read_epoch_length(data: TrainingData) -> None:
    """Read how many batches the coming epoch has: a dataset may have grown since the last one."""
    data.batches_per_epoch = loaders.length(data.train)
    lengths = all_gather_values(data.batches_per_epoch)
    if len(set(lengths)) > 1:  # the others would wait forever for the shorter one
        listing = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
        raise ConfigError(
            f"the training loaders of the ranks have different numbers of batches ({listing}), but all ranks must train the same "
            "number. Give every rank the same dataset, which the Trainer splits, or loaders of the same length."
        )


def prepare_loop(trainer: "TrainerLoop") -> None:
    """Decide what the loop would otherwise ask at every step. Plugins have acted at FIT_START."""
    run, state, engine = trainer.run, trainer.state, trainer.engine
    settings, data, measures = run.require_settings(), run.data, run.measures

    read_epoch_length(data)
    data.source = loaders.smart_loader(data.train)
    if data.source is not None:
        data.may_pad = run.stepper.window.world > 1
        data.reads_index = any("sample_index" in getattr(plugin, "reads", ()) for plugin in engine.plugins)

    run.stepper.optimizer = trainer.optimizer
    run.stepper.model = trainer.get_model()  # without DDP, whose hooks live as long as it does
    if run.repeat.prepare(trainer.optimizer, run.stepper.scaler):
        run.algorithms_only = Engine(state, plugins=state.algorithms, host=trainer)
    run.is_ddp = isinstance(state.model, nn.parallel.DistributedDataParallel)
    run.microbatch_size = find_microbatch_size(trainer, settings.microbatch_size)
    manual = [repr(name) for name, unit in run.units.items() if unit.manual] if run.units is not None else []
    if run.microbatch_size is not None and manual:
        warn(
            f"microbatch_size={run.microbatch_size} splits a batch, and step_now updates {', '.join(manual)} (manual=True) in every part, "
            "as it would on smaller batches. Leave microbatch_size out, or use smaller batches."
        )
    is_recorded = torch.device(trainer.device).type == "cuda" and replays_graphs(trainer.model)
    windows = [unit.window for unit in run.units.values()] if run.units is not None else [run.stepper.window]
    is_split = run.microbatch_size is not None or any(window.length > 1 for window in windows)
    arguments.check_graphs(is_recorded, settings, splits=is_split)
    run.loss.listens_before_loss = engine.listens(Event.BEFORE_LOSS)
    joint = run.shared.joint
    graph = loss_graph_of(trainer)
    if joint is not None and joint.planned is state.loss_fn and graph != "apart":
        run.loss.joint, run.loss.keeps_outputs, run.loss.form = joint, graph == "outputs", None
    run.loss.saw_forward = run.loss.saw_loss = False
    arguments.check_schedule_length(trainer.scheduler, run)

    if data.evaluation is not None:
        _plan_evaluations(run, state)
    run.evaluation.plateau.start(trainer.run_history, forget=True)
    measures.has_train_metrics = bool(measures.train_metrics)
    for metrics in (measures.train_metrics, measures.eval_metrics):
        metrics.to(trainer.device)
    _log_steps(trainer)

    if num_data_ranks() > 1:  # a loss with weights or buffers is not in DDP
        buffers = state.loss_fn.buffers() if isinstance(state.loss_fn, nn.Module) else ()
        start_alike([*run.stepper.parameters_apart(), *buffers])
    prepare_recovery(run, state, engine.plugins, trainer.logbook, trainer.runtime.print)
    reads_gradients = engine.listens(Event.AFTER_TRAIN_BATCH) or engine.listens(Event.BEFORE_STEP)
    run.norm_is_tested = settings.gradient_clip_norm is not None and run.units is None and not reads_gradients
    assert run.checkpoints is not None
    run.has_boundary_work = bool(
        run.agreement.vote is not None
        or run.evaluation.is_due is not None
        or run.agreement.limits.end_inside_epochs
        or run.good is not None
        or run.checkpoints.saves_inside_epochs
        or current_run() is not None  # an experiment may look on at every boundary
    )
    state.clock.start(shared=run.agreement.vote is not None)


def _make_stepper(trainer: "Trainer") -> None:
    """Make the stepper of the run, for one optimizer or for the units of an `OptimSet`."""
    run, runtime = trainer.run, trainer.runtime
    settings = run.require_settings()
    window = AccumulationWindow(settings.gradient_accumulation_steps, num_data_ranks())
    if run.units is None:
        stepper = Stepper(
            trainer.optimizer, window, scaler=runtime.scaler, policy=settings.nonfinite, device=trainer.device
        )
        stepper.model = trainer.get_model()
    else:
        from drivetrain.optim.plain import SetStepper

        stepper = SetStepper(run.units, window, trainer.state.clock, settings.nonfinite)
    mesh = getattr(trainer.plan, "mesh", None) or ()
    stepper.axes = {axis: size for axis, size in mesh if axis in ("tensor", "sequence") and size > 1}
    run.stepper = runtime.stepper = run.repeat.stepper = stepper


def _make_loaders(trainer: "Trainer", train_kwargs: Settings | None, eval_kwargs: Settings | None) -> None:
    settings, data = trainer.run.require_settings(), trainer.run.data
    batch_size, added = settings.per_device_batch_size, Settings()
    if settings.global_batch_size is not None:
        added["global_batch_size"] = settings.global_batch_size
    if settings.overfit_batches:
        added["shuffle"] = False
    data.train = trainer.create_train_dataloader(
        batch_size, {**added, **(train_kwargs or {})} if added else train_kwargs
    )
    data.evaluation = None
    if trainer.eval_dataset is not None:
        data.evaluation = loaders.make_evaluation_loaders(trainer, batch_size, eval_kwargs)


def _prepare_scheduler(trainer: "Trainer") -> None:
    """Make this run's scheduler; one that an earlier run made is dropped, one the user assigned stays."""
    run, settings, given = trainer.run, trainer.run.require_settings(), trainer.create_scheduler_fn
    if run.shared.scheduler_is_ours:
        trainer.scheduler = None
    if given is not None:
        is_called = not trainer.overrides("create_scheduler")
        arguments.check_scheduler(given, trainer.optimizer, run.units, is_called=is_called)
        create: Callable[..., object] = trainer.create_scheduler
        # An override that takes a parameter, as older ones do, gets the optimizer.
        scheduler = create(trainer.optimizer) if len(inspect.signature(create).parameters) == 1 else create()
        if not trainer.overrides("scheduler_step") and not isinstance(scheduler, ReduceLROnPlateau):
            name = f"create_scheduler_fn returned {scheduler!r}, whose step"
            example = "a scheduler with step(); for one of timm use TrainerWithTimmScheduler"
            check_callable(name, getattr(scheduler, "step", None), example, 0)
        trainer.scheduler, run.shared.scheduler_is_ours = scheduler, True
    if isinstance(trainer.scheduler, ReduceLROnPlateau):
        arguments.check_plateau(settings.scheduler_metric, loaders.set_names(run.data.evaluation))
        settings = run.settings = replace(settings, scheduler_interval="epoch")
    run.schedules_each_step = settings.scheduler_interval == "step"


def _plan_evaluations(run: Run, state: State) -> None:
    """Decide when to evaluate inside epochs."""
    settings, plan = run.require_settings(), run.evaluation
    decide, every = settings.eval_interval, settings.eval_time
    if callable(decide):
        plan.is_due = lambda clock: bool(decide(state, Event.BATCH_END))
    elif every is not None and every.value > 0:
        interval = Interval(every, state.max_duration, run.data.batches_per_epoch)
        if not interval.is_per_epoch:
            interval.reset(state.clock)
            interval.resume(plan.restored_interval)
            plan.interval, plan.is_due = interval, interval.due


def _log_steps(trainer: "TrainerLoop") -> None:
    """Attach the means that loggers get every few updates, on all ranks if any of them has a logger."""
    run, state, engine = trainer.run, trainer.state, trainer.engine
    every, data, measures = run.require_settings().log_time, run.data, run.measures
    is_wanted = any(all_gather_values(every.value > 0 and bool(trainer.logbook.loggers)))
    if is_wanted:
        interval = Interval(every, state.max_duration, data.batches_per_epoch)
        interval.reset(state.clock)
        is_padding = data.is_padding if data.may_pad else None
        measures.step_losses = StepLosses(interval, measures.train_items, is_padding, engine.plugins)
        if measures.restored_steps is not None:
            measures.step_losses.load_state_dict(measures.restored_steps)
    if is_wanted or any(isinstance(plugin, StepLosses) for plugin in engine.plugins):  # those of an earlier run
        trainer.update_plugins()


def resolve_optimizer(trainer: "Trainer") -> None:
    """Turn units, a mapping of them or a configuration into an `OptimSet`. A torch optimizer is returned unchanged."""
    run, optimizer = trainer.run, trainer.optimizer
    run.units = None
    if not isinstance(optimizer, str | Path | Mapping | OptimScheduler) and not inspect.isfunction(optimizer):
        return
    from drivetrain.optim.plain import as_optim_set

    settings = run.require_settings()
    shared: Settings = {"accum_grad": settings.gradient_accumulation_steps}
    if settings.gradient_clip_norm is not None:
        shared["grad_clip"] = settings.gradient_clip_norm
    with naming("optimizer", optimizer):
        trainer.optimizer = run.units = as_optim_set(optimizer, trainer.get_model(), **shared)
    trainer.runtime.scaler = None  # units scale for themselves


def check_eval_loader(loader: object) -> None:
    """Warn if an evaluation loader that the user built would make processes wait or repeat samples."""
    if loaders.smart_loader(loader) is not None or num_data_ranks() == 1:
        return
    if loaders.length(loader) == 0:
        raise ValueError("the evaluation loader has no batches on this process. Use a smaller batch size.")
    warn(
        f"the evaluation loader ({type(loader).__name__}) was built by the user and is not split over the "
        f"{num_data_ranks()} data ranks: each evaluates all of it."
    )


def prepare_precision(trainer: "Trainer") -> None:
    """Raise for a precision that the device does not support, before the first step, and convert the layers of an 8-bit one."""
    model, runtime, device = trainer.model, trainer.runtime, torch.device(trainer.device)
    if isinstance(model, nn.Module) and any(p.dtype is torch.float16 and p.requires_grad for p in model.parameters()):
        warn_unscaled_float16("the model has trainable float16 weights, whose gradients cannot be scaled")
    is_unscaled = device.type == "cpu" or (runtime.scaler is None and trainer.run.units is None)
    if runtime.precision.autocast_dtype is torch.float16 and is_unscaled:
        warn_unscaled_float16(f"precision='fp16' on {trainer.device} has no gradient scaler")
    if runtime.mixed_precision != "fp8" or not isinstance(model, nn.Module):
        return
    from drivetrain.module.fp8 import convert_linears_to_fp8, supports_fp8

    if not supports_fp8(device):
        raise ConfigError(
            f"precision='fp8' needs a CUDA device of compute capability 8.9 or newer; this run is on {device}. Use 'bf16' here."
        )
    convert_linears_to_fp8(model)


# ---------------------------------------------------------------------- a run of the user's own
# A subclass may write out the loop over epochs, as pytorch-accelerated's `_run_training` does. Around each epoch that it runs
# this adds what the Trainer's own run does there: the preparation before the first one, counts and records, and the checkpoint.


@contextmanager
def preparing_epochs(trainer: "TrainerLoop") -> Iterator[None]:
    """Prepare and save every epoch that a `_run_training` of the user's own runs."""
    given = {name: item for name, item in vars(trainer).items() if name == "_run_train_epoch"}
    vars(trainer)["_run_train_epoch"] = partial(_run_own_epoch, trainer, trainer._run_train_epoch)
    try:
        yield
    finally:
        del trainer._run_train_epoch
        vars(trainer).update(given)


def _run_own_epoch(trainer: "TrainerLoop", run_train_epoch: Callable[..., object], loader: Iterable[object]) -> bool:
    run, limits = trainer.run, trainer.run.agreement.limits
    if "_calls" in vars(trainer):  # `super()._run_training()` has prepared it
        return bool(run_train_epoch(loader))
    if run.recovery is None:  # the first one
        prepare_loop(trainer)
    ended = trainer._train_epoch(run_train_epoch, loader)
    run.evaluation.end_epoch(ended)
    if run.checkpoints is not None:
        run.checkpoints.at_epoch_end(ended or limits.reached(trainer.state.clock))
    return ended


# ---------------------------------------------------------------------- the largest micro-batch that fits
# Starting from the whole batch, a step is tried; out of memory halves the size. All ranks use the smallest size any of them needs. Weights,
# buffers, gradients and random numbers are restored, so the run that follows is the one that would have been without.


def find_microbatch_size(trainer: "TrainerLoop", given: int | str | None) -> int | None:
    """Return the given number of rows, or for "auto" how many fit into memory with model and optimizer. None: no split."""
    if given is None or isinstance(given, int):
        return given
    if torch.device(trainer.device).type == "cpu":
        return None  # a CPU swaps before it runs out: there is nothing to find
    move, batch = loaders.mover(trainer.device, trainer.run.data.train), next(iter(trainer.run.data.train))
    batch = batch if move is None else move(batch)
    rows = size = batch_size_of(None, batch)
    try:
        with trainer.state.preserve_random(), restore_buffers_after(trainer.model):
            while not all(all_gather_values(_fits(trainer, split_batch(batch, size)[0]))):
                if size == 1:
                    raise DeviceError(
                        "microbatch_size='auto': not even one row fits on the device. Use a smaller model or activation checkpointing."
                    )
                size = (size + 1) // 2
    finally:
        trainer.optimizer_zero_grad()
    return None if size == rows else size


def _fits(trainer: "TrainerLoop", part: object) -> bool:
    state = trainer.state
    try:
        state.batch = part
        with trainer.runtime.no_sync(trainer.model):
            output = trainer.calculate_train_batch_loss(part)
            output["loss"].backward()
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        state.batch = state.outputs = state.batch_output = None
        trainer.model.zero_grad(set_to_none=True)
        trainer.runtime.free_memory()
