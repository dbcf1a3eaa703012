"""Check that a plan computes the same: the loss of a few samples, and the gradient and update of each parameter.

A plan may round differently, as far as its methods allow. Ranks and micro-batches get different samples, split as the plan splits them,
and the plain model gets all of them at once.

Models are compared in evaluation mode. A model that does not support this (cuDNN computes no gradients of recurrent layers then,
detectors return no losses) is compared in training mode, without dropout and with the running statistics of batch norms. Both
sides start with the same seed.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from drivetrain.core.types import Batch
from drivetrain.module.distributed_tensors import whole_tensor
from drivetrain.module.probing import attributes_set, restore_buffers_after
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.collectives import agree_any, all_gather_values, broadcast_from_master
from drivetrain.runtime.device import is_out_of_memory
from drivetrain.runtime.ranks import data_rank, get_num_processes
from drivetrain.runtime.seeds import capture_rng, restore_rng, same_state, set_seed
from drivetrain.strategy.apply import Application
from drivetrain.strategy.batching import BatchSplit
from drivetrain.strategy.resolve import ResolvedPlan
from drivetrain.strategy.task import TrainingTask
from drivetrain.strategy.trial.per_parameter import (
    Finding,
    PerParameter,
    compare,
    gradients_of,
    norm_of,
    plain_numbers,
    relative_errors,
    watch_movements,
)
from drivetrain.strategy.trial.report import OutcomeKind, ReferenceResults

CHECK_SAMPLES, MOST_SAMPLES = 8, 32
LEVELS = ("exact", "tf32", "mixed", "low")
LOSS_TOLERANCES = {"exact": 1e-4, "tf32": 2e-3, "mixed": 2e-2, "low": 5e-2}
"""How far a loss may be from the plain model's, relative to max(1, |loss|), by the loosest method of the plan."""
TOLERANCES = {"exact": 2e-3, "tf32": 2e-2, "mixed": 0.15, "low": 0.25}
"""How far one parameter's gradient may be from the plain model's, relative to its norm."""
_SEED = 0
NOT_EXACT = "not exact:"
"""Begins a note that the user is warned with: the plan is right, and divides a loss that cannot be divided exactly."""
_ROUNDING = 1e-5
"""Where the loss of a batch differs by more than this from the mean of the losses of its halves, it is not a mean over samples."""
_PARTS = 8.0
"""How much further than two halves the parts of a plan may be from the whole, for a loss that cannot be divided exactly."""


def use_weights_of_first_rank(model: nn.Module) -> None:
    """Give all ranks the weights of rank 0, as applying a plan does: without a seed each rank has built a model of its own."""
    for tensor in (*model.parameters(), *model.buffers()) if get_num_processes() > 1 else ():
        if not tensor.is_meta:
            tensor.detach().copy_(broadcast_from_master(tensor.detach()))


@dataclass(frozen=True, kw_only=True)
class Share:
    """The samples that a plan is checked on, and how its passes divide them."""

    samples: int
    """Different samples, all of which the plain model gets at once."""
    rows: int
    """Samples of one pass on one rank."""
    parts: int
    """Passes over all data ranks in one update."""

    def rows_of(self, part: int) -> list[int]:
        """Return the samples of one pass. With more passes than samples they repeat."""
        return [(part * self.rows + index) % self.samples for index in range(self.rows)]


