"""Try a plan that somebody gives before it touches the model: right, finite, and without an error.

A copy is evaluated on a few samples before and after the plan is applied; loss and gradient norm must agree as closely as the plan's
methods promise. Then it takes one training step. All ranks learn the outcome of all; random states are put back.

On one process this happens in the process itself, which is quick; running out of device memory is caught. On several, `verify_plan`
has it done by processes of its own, one for each rank, so that a rank that dies or hangs costs the plan and not the job; only a
task that cannot be sent to another process is tried on the spot.
"""

import copy
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from drivetrain.core import errors
from drivetrain.core.errors import ConfigError
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.apply import Application, prepared_input
from drivetrain.strategy.batching import BatchPlan
from drivetrain.strategy.resolve import ResolvedPlan, resolve_plan
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.checking import (
    check_size,
    loss_and_norm,
    plain_number,
    planned_loss_and_norm,
    train_window,
    verdict,
)
from drivetrain.strategy.trial.process import refuse_inside_trial
from drivetrain.strategy.trial.values import Yardstick
from drivetrain.strategy.value import Failure, Strategy

VERIFY_SECONDS = 300.0
"""How long processes that try a given plan may take."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a trial needs, as callables: `strategy` knows neither loaders nor loops."""

    make: Callable[[nn.Module], Application]
    """Applies the plan to a model and returns the finished context."""
    batch: Any
    """A few samples as a loader would yield them, the same on all ranks."""
    call: Callable[[nn.Module, Any], Any]
    """Calls a model with its input."""
    loss: Callable[[Any, Any], Any]
    """The user's loss of input and output."""
    prepare_input: Callable[[Any, torch.device], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial showed."""

    failure: Failure | None = None
    notes: tuple[str, ...] = ()
    """Why no trial was made, or what it found."""


def verify_plan(
    plan: Strategy,
    task: TrainingTask,
    *,
    device: torch.device,
    batch: BatchPlan | None = None,
    time_limit: float = VERIFY_SECONDS,
) -> Outcome:
    """Try a given plan on all ranks and return what they agree on; every rank calls it with the same arguments.

    `batch` is how the global batch is split; None lets the task's size and the plan decide. What the user wrote wrongly raises.
    """
    refuse_inside_trial("verify_plan")
    if task.model is not None and _on_meta(task.model):
        return Outcome(notes=("dry run: left out, because the model is on the meta device",))
    if get_num_processes() > 1:
        outcome = _verify_in_children(plan if batch is None else replace(plan, batch=batch), task, device, time_limit)
        if outcome is not None:
            return outcome
    resolved = resolve_plan(plan, model=task.model, device=device)
    run = DryRun(
        make=lambda model: task.shaped(model, resolved, batch),
        batch=task.batch(check_size(resolved, task.sample_count)),
        call=task.call,
        loss=task.loss,
        prepare_input=task.prepare_input,
    )
    return try_plan(task.build() if task.model is None else task.model, resolved, run)


def _verify_in_children(plan: Strategy, task: TrainingTask, device: torch.device, time_limit: float) -> Outcome | None:
    """Return what processes of their own found, or None where the task cannot be sent to them."""
    from drivetrain.strategy.trial.running import NoProcess, TrialPool

    with TrialPool(task, device=device) as pool:
        try:
            if pool.obstacle() is not None:
                return None
            result = pool.run(plan, steps=1, deadline=time.monotonic() + time_limit)
        except NoProcess as error:
            result = error.result
    if result.outcome == "ok":
        return Outcome(notes=tuple(f"dry run: {note}" for note in result.notes))
    mistake = getattr(errors, result.error_class, None)
    if isinstance(mistake, type) and issubclass(mistake, ConfigError):
        raise mistake(result.message)
    return Outcome(failure=Failure(kind=result.outcome, message=result.message))


def try_plan(model: nn.Module, plan: ResolvedPlan, run: DryRun) -> Outcome:
    """Run one trial on all ranks, in the ranks themselves, and return what they agree on."""
    refuse_inside_trial("the dry run of a plan")
    if _on_meta(model):
        return Outcome(notes=("dry run: left out, because the model is on the meta device",))
    random_state = capture_rng()
    try:
        trial = copy.deepcopy(model)
    except Exception as error:  # a model may hold anything; one that cannot be copied cannot be tried
        return Outcome(notes=(f"dry run: left out, because the model cannot be copied ({error})",))
    kind, message = "ok", ""
    try:
        kind, message = _run(trial, plan, run)
    except ConfigError:
        raise
    except torch.OutOfMemoryError as error:
        kind, message = "oom", str(error).splitlines()[0]
    except Exception as error:  # whatever goes wrong in the user's model or a kernel is the outcome of the trial
        kind, message = "error", f"{type(error).__name__}: {error}"
    finally:
        del trial
        gc.collect()
        if plan.site.device.type == "cuda":
            torch.cuda.empty_cache()
        restore_rng(random_state)
    for rank, (other, text) in enumerate(all_gather_values((kind, message))):
        if other != "ok":
            return Outcome(failure=Failure(kind=other, message=f"rank {rank}: {text}"))
    return Outcome(notes=(f"dry run: {message}",))


def _run(trial: nn.Module, plan: ResolvedPlan, run: DryRun) -> tuple[str, str]:
    device = plan.site.device
    trial.to(device)
    mode = trial.training
    trial.eval()
    loss, norm = loss_and_norm(trial, prepared_input(run.batch, device, run.prepare_input), run.call, run.loss)
    trial.zero_grad()
    trial.train(mode)
    ctx = run.make(trial)
    found = planned_loss_and_norm(ctx, run.batch, run.call, training=False)
    kind, numbers = verdict(found, Yardstick(loss=loss, gradient_norm=norm), plan, ctx.scaler is not None)
    if kind != "ok":
        return kind, numbers
    ctx.model.train(mode)
    last = plain_number(train_window(ctx, run.batch, run.call))
    if not math.isfinite(last):
        return "nonfinite", f"the first training step has the loss {last}"
    return "ok", numbers


def _on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
