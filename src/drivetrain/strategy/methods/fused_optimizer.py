"""One kernel for the whole update, where the optimizer has one."""

import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn

from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.strategy.effects import UNFUSED_UPDATE
from drivetrain.strategy.method import Method, NoConfig, Option, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.space import SearchScope

_SMALL_WORLD = 8
"""Up to here a search compares it with an update that is not fused; beyond, the mesh alone makes enough candidates."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)

_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose kernel takes parameters that are split over ranks."""


class FusedOptimizer(Method):
    """`fused=True`, else `foreach=True`, else nothing; always said."""

    name, group, stage = "fused_optimizer", "optimizer", Stage.OPTIMIZER
    why = "the update runs in one kernel"
    is_minor = is_simple = sets_update_loop = leaves_no_trace = True

    def options(self, scope: "SearchScope") -> list[Option]:
        problem = scope.problem
        is_chosen = any(problem.optim_args.get(key) is not None for key in ("fused", "foreach"))
        return self.flag_options(scope, problem.optim_func in _FUSED and not is_chosen)

    def may_be_left_out(self, scope: "SearchScope") -> bool:
        return scope.world <= _SMALL_WORLD

    def affect(self, effects: "Effects", config: NoConfig) -> None:
        effects.update_passes /= UNFUSED_UPDATE
        effects.update_temporary = 0.0

    def label(self, config: NoConfig) -> str:
        return "fused"

    def apply(self, ctx: "Application", config: NoConfig) -> None:
        recipe = ctx.recipe
        if recipe is None:
            ctx.note("fused_optimizer: there is no optimizer")
            return
        chosen = [key for key in ("fused", "foreach") if recipe.settings.get(key) is not None]
        parameters = [p for p in ctx.model.parameters() if p.requires_grad]
        name = getattr(recipe.build, "__name__", repr(recipe.build))
        if chosen:
            ctx.note(f"fused_optimizer: unchanged, because {chosen[0]} was given")
        elif len({is_dtensor(parameter) for parameter in parameters}) > 1:
            ctx.note("fused_optimizer: unchanged, because some parameters are split over ranks and others are not")
        elif problem := _no_kernel(ctx.model):
            ctx.note(f"fused_optimizer: unchanged, because {problem}")
        elif recipe.build in (_FUSED_SHARDED if any(map(is_dtensor, parameters)) else _FUSED):
            recipe.settings["fused"], recipe.is_changed = True, True
        elif isinstance(recipe.build, type) and "foreach" in inspect.signature(recipe.build).parameters:
            recipe.settings["foreach"], recipe.is_changed = True, True
            ctx.note(f"fused_optimizer: foreach, because {name} has no fused kernel for these parameters")
        else:
            ctx.note(f"fused_optimizer: unchanged, because {name} has neither a fused nor a foreach form")


def _no_kernel(model: nn.Module) -> str | None:
    """Return why no fused kernel takes the parameters of a model, None where it may."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            return f"the parameter {name} is {parameter.dtype}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"the layer {name} has sparse gradients"
    return None