def share_of_plan(plan: ResolvedPlan, batch: BatchSplit | None) -> Share:
    """Return how a check divides its samples: as in training, with fewer in each pass."""
    pieces = math.lcm(*(method.sample_multiple(config, plan.site) for _, method, config in plan.steps))
    accumulation = 1 if batch is None else batch.accumulation
    parts = plan.data_ranks * accumulation
    rows = -(-max(1, CHECK_SAMPLES // parts) // pieces) * pieces
    if batch is not None and pieces == 1:
        rows = max(count for count in range(1, min(rows, batch.micro) + 1) if batch.micro % count == 0)
    most = max(MOST_SAMPLES, rows)
    samples = max(count for count in range(1, min(most, rows * parts) + 1) if rows * parts % count == 0)
    return Share(samples=samples, rows=rows, parts=parts)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of one step of a plan."""

    loss: float
    norm: float
    each: PerParameter = field(default_factory=PerParameter)
    is_scaled: bool = False
    """Whether gradients were scaled for float16, so that the first ones may overflow."""
    is_counted: bool = False
    """Whether it is known how much the losses of parts of a batch count, so that any gradient must come out exactly."""
    is_whole: bool = False
    """Whether the losses of parts were joined to that of the whole batch by what they are means over."""


def plain_number(value: Tensor) -> float:
    """Return a scalar as a number, also if it is sharded. This synchronizes the host."""
    return float(whole_tensor(value.detach()))


@contextmanager
def comparing(model: nn.Module, *, quiet: bool = False) -> Iterator[None]:
    """Put a model into evaluation mode or, with `quiet`, into training mode without dropout. Modes and random states are restored."""
    modules, random_state = list(model.modules()), capture_rng()
    changes: list[tuple[object, str, object]] = [(module, "training", module.training) for module in modules]
    if quiet:
        fields = [(module, name, value) for module in modules for name, value in vars(module).items()]
        changes += [
            (module, name, 0.0) for module, name, value in fields if "drop" in name and isinstance(value, float)
        ]
    try:
        with attributes_set(changes), restore_buffers_after(model):
            model.train(quiet)
            for module in modules:
                if isinstance(module, _DropoutNd | _NormBase):
                    module.eval()
            set_seed(_SEED)
            yield
    finally:
        restore_rng(random_state)


# The plain model.


def fitting_reference(
    model: nn.Module, task: TrainingTask, device: torch.device, samples: int, *, steady: bool = False
) -> ReferenceResults | None:
    """Do what `compute_reference_results` does, with the model moved to the device. None if it does not fit on some rank."""
    found = None
    try:
        found = compute_reference_results(model.to(device), task, device, samples, steady=steady)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        model.zero_grad()
    return None if agree_any(found is None) else found


def compute_reference_results(
    model: nn.Module, task: TrainingTask, device: torch.device, samples: int, *, steady: bool = False
) -> ReferenceResults:
    """Return the expected results of a step from the plain model, which is unchanged afterwards, without gradients."""
    try:
        with comparing(model):
            return _yardstick(model, task, device, samples, steady=steady)
    except Exception as error:  # whatever else a model raises in evaluation mode, it may work in training mode
        if is_out_of_memory(error):
            raise
        model.zero_grad()
        with comparing(model, quiet=True):
            return replace(_yardstick(model, task, device, samples, steady=False), is_quiet=True)


def _yardstick(
    model: nn.Module, task: TrainingTask, device: torch.device, samples: int, *, steady: bool
) -> ReferenceResults:
    batch = task.batch(samples)

    def loss_of(rows: Batch, seed: int = _SEED) -> Tensor:
        set_seed(seed)
        inputs = task.prepared(rows, device)
        return task.loss(inputs, task.call(model, inputs))

    set_seed(_SEED)
    untouched = capture_rng()
    loss = loss_of(batch)
    draws = not same_state(untouched, capture_rng())
    loss.backward()
    value = plain_number(loss)
    each = plain_numbers(model, task.recipe())
    model.zero_grad()
    each = replace(each, rounding=_rounding(model, each, device, lambda: loss_of(batch)))
    error, is_random = 0.0, False
    if draws:
        with torch.no_grad():
            is_random = abs(plain_number(loss_of(batch, _SEED + 1)) - value) > 1e-5 * max(1.0, abs(value))
    if samples > 1 and not is_random:  # the losses and gradients of two halves, joined by their samples
        total, middle, with_gradients = 0.0, samples // 2, not task.is_counted
        with torch.set_grad_enabled(with_gradients):
            for rows in (range(middle), range(middle, samples)):
                half = loss_of(task.rows(rows)) * (len(rows) / samples)
                total += plain_number(half)
                if with_gradients:
                    half.backward()
        error = abs(total - value) / max(abs(value), 1e-6)
        if with_gradients:
            each = replace(each, split=relative_errors(each.gradients, gradients_of(model), "exact", 1e-5))
        model.zero_grad()
    return ReferenceResults(
        loss=value,
        gradient_norm=norm_of(each.gradients),
        samples=samples,
        each=each,
        split_error=error,
        is_steady=_is_deterministic_in_training(model, loss_of, batch, value) if steady else None,
        is_random=is_random,
    )


def _rounding(
    model: nn.Module, each: PerParameter, device: torch.device, loss_of: Callable[[], Tensor]
) -> dict[str, float]:
    """Return what plain autocast in bfloat16 does to each gradient: models differ, and a right plan is not rejected for it."""
    try:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        return relative_errors(each.gradients, gradients_of(model), "mixed")
    except Exception:  # a model that does not run so, or a device without the type: the usual tolerances hold
        return {}
    finally:
        model.zero_grad()


def _is_deterministic_in_training(
    model: nn.Module, loss_of: Callable[[Any], Tensor], batch: Batch, loss: float
) -> bool:
    """Return whether training mode gives the loss of evaluation: no dropout and no statistics of the batch."""
    set_seed(_SEED)
    random = capture_rng()
    model.train()
    try:
        with restore_buffers_after(model), torch.no_grad():
            other = plain_number(loss_of(batch))
    except Exception:  # a model that cannot do this is compared in evaluation mode
        return False
    return abs(other - loss) <= 1e-5 * max(1.0, abs(loss)) and same_state(random, capture_rng())


# The plan.


def planned_step(
    ctx: Application,
    take: Callable[[list[int]], Batch],
    share: Share,
    call: Callable[..., Any],
    *,
    training: bool = False,
    quiet: bool = False,
    repeats: int = 1,
) -> Measured:
    """Run one update of a planned model on the samples of a `Share`, and return the gradients and updates of each parameter.

    `take` returns samples by their numbers.

    A pipeline runs forward and backward in one call, in training mode only: there its shell trains while the layers evaluate. `quiet` is
    how the plain model was compared, see `comparing`. `repeats` takes the samples of a pass several times, so that it has the shape of
    training.
    """
    stepping = ctx.stepping
    length, rank = stepping.window.length, data_rank()
    is_counted = ctx.count_items is not None or ctx.items.kind != "unknown"
    total = items = 0.0
    with comparing(ctx.model, quiet=quiet):
        if training:
            ctx.model.train()
        if stepping.pipeline is not None:
            ctx.model.training = True
        try:
            for index in range(length):
                set_seed(_SEED)
                rows = share.rows_of(index * (share.parts // length) + rank) * repeats
                inputs = ctx.prepared(take(rows))
                amount = float(stepping.amount(stepping.items_of(inputs)))
                total, items = total + amount * plain_number(_backward(ctx, inputs, call)), items + amount
                if index < length - 1:
                    _next(ctx)
            if ctx.optimizer is not None:
                stepping.stepper.finish()
            gradients = _of_all_stages(ctx, gradients_of(ctx.model, ctx.optimizer))
            with watch_movements(ctx.model, ctx.optimizer) as movements:
                _next(ctx)
            movements = {} if ctx.optimizer is None else _of_all_stages(ctx, movements)
        finally:
            unwrap(ctx.model).zero_grad()
        totals, amounts = zip(*all_gather_values((total, items)))
    return Measured(
        loss=sum(totals) / max(sum(amounts), 1e-9),
        norm=norm_of(gradients),
        each=PerParameter(gradients=gradients, movements=movements),
        is_scaled=ctx.scaler is not None,
        is_counted=is_counted,
        is_whole=is_counted and not stepping.is_sum,
    )


def _backward(ctx: Application, inputs: object, call: Callable[..., Any]) -> Tensor:
    """Run forward and backward of one micro-batch and return its loss."""
    result = ctx.stepping.loss_of(call, inputs)
    loss: Tensor = result[0] if isinstance(result, list | tuple) else result
    loss.backward()
    return loss


def _of_all_stages(ctx: Application, own: dict[str, str]) -> dict[str, str]:
    """Return what the ranks of all stages of a pipeline found."""
    if ctx.stepping.pipeline is None:
        return own
    return {name: text for part in all_gather_values(own) for name, text in part.items()}


def _next(ctx: Application) -> None:
    """End a micro-batch as a hand-written loop does."""
    if ctx.optimizer is not None:
        ctx.optimizer.step()
        ctx.optimizer.zero_grad()
    else:
        ctx.stepping.begin(None)


def verdict(found: Measured, expected: ReferenceResults, plan: ResolvedPlan) -> tuple[OutcomeKind, str]:
    """Return whether a plan's loss and the gradients and updates of each parameter are as expected, with the numbers."""
    loss, norm = found.loss, found.norm
    numbers = (
        f"loss {loss:.6g}, {expected.source} {expected.loss:.6g}; gradient norm {norm:.4g}, {expected.source} "
        f"{expected.gradient_norm:.4g}"
    )
    if not math.isfinite(expected.loss):
        return "error", f"the loss is not finite without the plan either: {numbers}"
    overflows = found.is_scaled and not math.isfinite(norm)  # the first scales of float16 may be too large
    if not (math.isfinite(loss) and (math.isfinite(norm) or overflows)):
        return "nonfinite", numbers
    if expected.is_random:
        return "ok", f"not compared, because the loss depends on random numbers that the model draws: {numbers}"
    level = max((method.numerics for _, method, _ in plan.steps), key=LEVELS.index, default="exact")
    tolerance, allowed = TOLERANCES[level], LOSS_TOLERANCES[level] * max(1.0, abs(expected.loss))
    is_comparable = found.is_whole or expected.split_error <= _ROUNDING
    if is_comparable and abs(loss - expected.loss) > allowed:
        return "wrong", f"the plan changes the loss: {numbers} (allowed {allowed:g})"
    if overflows:
        return "ok", f"{numbers}; gradients overflow at the first scale of float16, so they were not compared"
    if changing := [method.name for _, method, _ in plan.steps if method.changes_gradient]:
        return _check_trains_anything(found, numbers, changing)
    findings = compare(expected.each, found.each, level, tolerance)
    by_loss = [] if found.is_counted else [finding for finding in findings if _is_by_loss(finding, expected, tolerance)]
    if by_loss:  # a property of the loss, of which the user is warned
        worst = max(by_loss, key=lambda finding: finding.error)
        findings = [finding for finding in findings if finding not in by_loss]
        numbers = (
            f"{NOT_EXACT} the loss is not a mean over samples, so what the parts of a batch add up to differs from the whole batch: the "
            f"loss of two halves by {expected.split_error:.2%}, and in this plan {worst}. Pass count_items=, a function that counts what "
            f"the loss is a mean over, or compute a loss that is a mean over samples. {numbers}"
        )
    if findings:
        more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
        return "wrong", f"the plan changes gradients or updates: {findings[0]}{more}; {numbers}"
    counted = len(expected.each.gradients)
    return "ok", f"{numbers}; {counted} parameters compared" if counted else numbers


def _is_by_loss(finding: Finding, expected: ReferenceResults, tolerance: float) -> bool:
    """Return whether a difference comes from dividing the batch, as it does in the plain model too."""
    usual = _PARTS * expected.each.split.get(finding.name, 0.0)
    return not finding.is_lost and (finding.error <= usual or (finding.is_movement and usual > tolerance))


def _check_trains_anything(found: Measured, numbers: str, changing: list[str]) -> tuple[OutcomeKind, str]:
    """Return whether a plan that trains something else by design trains anything: there is no plain gradient to compare with."""
    names = ", ".join(changing)
    if not found.norm > 0:
        return "wrong", f"{names} changes the gradient, and no parameter gets one: {numbers}"
    if found.each.movements and not norm_of(found.each.movements) > 0:
        return "wrong", f"{names} changes the gradient, and no parameter moves: {numbers}"
    return "ok", f"{numbers}; gradients were not compared, because {names} changes them by design"


def train_window(ctx: Application, batch: Batch, call: Callable[..., Any]) -> Tensor:
    """Run one update as a hand-written loop does, over the plan's micro-batches, and return the last loss."""
    for _ in range(ctx.stepping.window.length):
        loss = _backward(ctx, ctx.prepared(batch), call)
        _next(ctx)
    if ctx.optimizer is None:
        unwrap(ctx.model).zero_grad()
    return loss.detach()
