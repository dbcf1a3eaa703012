"""Fused optimizer kernels: one launch for all parameters instead of several for each."""

from torch.optim import Optimizer


def use_fused_kernels(optimizer: Optimizer) -> bool:
    """Switch an optimizer that has not stepped yet to its fused kernel, in place; say whether it changed.

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
        # torch knows which kernels it has: it refuses what it cannot do while building.
        type(optimizer)(parameters, lr=groups[0]["lr"], fused=True)  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError):
        return False
    for group in groups:
        group["fused"], group["foreach"] = True, False
    optimizer.defaults["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # a gradient scaler leaves unscaling to the kernel
    return True
