"""Try a given plan before it changes the model: the numbers agree and are finite, and nothing raises.

A copy, or a smaller model of the same classes, takes one step as the plain model, one with the plan, and one in training mode
(`plan_check`). All ranks get the results of all ranks, and random states are restored.

On one process this happens in the process itself, which is quick. On several, `verify_plan` starts separate processes, one for each
rank, so that a rank that dies or hangs costs the plan and not the job, unless the task cannot be sent to another process.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from drivetrain.core import errors
from drivetrain.core.errors import ConfigError
from drivetrain.module.loss_items import UNKNOWN, FollowedLoss, agreed_items, follow_loss
from drivetrain.module.probing import copy_model
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.batching import BatchSplit
from drivetrain.strategy.plan_check import PlainDoesNotFit, compare_plan, compare_with_fewer_blocks, on_meta
from drivetrain.strategy.snapshot import ProcessSettings
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.measuring import failure_of, release_unused_memory
from drivetrain.strategy.trial.process import reject_inside_trial
from drivetrain.strategy.trial.report import OutcomeKind
from drivetrain.strategy.value import Failure, Strategy

VERIFY_SECONDS = 300.0
"""How long processes that try a given plan may take."""

_FOLLOWED = (5, 7)
"""How many samples the two batches have on which a loss is followed."""
_LARGE = 1 << 28
"""A model of more elements is followed on fake tensors first."""


@dataclass(frozen=True, kw_only=True)
class DryRunOutcome:
    """The result of a dry run."""

    failure: Failure | None = None
    notes: tuple[str, ...] = ()
    """Why no trial was made, or what it found."""


def verify_plan(
    plan: Strategy,
    task: TrainingTask,
    *,
    device: torch.device,
    batch: BatchSplit | None = None,
    time_limit: float = VERIFY_SECONDS,
) -> DryRunOutcome:
    """Try a given plan on all ranks and return the common result. Every rank calls it with the same arguments.

    `batch` is how the global batch is split; None lets the task's size and the plan decide. What the user wrote wrongly raises.
    """
    reject_inside_trial("verify_plan")
    if batch is not None:
        plan = replace(plan, batch=batch)
    outcome = _verify_in_children(plan, task, device, time_limit) if get_num_processes() > 1 else None
    return outcome or try_plan(plan, task, device=device)


def _verify_in_children(
    plan: Strategy, task: TrainingTask, device: torch.device, time_limit: float
) -> DryRunOutcome | None:
    """Return what processes of their own found, or None where the task cannot be sent to them."""
    from drivetrain.strategy.trial.running import TrialPool

    with TrialPool(task, device=device) as pool:
        result = pool.obstacle()
        if result is not None and result.error_class == "Unsendable":
            return None
        steps = 0 if task.model is not None and on_meta(task.model) else 1  # only a smaller model is tried
        result = result or pool.run(plan, steps=steps, deadline=time.monotonic() + time_limit)
    if result.outcome == "ok":
        return DryRunOutcome(notes=tuple(f"dry run: {note}" for note in result.notes))
    mistake = getattr(errors, result.error_class, None)
    if isinstance(mistake, type) and issubclass(mistake, ConfigError):
        raise mistake(result.message)
    return DryRunOutcome(failure=Failure(kind=result.outcome, message=result.message))


def try_plan(plan: Strategy, task: TrainingTask, *, device: torch.device) -> DryRunOutcome:
    """Run one dry run in the ranks themselves and return the common result. Applying the plan repeats its warnings."""
    reject_inside_trial("the dry run of a plan")
    kind: OutcomeKind | None
    with warnings.catch_warnings(action="ignore"):
        random_state, settings = capture_rng(), ProcessSettings.capture()
        try:
            model = task.model if task.model is not None and on_meta(task.model) else task.build()
        except Exception as error:  # a model may hold anything; one that cannot be copied cannot be tried
            return DryRunOutcome(notes=(f"dry run: skipped, because the model cannot be copied ({error})",))
        try:
            try:
                kind, message = compare_plan(plan, task, model, device)
            except PlainDoesNotFit:
                model = model if on_meta(model) else model.cpu()
                release_unused_memory(device)
                kind, message = compare_with_fewer_blocks(plan, task, model, device)
        except ConfigError:
            raise
        except Exception as error:  # whatever goes wrong in the user's model or a kernel is the outcome of the trial
            kind, message = failure_of(error)
        finally:
            del model
            release_unused_memory(device)
            restore_rng(random_state)
            settings.restore()
    for rank, (other, text) in enumerate(all_gather_values((kind, message))):
        if other not in ("ok", None):
            return DryRunOutcome(failure=Failure(kind=other, message=f"rank {rank}: {text}"))
    return DryRunOutcome(notes=(f"dry run: {message if kind else f'skipped, because {message}'}",))


# What the loss is a mean over.


def with_counted_loss(task: TrainingTask) -> TrainingTask:
    """Return the task together with what its loss is a mean over, found by running a few samples through the plain model."""
    model = task.model
    if model is None or task.loss_func is None or task.samples is None or task.is_counted:
        return task
    is_large = sum(parameter.numel() for parameter in model.parameters()) > _LARGE
    ways: list[Callable[[TrainingTask, nn.Module, int], FollowedLoss]] = [_on_model]
    if is_large:
        ways = [_on_fake_tensors, partial(_on_model, copied=False)]
    if on_meta(model):
        ways = [_on_fake_tensors]
    random_state = capture_rng()
    try:
        for way in ways:
            items = agreed_items(*(way(task, model, rows) for rows in _FOLLOWED))
            if items.kind != "unknown":
                return replace(task, items=items)
    finally:
        restore_rng(random_state)
    return task


def _on_model(task: TrainingTask, model: nn.Module, rows: int, copied: bool = True) -> FollowedLoss:
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        model = copy_model(model) if copied else model
        inputs = task.prepared(task.batch(rows), place)
    except Exception:  # a model that cannot be copied, or a user's function, which raises again in the first step
        return UNKNOWN, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step warns again
        return follow_loss(model, inputs, rows, lambda: task.loss(inputs, task.call(model, inputs)))


def _on_fake_tensors(task: TrainingTask, model: nn.Module, rows: int) -> FollowedLoss:
    """Follow the loss without memory and arithmetic; code that reads values cannot be followed so."""
    from drivetrain.strategy.profile.fake_world import fake_copy, prepared_inputs
    from drivetrain.strategy.profile.torch_private import fake_mode, is_fake

    try:
        mode = fake_mode()
        copied, inputs = fake_copy(model, mode), prepared_inputs(task, rows, mode)

        def loss() -> Tensor:
            with mode:
                return task.loss(inputs, task.call(copied, inputs))

        found = follow_loss(copied, inputs, rows, loss)
    except Exception:  # a model that cannot be copied, or data that cannot be prepared on the host
        return UNKNOWN, []
    return (UNKNOWN, []) if is_fake(found[0].weight) else found
