"""What an optimizer keeps, and what its step allocates beside.

The state is read off a fused step on fake tensors, which asks for no values. Temporaries of a `foreach` step are those of a small real
step, in proportion: it allocates whole lists of tensors as large as the parameters.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.strategy.profile.tracker import MemoryTimeline
from drivetrain.strategy.task import TrainingTask

_SIDE = 128  # of the square parameters of the small step


def optimizer_with_state(task: TrainingTask, model: nn.Module) -> torch.optim.Optimizer | None:
    """Return the task's optimizer of a fake model after one step, gradients cleared; call it inside the fake mode."""
    recipe = task.recipe()
    if recipe is None:
        return None
    if "fused" in _parameters(task) and not recipe.settings.get("foreach"):
        recipe.settings["fused"] = True
    optimizer = recipe.make(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors of an optimizer's state."""
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(optimizer))


def small_step(task: TrainingTask) -> tuple[float, float, bool]:
    """Return state and temporaries of a small real step, each per byte of parameters, and whether it was a `foreach` step."""
    has_foreach = "foreach" in _parameters(task) and not task.optim_args.get("fused")
    count = 4 if has_foreach else 1
    model = nn.ParameterList([nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(count)])
    settings: dict[str, Any] = dict(task.optim_args)
    if has_foreach:
        settings.setdefault("foreach", True)
    assert task.optim_func is not None
    optimizer = task.optim_func(list(model), **settings)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model)

    def step() -> None:
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    timeline = MemoryTimeline()
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    with timeline:
        timeline.label([*model, *state_tensors(optimizer), *(p.grad for p in model if p.grad is not None)], "known")
        before = timeline.totals()[-1]
        optimizer.step()
    temporary = max(timeline.totals()) - before
    timeline.freeze()
    return state_bytes(optimizer) / size, temporary / size, has_foreach


def _parameters(task: TrainingTask) -> frozenset[str]:
    """Return the names of the optimizer's settings."""
    try:
        return frozenset(inspect.signature(task.optim_func).parameters) if task.optim_func is not None else frozenset()
    except (TypeError, ValueError):  # a callable without a signature
        return frozenset()
