"""Fused optimizer kernels: one launch for all parameters instead of several for each."""

import torch
from torch.optim import SGD, Optimizer


def use_fused_kernels(optimizer: Optimizer) -> bool:
    """Switch an optimizer that has not stepped yet to its fused kernel, in place; return whether it changed.

    An optimizer without such a kernel, one whose owner chose another, and one with parameters it cannot take are left alone.
    """
    groups = optimizer.param_groups
    is_torch = type(optimizer).__module__.startswith("torch.optim.")
    if not is_torch or "fused" not in optimizer.defaults or any(group.get("fused") is not None for group in groups):
        return False
    if any(group.get("foreach") or group.get("differentiable") or group.get("capturable") for group in groups):
        return False
    parameters = [p for group in groups for p in group["params"]]
    if optimizer.state or not all(p.is_floating_point() for p in parameters):
        return False
    try:
        # torch knows which kernels it has: it rejects what it cannot do while building.
        type(optimizer)(parameters, lr=groups[0]["lr"], fused=True)  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError):
        return False
    for group in groups:
        group["fused"], group["foreach"] = True, False
    optimizer.defaults["fused"] = True
    start_momentum(optimizer)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # a gradient scaler leaves unscaling to the kernel
    return True


def start_momentum(optimizer: Optimizer) -> None:
    """Let a fused SGD give every parameter its momentum before its first step, as zeros.

    Torch makes it at a parameter's first gradient, and its fused kernel fails when parameters get their first gradients in different
    steps: layers that a batch does not use, or that are unfrozen later.
    """
    if type(optimizer) is not SGD or not any(group.get("fused") for group in optimizer.param_groups):
        return

    def before_first_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        _fill_momentum(optimizer)
        handle.remove()

    handle = optimizer.register_step_pre_hook(before_first_step)
    optimizer.register_load_state_dict_post_hook(_fill_momentum)


@torch.no_grad()
def _fill_momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        # With dampening the first gradient counts in full, so that zero would be another beginning.
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                kept = optimizer.state[parameter]
                if kept.get("momentum_buffer") is None:
                    kept["momentum_buffer"] = torch.zeros_like(parameter)
