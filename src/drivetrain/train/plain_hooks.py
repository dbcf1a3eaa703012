"""Which hooks of a step nobody has overridden, so that the loop may do at once what they would pass on.

A Python call costs most when the caches are cold, as they are after a model's kernels. Some hooks of a step do nothing by
default but call the next object; the loop then calls that object itself. A subclass, a function put on the instance, a guest who
listens in between, a scaler, an `OptimSet` or a repeated window bring the hook back.
"""

from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.core.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainHooks:
    """For each hook, whether what it does by default is all that is wanted."""

    passes: bool = False
    """Forward and backward of one batch, as it is."""
    loss: bool = False
    """`loss_fn(model(inputs), targets)`, with nobody listening in between."""
    backward: bool = False
    """`loss.backward()`"""
    step: bool = False
    """`optimizer.step()`"""
    schedule: bool = False
    """Nothing, without a scheduler."""
    clear: bool = False
    """Torch's own `zero_grad()`: no gradients are left, without the profiler's mark that costs more than all of it."""


def find_plain_hooks(trainer: Any) -> PlainHooks:
    """Look at a trainer that is ready to run."""
    from drivetrain.train.accelerator import TrainerRuntime

    runtime, has_optimizer = trainer._accelerator, bool(trainer.state.optimizers)
    is_own = all(getattr(type(runtime), name, None) is getattr(TrainerRuntime, name) for name in ("backward", "step"))
    is_own = is_own and not {"backward", "step"} & vars(runtime).keys()
    passes_on = is_own and runtime.scaler is None and trainer._units is None

    def is_default(name: str) -> bool:
        return not trainer.overrides(name)

    listens = trainer.engine.listens(Event.AFTER_FORWARD) or trainer.engine.listens(Event.BEFORE_LOSS)
    return PlainHooks(
        passes=not trainer._ddp
        and trainer._microbatch_size is None
        and not trainer._repeat.is_wanted
        and is_default("_perform_forward_and_backward_passes"),
        loss=not listens and is_default("forward") and is_default("compute_loss"),
        backward=passes_on and trainer._gradients.is_simple and is_default("backward_step"),
        step=passes_on and has_optimizer and not trainer._repeat.is_wanted and is_default("optimizer_step"),
        schedule=is_default("scheduler_step"),
        clear=has_optimizer and is_default("optimizer_zero_grad") and _clears_as_torch_does(trainer.optimizer),
    )


def _clears_as_torch_does(optimizer: Any) -> bool:
    own = getattr(type(optimizer), "zero_grad", None)
    return own is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
