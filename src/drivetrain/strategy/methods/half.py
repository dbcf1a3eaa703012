"""Parameters in 16 bits, with a float32 copy in the optimizer so that small updates are not lost."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.module.optimizers import host_copy, with_master_weights
from drivetrain.strategy.method import Option, Stage
from drivetrain.strategy.methods.amp_native import SixteenBits, sixteen_bits
from drivetrain.strategy.methods.cpu_offload import pins_memory
from drivetrain.strategy.optimizer_recipe import OptimizerRecipe

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.candidates import Candidate
    from drivetrain.strategy.search.space import SearchScope


@dataclass(frozen=True, kw_only=True)
class HalfConfig:
    dtype: str = "auto"
    """`bfloat16`, `float16`, or `auto`: bfloat16 where the device has it, else float16."""
    master_weights: bool = True
    """Whether the optimizer trains float32 copies."""


class Half(SixteenBits):
    """The whole model in 16 bits."""

    name, group, stage, numerics = "half", "half", Stage.MODULE, "low"
    Config = HalfConfig
    is_alone_in_group = True
    why = "parameters and activations in 16 bits"

    def options(self, scope: "SearchScope") -> list[Option]:
        return self.flag_options(scope, sixteen_bits(scope) in scope.machine.flops)

    def fits(self, config: HalfConfig, candidate: "Candidate") -> str | None:
        if candidate.tensor > 1 or candidate.pipe > 1:
            return "its float32 copies are made from the whole model"
        names = {"chunked_cross_entropy", "cpu_offload"} & candidate.configs.keys()
        return f"a search does not combine it with {min(names)}" if names else None

    def affect(self, effects: "Effects", config: HalfConfig) -> None:
        effects.precision, effects.rate, effects.arithmetic = "half", "bfloat16", "bfloat16"
        effects.parameter_width, effects.cast_width = 2.0, 0.0

    def apply(self, ctx: "Application", config: HalfConfig) -> None:
        dtype = self.chosen_dtype(config, ctx.device)
        ctx.scaler_dtype = dtype
        is_sharded = any(name in ctx.plan.site.names for name in ("fsdp", "zero2"))
        if is_sharded and config.master_weights:
            ctx.autocast_dtype = dtype  # shards stay in float32 and are gathered in 16 bits: these are the copies
            return
        originals = {name: p.data for name, p in ctx.model.named_parameters() if p.is_floating_point()}
        ctx.model.to(dtype=dtype)
        ctx.input_changes.append(CastFloats(dtype))
        if config.master_weights:
            ctx.recipe_changes.append(lambda recipe: _train_copies(recipe, ctx, originals))


class CastFloats:
    """Casts floating inputs."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _train_copies(recipe: OptimizerRecipe, ctx: "Application", originals: dict[str, Tensor]) -> None:
    """Let the recipe make an optimizer of float32 copies."""
    from drivetrain.module.distributed_tensors import is_dtensor, like_sharded, synchronise
    from drivetrain.module.wrapping import named_clean_parameters

    inner, offload = recipe.build, ctx.plan.config("cpu_offload")

    def build(groups: object, **settings: object) -> Any:
        masters: dict[int, nn.Parameter] = {}
        for name, parameter in named_clean_parameters(ctx.model):
            if name in originals:
                value = originals[name].to(ctx.device, torch.float32, copy=True)
                if ctx.mesh is not None:  # as was done to the parameters
                    names = tuple(axis for axis in ctx.mesh.mesh_dim_names if axis != "pipe")
                    if names:
                        synchronise([value], ctx.mesh[names] if len(names) < ctx.mesh.ndim else ctx.mesh)
                if is_dtensor(parameter):
                    value = like_sharded(value, parameter)
                if offload is not None:
                    value = host_copy(value, torch.float32, pins_memory(ctx, offload))
                masters[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        return with_master_weights(inner, masters, groups, settings)

    recipe.build, recipe.is_changed = build, True
