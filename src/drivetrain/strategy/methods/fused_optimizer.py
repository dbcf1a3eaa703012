"""One kernel for the whole update, where the optimizer has one."""

import inspect
from typing import TYPE_CHECKING

import torch

from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.strategy.method import Method, NoConfig, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class FusedOptimizer(Method):
    """`fused=True`, else `foreach=True`, else nothing; always said."""

    name, group, stage = "fused_optimizer", "optimizer", Stage.OPTIMIZER
    why = "the update runs in one kernel"

    def apply(self, ctx: "PlanContext", config: NoConfig) -> None:
        recipe = ctx.recipe
        if recipe is None:
            ctx.note("fused_optimizer: there is no optimizer")
            return
        chosen = [key for key in ("fused", "foreach") if recipe.settings.get(key) is not None]
        parameters = [p for p in ctx.model.parameters() if p.requires_grad]
        name = getattr(recipe.build, "__name__", repr(recipe.build))
        if chosen:
            ctx.note(f"fused_optimizer: left alone, because {chosen[0]} was given")
        elif len({is_dtensor(parameter) for parameter in parameters}) > 1:
            ctx.note("fused_optimizer: left alone, because some parameters are split over ranks and others are not")
        elif recipe.build in _FUSED:
            recipe.settings["fused"], recipe.is_changed = True, True
        elif isinstance(recipe.build, type) and "foreach" in inspect.signature(recipe.build).parameters:
            recipe.settings["foreach"], recipe.is_changed = True, True
            ctx.note(f"fused_optimizer: foreach, because {name} has no fused kernel")
        else:
            ctx.note(f"fused_optimizer: left alone, because {name} has neither a fused nor a foreach form")
