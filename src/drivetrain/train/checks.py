"""What must be true before the first step, and what a first batch must show."""

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.context.state import State
from drivetrain.core.errors import BatchOutputError, ConfigError, DrivetrainWarning
from drivetrain.core.event import Event
from drivetrain.core.time import TimeUnit
from drivetrain.module.optimizers import served_parameters
from drivetrain.train.arguments import check_optimizer_type, check_rates
from drivetrain.train.items import LossCounting
from drivetrain.train.loaders import EvaluationLoaders
from drivetrain.train.run import Run
from drivetrain.train.settings import RunLimits, TrainSettings

if TYPE_CHECKING:
    from drivetrain.train.evaluation import EvaluationLoop

REQUIRED_OUTPUTS = ("loss", "model_outputs", "batch_size")


def check_optimizer(state: State, strict: bool) -> None:
    """Reject training without an optimizer, or with one that holds nothing of the model."""
    model = state.model
    if len(state.optimizers) > 1:
        check_optimizer_type(state.optimizers)
    if not state.optimizers:
        raise ConfigError(
            "train() needs an optimizer and the Trainer was given none. Pass optimizer=torch.optim.AdamW(model.parameters(), ...) "
            "to the Trainer; evaluate() and predict() work without one."
        )
    optimizer = state.optimizers[0]
    check_optimizer_type(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        check_rates(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        return
    held = {id(p) for p in served_parameters(optimizer)}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trainable.items() if id(p) not in held]
    if held and not any(id(p) in held for p in model.parameters()):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} holds {len(held)} parameters, none of which belongs to the model "
            f"({type(model).__name__}). Was the model copied, or replaced after the optimizer was made?"
        )
    if missing:
        shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
        message = f"{len(missing)} trainable parameters are in no optimizer and will not change: {shown}"
        if strict:
            raise ConfigError(message + ". Add them, or set requires_grad=False.")
        warnings.warn(message, DrivetrainWarning, stacklevel=4)


def check_scheduler(given: object, optimizer: object, units: object) -> None:
    """Reject what cannot make a scheduler, and a scheduler made for another optimizer."""
    if units is not None:
        raise ConfigError(
            "create_scheduler_fn was given, but the units of an OptimSet own their learning rates. Leave create_scheduler_fn out, "
            "or use a plain torch optimizer with it."
        )
    own = getattr(given, "optimizer", None)
    if isinstance(own, torch.optim.Optimizer):
        if own is not optimizer:
            raise ConfigError(
                f"the scheduler ({type(given).__name__}) drives another optimizer than the Trainer's. Build it with the optimizer "
                "given to the Trainer, or pass a function of the optimizer."
            )
    elif not callable(given):
        raise _NotCallable(
            f"create_scheduler_fn={given!r} is not callable. Expected a function of the optimizer that returns a scheduler, for example "
            "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)."
        )


def check_schedule_length(scheduler: object, run: Run) -> None:
    """Warn when a scheduler that knows its number of steps ends before the run does, or goes on after it."""
    settings, config = run.require_settings(), run.config
    planned = getattr(scheduler, "total_steps", None) or getattr(scheduler, "total_iterations", None)
    if not isinstance(planned, int) or config is None or settings.fast_dev_run:
        return
    steps = _steps_of_schedule(settings, run.agreement.limits, config.num_local_update_steps_per_epoch)
    if steps is None:
        return
    if 0 <= planned - steps <= 1:  # one to spare is a habit, and moves the rate by next to nothing
        return
    effect = "the rate does not get to its end" if planned > steps else "it ends before the run does"
    advice = "Give it the steps of this run, for example by TrainerPlaceholderValues."
    if config.is_distributed and planned == (config.num_epochs or 0) * (config.num_update_steps_per_epoch or 0):
        advice = (
            f"NUM_UPDATE_STEPS_PER_EPOCH counts the updates of all {config.num_processes} processes. Use "
            "TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH."
        )
    warnings.warn(
        f"{type(scheduler).__name__} is made for {planned} steps and this run makes {steps}: {effect}. {advice}",
        DrivetrainWarning,
        stacklevel=2,
    )


def _steps_of_schedule(settings: TrainSettings, limits: RunLimits, updates_per_epoch: int | None) -> int | None:
    """Return how often the scheduler will have been stepped when the run ends, as far as that is known."""
    epochs = settings.epochs
    if settings.scheduler_interval == "epoch":
        return None if limits.end_inside_epochs else epochs
    ends = [] if epochs is None or updates_per_epoch is None else [epochs * updates_per_epoch]
    for end in limits.ends:
        if end.unit is TimeUnit.STEP or (end.unit is TimeUnit.BATCH and settings.gradient_accumulation_steps == 1):
            ends.append(int(end.value))
        elif end.unit is not TimeUnit.EPOCH:
            return None  # samples, tokens, time
    return min(ends, default=None)


class _NotCallable(ConfigError, TypeError):
    """A configuration error that is also the TypeError such code used to raise."""


