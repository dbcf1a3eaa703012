"""Right before fast: the loss and the gradient of a few samples, before a plan is applied and after, and whether they agree.

A plan may round differently, as far as its methods say; it may not compute something else. The same comparison serves trials and the dry
run of a loaded plan.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.wrapping import unwrap
from drivetrain.strategy.apply import Application
from drivetrain.strategy.resolve import ResolvedPlan
from drivetrain.strategy.trial.values import OutcomeKind, Yardstick

CHECK_SAMPLES = 8
TOLERANCES = {"exact": 1e-4, "tf32": 2e-3, "mixed": 2e-2, "low": 5e-2}
"""How far a loss may be from the plain model's, relative to max(1, |loss|), by the loosest method of the plan."""


def first_loss(loss: Any) -> Tensor:
    """Return the loss of a loss function's result, which may be a sequence that begins with it."""
    return loss[0] if isinstance(loss, list | tuple) else loss


def plain_number(value: Tensor) -> float:
    """Return a scalar as a number, also where it is spread over ranks; the host waits for the device here."""
    value = value.detach()
    return float(value.full_tensor() if is_dtensor(value) else value)  # type: ignore[attr-defined]


def loss_and_norm(
    model: nn.Module, inputs: Any, call: Callable[..., Any], loss_func: Callable[..., Any], pipe_group: Any = None
) -> tuple[float, float]:
    """Return the loss of some inputs and the norm of its gradient, which stays in the parameters."""
    loss = first_loss(loss_func(inputs, call(model, inputs)))
    loss.backward()
    total = 0.0
    for parameter in unwrap(model).parameters():
        if parameter.grad is not None:
            total += plain_number(parameter.grad.detach().float().norm()) ** 2
    if pipe_group is not None:  # every stage has gradients of its own layers only
        total = _sum_over(total, pipe_group, loss.device)
    return plain_number(loss), math.sqrt(total)


def _sum_over(value: float, group: Any, device: torch.device) -> float:
    import torch.distributed as dist

    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, group=group)
    return float(number)


def check_size(plan: ResolvedPlan, available: int) -> int:
    """Return how many samples to compare on: eight or all there are, and for a pipeline as many as it can cut."""
    pieces = math.lcm(*(method.sample_multiple(config, plan.site) for _, method, config in plan.steps))
    return -(-min(CHECK_SAMPLES, available) // pieces) * pieces


def planned_loss_and_norm(
    ctx: Application, batch: Any, call: Callable[..., Any], training: bool
) -> tuple[float, float]:
    """Return loss and gradient norm of a planned model for what a loader yields; its gradients are cleared afterwards.

    A pipeline runs forward and backward in one call, in training mode only: there its shell trains while the layers evaluate.
    """
    ctx.stepping._synchronise(True)
    mode = ctx.model.training
    ctx.model.train(training)
    group = None
    if ctx.stepping.pipeline is not None:
        ctx.model.training = True
        group = ctx.mesh.get_group("pipe")
    try:
        with ctx.stepping.unweighted():
            return loss_and_norm(ctx.model, ctx.prepared(batch), call, ctx.stepping.plain_loss, group)
    finally:
        unwrap(ctx.model).zero_grad()
        ctx.model.train(mode)


def verdict(
    found: tuple[float, float], expected: Yardstick, plan: ResolvedPlan, has_scaler: bool
) -> tuple[OutcomeKind, str]:
    """Return whether a plan's loss and gradient norm are what they should be, and with which numbers."""
    loss, norm = found
    numbers = (
        f"loss {loss:.6g}, {expected.source} {expected.loss:.6g}; gradient norm {norm:.4g}, {expected.source} "
        f"{expected.gradient_norm:.4g}"
    )
    if not math.isfinite(expected.loss):
        return "error", f"the loss is not finite without the plan either: {numbers}"
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "nonfinite", numbers
    least = TOLERANCES["mixed" if expected.is_magnified else "exact"]
    tolerance = max([least, *(TOLERANCES[method.numerics] for _, method, _ in plan.steps)])
    if abs(loss - expected.loss) > tolerance * max(1.0, abs(expected.loss)):
        return "wrong", f"the plan changes the loss: {numbers} (allowed {tolerance:g})"
    allowed = min(10 * tolerance, 0.1)
    # Unscaled float16 gradients may underflow: their norm says nothing.
    if not has_scaler and abs(norm - expected.gradient_norm) > allowed * max(expected.gradient_norm, 1e-6):
        return "wrong", f"the plan changes the gradient: {numbers} (allowed {allowed:g})"
    return "ok", numbers


def train_window(ctx: Application, batch: Any, call: Callable[..., Any]) -> Tensor:
    """Make one update as a hand-written loop does, from as many micro-batches as the plan has; return the last loss."""
    for _ in range(ctx.stepping.window.length):
        inputs = ctx.prepared(batch)
        loss = first_loss(ctx.stepping.loss(inputs, call(ctx.model, inputs)))
        loss.backward()
        if ctx.optimizer is not None:
            ctx.optimizer.step()
            ctx.optimizer.zero_grad()
        else:
            ctx.stepping.begin(None)
    if ctx.optimizer is None:
        unwrap(ctx.model).zero_grad()
    return loss.detach()
