"""What happens to the units whose windows close: reduce, unscale, rescale; then clip, judge, step.

The two halves are apart because guests may look at finished gradients in between. Whether gradients are finite is read
back once for all units together, and not at all for fused optimizers, which take the verdict as a flag on the device.
"""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from drivetrain.module.accumulation import scale_gradients
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.optim.reduction import average_gradients, copy_buffers_from_first_rank, sum_over_ranks

if TYPE_CHECKING:
    from drivetrain.optim.scheduler import OptimScheduler

_log = logging.getLogger(__name__)
LOG_EVERY = 100  # real steps between two lines about skipped updates of one unit


def finish_gradients(units: Sequence["OptimScheduler"]) -> None:
    """Make the gradients of these units the mean over their windows and over all ranks."""
    waiting = [unit for unit in units if unit.window.world > 1 and not unit.is_reduced and not unit.terrain.is_sharded]
    if waiting:
        _average(waiting)
    for unit in units:
        window, scaler = unit.window, unit.scaler
        if scaler is not None:
            scaler.unscale_(unit.optimizer)
            if unit.terrain.is_sharded:
                _agree_on_overflow(unit)
        total = None
        if window.needs_total:
            total = sum_over_ranks(window.items, unit.params[0].device, unit.terrain.group())
        factor = window.correction(total)
        if factor is not None:
            scale_gradients(unit.params, factor)


def apply_updates(units: Sequence["OptimScheduler"], logger: logging.Logger = _log) -> list[bool]:
    """Clip, judge and step these units; return which of them changed their parameters, as far as the host knows."""
    finite = _verdicts(units, [_measure_and_clip(unit) for unit in units])
    stepped = [_step(unit, verdict, logger) for unit, verdict in zip(units, finite)]
    scalers = {unit.scaling: unit.scaler for unit in units if unit.scaler is not None}
    for scaler in scalers.values():
        scaler.update()
    return stepped


def _average(units: Sequence["OptimScheduler"]) -> None:
    """Average over ranks what no reducer has averaged, all units of a model together."""
    for terrain in {unit.terrain: None for unit in units}:
        average_gradients([p for unit in units if unit.terrain is terrain for p in unit.params], terrain.group())
        if terrain.ddp is not None:
            copy_buffers_from_first_rank(terrain.ddp)


def _measure_and_clip(unit: "OptimScheduler") -> Tensor | None:
    """Clip a unit's own gradients and return their norm before clipping, None where nobody asks for it."""
    if unit.grad_clip is None and unit.nonfinite == "ignore" and unit.scaler is None:
        unit.last_grad_norm = None
        return None
    grads = [p.grad for p in unit.params if p.grad is not None]
    norm = get_total_norm(grads, unit.grad_norm_type)
    if is_dtensor(norm):
        norm = norm.full_tensor()  # type: ignore[attr-defined]
    if unit.grad_clip is not None:
        clip_grads_with_norm_(unit.params, unit.grad_clip, norm)
    unit.last_grad_norm = norm
    return norm


def _verdicts(units: Sequence["OptimScheduler"], norms: Sequence[Tensor | None]) -> list[bool | Tensor]:
    """Say for each unit whether its gradients are finite: a bool, or for fused optimizers a flag on the device."""
    norms = _agreed(units, norms)
    verdicts: list[bool | Tensor] = [True] * len(units)
    asked: list[tuple[int, Tensor]] = []
    for index, (unit, norm) in enumerate(zip(units, norms)):
        if norm is None or (unit.nonfinite == "ignore" and unit.scaler is None):
            continue
        if unit.skips_on_device:
            verdicts[index] = torch.logical_not(torch.isfinite(norm)).to(torch.float32)
        else:
            asked.append((index, norm))
    if len(asked) == 1:
        verdicts[asked[0][0]] = math.isfinite(asked[0][1].item())
    elif asked:
        device = asked[0][1].device
        flags = torch.stack([torch.isfinite(norm).to(device) for _, norm in asked]).tolist()  # one wait for all units
        for (index, _), flag in zip(asked, flags):
            verdicts[index] = flag
    return verdicts


def _agreed(units: Sequence["OptimScheduler"], norms: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the norms, infinite on all ranks where they are not finite on any: one exchange for the units of a model."""
    agreed = list(norms)
    for terrain in {unit.terrain: None for unit in units if unit.window.world > 1}:
        found = {
            index: norm
            for index, (unit, norm) in enumerate(zip(units, norms))
            if unit.terrain is terrain and norm is not None
        }
        if found:
            import torch.distributed as dist

            flags = torch.stack([(~torch.isfinite(norm)).float() for norm in found.values()])
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=terrain.group())
            for (index, norm), flag in zip(found.items(), flags.unbind()):
                agreed[index] = torch.where(flag > 0, math.inf, norm)
    return agreed


def _step(unit: "OptimScheduler", verdict: bool | Tensor, logger: logging.Logger) -> bool:
    unit.was_skipped = verdict if isinstance(verdict, Tensor) else not verdict
    if isinstance(verdict, Tensor):
        unit.step_unless(verdict)
        return verdict.device.type != "cpu" or not bool(verdict)
    if verdict:
        unit.optimizer.step()
        unit.count_update()
        return True
    if unit.nonfinite == "raise" and unit.scaler is None:
        raise FloatingPointError(
            f"unit {unit.name!r}: the gradient norm at real step {unit.real_step} is {unit.last_grad_norm}. "
            "nonfinite='skip' would leave this update out, nonfinite='ignore' would make it."
        )
    if unit.count_skip(LOG_EVERY):
        logger.warning(
            "unit %s: the gradients of real step %d are not finite; %d updates skipped so far.",
            unit.name,
            unit.real_step,
            unit.skipped_steps,
        )
    return False


def _agree_on_overflow(unit: "OptimScheduler") -> None:
    """Let all ranks know of an overflow in one rank's shard, so that their scales stay equal."""
    import torch.distributed as dist

    assert unit.scaler is not None
    for found in unit.scaler._found_inf_per_device(unit.optimizer).values():
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=unit.terrain.group())