def check_batch_output(output: object, trainer: "EvaluationLoop") -> None:
    """Reject a loss hook's result that lacks what the loop needs, and hooks that hide events from their listeners."""
    if not isinstance(output, Mapping):
        raise BatchOutputError(
            f"a loss hook returned {type(output).__name__}, expected a dict with {', '.join(REQUIRED_OUTPUTS)}. "
            'For example: return {"loss": loss, "model_outputs": outputs, "batch_size": len(targets)}.'
        )
    missing = [name for name in REQUIRED_OUTPUTS if name not in output]
    if missing:
        raise BatchOutputError(
            f"a loss hook returned no {' and no '.join(missing)}; found the keys: {', '.join(map(str, output)) or 'none'}. "
            f"Expected {', '.join(REQUIRED_OUTPUTS)}."
        )
    loss = output["loss"]
    if not callable(getattr(loss, "detach", None)):
        raise BatchOutputError(
            f"the loss is a {type(loss).__name__}, expected a scalar tensor. Do not call .item() on it in the hook."
        )
    if not trainer.run.is_evaluating:
        step = trainer.run.loss
        _check_hidden(trainer, Event.AFTER_FORWARD, step.saw_forward, "self.forward(...)", "self.model(...)")
        _check_hidden(
            trainer, Event.BEFORE_LOSS, step.saw_loss, "self.compute_loss(outputs, targets)", "self.loss_func(...)"
        )


def warn_of_sample_weights(trainer: "EvaluationLoop", counting: LossCounting, output: Mapping[str, object]) -> None:
    """Warn where losses of parts are joined and it is not known what each is a mean over."""
    window, microbatch_size = trainer.run.stepper.window, trainer.run.microbatch_size
    if counting.is_known or window.is_plain or not {"num_items", "num_items_in_batch"}.isdisjoint(output):
        return
    parts = {
        f"gradient_accumulation_steps={window.length}": window.length > 1,
        f"microbatch_size={microbatch_size}": microbatch_size is not None,
        f"{window.world} processes": window.world > 1,
    }
    warnings.warn(
        f"{' and '.join(name for name, is_used in parts.items() if is_used)}: it is not known what the loss is a mean over, so parts are "
        "weighted by their samples. That is right for a mean over samples. For any other mean pass Trainer(count_items=...), a function of "
        "the batch or 'labels', or return num_items from the loss hook.",
        DrivetrainWarning,
        stacklevel=2,
    )


def _check_hidden(trainer: "EvaluationLoop", event: Event, seen: bool, call: str, instead_of: str) -> None:
    if seen or not trainer.engine.has_algorithm_for(event):
        return
    names = ", ".join(type(plugin).__name__ for plugin in trainer.engine.listeners(event))
    raise ConfigError(
        f"{type(trainer).__name__}.calculate_train_batch_loss hides {event.name} from {names}, which needs it. Call {call} in the hook "
        f"instead of {instead_of}."
    )


def check_loss(loss: Any, trainer: "EvaluationLoop") -> None:
    """Reject a loss that cannot be back-propagated, unless a user's own `backward_step` knows what to do with it."""
    if trainer.overrides("backward_step") or trainer.run.units is not None:
        return
    if loss.numel() != 1:
        raise BatchOutputError(
            f"the loss has shape {tuple(loss.shape)}, expected a scalar. Reduce it, for example with .mean()."
        )
    if not loss.requires_grad:
        raise BatchOutputError(
            f"the loss (shape {tuple(loss.shape)}) has no gradient: no trainable parameter reached it. Are all parameters frozen, was it "
            "detached, or computed under no_grad?"
        )


def check_watched_metrics(callbacks: Iterable[object], eval_loader: object) -> None:
    """Reject callbacks that watch an evaluation metric which will never be recorded."""
    for callback in callbacks:
        metric = getattr(callback, "watch_metric", None)
        is_compared = getattr(
            callback, "evaluate_during_training", True
        )  # an average may be saved without being compared
        if isinstance(metric, str) and is_compared and (reason := _why_never_recorded(metric, eval_loader)):
            raise ValueError(f"{type(callback).__name__} watches {metric!r}, {reason}")


def check_plateau(metric: str, eval_loader: object) -> None:
    """Reject a scheduler that waits for an evaluation metric which will never be recorded."""
    if reason := _why_never_recorded(metric, eval_loader):
        raise ConfigError(f"ReduceLROnPlateau watches scheduler_metric={metric!r}, {reason}")


def _why_never_recorded(metric: str, eval_loader: object) -> str | None:
    """Return why an evaluation metric of this name cannot come, and what to do; None for any other name."""
    prefix = next((p for p in ("eval_", "intermediate_eval_") if metric.removeprefix("ema_model_").startswith(p)), None)
    if prefix is None:
        return None
    if eval_loader is None:
        return "but train() got no eval_dataset, so it will never be recorded. Pass eval_dataset=..., or watch 'train_loss_epoch'."
    if not isinstance(eval_loader, EvaluationLoaders):
        return None
    own, rest = metric.partition(prefix)[::2]
    names = [name for name, _ in eval_loader.items()]
    if any(rest.startswith(f"{name}_") for name in names):
        return None
    near = " or ".join(repr(f"{own}{prefix}{name}_{rest}") for name in names)
    return f"but eval_dataset holds several sets, whose metrics have their names in them. Watch {near}."
