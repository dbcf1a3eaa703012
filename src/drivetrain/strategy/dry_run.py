"""Try a plan on a copy of the model before it touches the model itself: right, finite, and without an error.

The copy is evaluated on a few samples before and after the plan is applied; loss and gradient norm must agree as closely as the plan's
methods promise. Then it takes one training step. All ranks learn the outcome of all; random states are put back.
"""

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.wrapping import unwrap
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.runtime.seeds import capture_rng, restore_rng
from drivetrain.strategy.apply import PlanContext, prepared_input
from drivetrain.strategy.resolve import ResolvedPlan
from drivetrain.strategy.value import Failure

TOLERANCES = {"exact": 1e-4, "tf32": 2e-3, "mixed": 2e-2, "low": 5e-2}
"""How far a loss may be from the plain model's, relative to max(1, |loss|), by the loosest method of the plan."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a trial needs, as callables: `strategy` knows neither loaders nor loops."""

    make: Callable[[nn.Module], PlanContext]
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


def try_plan(model: nn.Module, plan: ResolvedPlan, run: DryRun) -> Outcome:
    """Run one trial on all ranks and return what they agree on."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        return Outcome(notes=("dry run: left out, because the model is on the meta device",))
    random_state = capture_rng()
    try:
        trial = copy.deepcopy(model)
    except Exception as error:  # a model may hold anything; one that cannot be copied cannot be tried
        return Outcome(notes=(f"dry run: left out, because the model cannot be copied ({error})",))
    kind, message = "ok", ""
    notes: tuple[str, ...] = ()
    try:
        kind, message, notes = _run(trial, plan, run)
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
            return Outcome(failure=Failure(kind=other, message=f"rank {rank}: {text}"), notes=notes)
    return Outcome(notes=notes)


def _run(trial: nn.Module, plan: ResolvedPlan, run: DryRun) -> tuple[str, str, tuple[str, ...]]:
    device = plan.site.device
    trial.to(device)
    mode = trial.training
    trial.eval()
    inputs = prepared_input(run.batch, device, run.prepare_input)
    expected, expected_norm = _loss_and_norm(trial, inputs, run, run.loss)
    trial.zero_grad()
    trial.train(mode)
    ctx = run.make(trial)
    ctx.stepping._synchronise(True)
    ctx.model.eval()
    batch = ctx.prepared(run.batch)
    found, norm = _loss_and_norm(ctx.model, batch, run, ctx.stepping.plain_loss)
    unwrap(ctx.model).zero_grad()
    tolerance = max((TOLERANCES[method.numerics] for _, method, _ in plan.steps), default=TOLERANCES["exact"])
    numbers = f"loss {found:.6g}, plain {expected:.6g}; gradient norm {norm:.4g}, plain {expected_norm:.4g}"
    if not (math.isfinite(found) and math.isfinite(norm)):
        return ("nonfinite" if math.isfinite(expected) else "error"), numbers, ()
    if abs(found - expected) > tolerance * max(1.0, abs(expected)):
        return "wrong", f"the plan changes the loss: {numbers} (allowed {tolerance:g})", ()
    allowed = min(10 * tolerance, 0.1)
    if ctx.scaler is None and abs(norm - expected_norm) > allowed * max(expected_norm, 1e-6):
        return "wrong", f"the plan changes the gradient: {numbers} (allowed {allowed:g})", ()
    ctx.model.train(mode)
    for _ in range(ctx.stepping.window.length):
        inputs = ctx.prepared(run.batch)
        loss = _first(ctx.stepping.loss(inputs, run.call(ctx.model, inputs)))
        loss.backward()
        if ctx.optimizer is not None:
            ctx.optimizer.step()
            ctx.optimizer.zero_grad()
    if not math.isfinite(float(loss.detach())):
        return "nonfinite", f"the first training step has the loss {float(loss.detach())}", ()
    return "ok", "", (f"dry run: {numbers}",)


def _loss_and_norm(model: nn.Module, batch: Any, run: DryRun, loss_func: Callable[..., Any]) -> tuple[float, float]:
    loss = _first(loss_func(batch, run.call(model, batch)))
    loss.backward()
    total = 0.0
    for parameter in unwrap(model).parameters():
        if parameter.grad is not None:
            norm: Any = parameter.grad.detach().float().norm()
            total += float(norm.full_tensor() if is_dtensor(norm) else norm) ** 2
    return float(loss.detach()), math.sqrt(total)


def _first(loss: Any) -> Tensor:
    return loss[0] if isinstance(loss, list | tuple) else loss
