"""Saves and restores a unit: optimizer, scaler, clock and the gradients of a window in progress."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import StateDict
from drivetrain.module.distributed_tensors import is_dtensor

if TYPE_CHECKING:
    from drivetrain.optim.scheduler import OptimScheduler

_CLOCK = ("real_step", "update_count", "skipped_steps", "param_names", "partial")


def save_unit(unit: "OptimScheduler") -> StateDict:
    """Return the state of a unit as plain containers and tensors."""
    unit.take_in_groups()
    return {
        "optimizer": unit.optimizer.state_dict(),
        "scaler": unit.scaling.state_dict(),
        "real_step": unit.real_step,
        "update_count": unit.update_count,
        "skipped_steps": unit.skipped_steps,
        "grad_norm": unit.last_grad_norm,
        "param_names": list(unit.param_names),
        "partial": _save_window(unit),
    }


def load_unit(unit: "OptimScheduler", state: Mapping[str, Any]) -> None:
    """Put a saved state into a unit; one without a clock takes the clock of whoever drives it."""
    if "optimizer" not in state:
        raise ConfigError(f"unit {unit.name!r}: the saved state has {sorted(state)}; expected 'optimizer' and a clock.")
    missing = [key for key in _CLOCK if key not in state]
    if missing and len(missing) < len(_CLOCK):
        raise ConfigError(f"unit {unit.name!r}: the saved state lacks {', '.join(missing)}.")
    unit.take_in_groups()
    if not missing:
        _check_names(unit, list(state["param_names"]))
    unit.optimizer.load_state_dict(state["optimizer"])
    can_scale = unit.use_amp and unit.params[0].device.type != "cpu"
    unit.scaling.load_state_dict(state.get("scaler"), can_scale, unit.name)
    unit.go_to(*([] if missing else [int(state[key]) for key in _CLOCK[:3]]))
    unit.last_grad_norm = state.get("grad_norm")
    if state.get("partial"):
        _load_window(unit, state["partial"])


def _save_window(unit: "OptimScheduler") -> dict[str, object] | None:
    if unit.closes and not unit.window.count:
        return None
    grads, window = {}, unit.window
    if window.count:
        grads = {name: p.grad.detach().clone() for name, p in zip(unit.param_names, unit.params) if p.grad is not None}
    return {
        "position": unit._position,
        "closed": unit.closes,
        "batches": window.count,
        "length": None if window.is_sum else window.length,
        "weight": window.items,
        "weight_everywhere": window.everywhere,
        "is_whole": not any(map(is_dtensor, grads.values())),
        "grads": grads,
    }


def _load_window(unit: "OptimScheduler", partial: Mapping[str, Any]) -> None:
    unit._position, unit.closes = int(partial["position"]), bool(partial["closed"])
    if not unit.closes:
        unit.batch = (unit.real_step - 1) * unit.accum_grad + unit._position
    window = unit.window
    counts = {"count": int(partial["batches"]), "items": partial["weight"]}
    window.load_state_dict({**counts, "everywhere": partial["weight_everywhere"], "reference": window.reference})
    # Each batch was divided by the length of its window.
    factor = (partial.get("length") or window.length) / window.length
    for name, p in zip(unit.param_names, unit.params):
        grad = partial["grads"].get(name)
        if grad is not None:
            p.grad = grad.detach().to(device=p.device, dtype=p.dtype, copy=True).mul_(factor)


def _check_names(unit: "OptimScheduler", saved: list[str]) -> None:
    if saved == unit.param_names:
        return
    missing = [name for name in unit.param_names if name not in saved]
    unexpected = [name for name in saved if name not in unit.param_names]
    detail = "their order differs"
    if missing or unexpected:
        detail = f"missing in it: {missing[:5]}; not in this unit: {unexpected[:5]}"
    raise ConfigError(
        f"unit {unit.name!r}: the saved state is for other parameters ({len(saved)} saved, {len(unit.param_names)} now; {detail})."
    )
