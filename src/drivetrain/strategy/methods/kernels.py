"""The methods that select a faster kernel for the same arithmetic: channels-last images, a fused update, the number of CPU threads."""

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.core.errors import ConflictError, UnsupportedMethodError
from drivetrain.module.convolutions import channels_last_input, to_channels_last
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.optimizers import is_fused_wrong
from drivetrain.runtime.device import usable_cpus
from drivetrain.runtime.environment import launched_world
from drivetrain.runtime.ranks import get_num_processes
from drivetrain.strategy.effects import UNFUSED_UPDATE
from drivetrain.strategy.method import Method, NoConfig, Option, Positive, Site, Stage
from drivetrain.strategy.optimizer_recipe import OptimizerRecipe

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Candidate, Effects, SearchScope


class ChannelsLast(Method):
    """Channels-last kernels and inputs."""

    name, group, stage = "channels_last", "layout", Stage.MODULE
    leaves_no_trace = True
    conflicts = dict.fromkeys(
        ("fsdp", "zero2"), "Sharding needs parameters that are contiguous, and kernels of this layout are not."
    )
    why = "convolutions read all channels of a pixel together"
    short_label = "channels last"

    def options(self, scope: "SearchScope") -> list[Option]:
        return self.flag_options(scope, scope.profile.has_convolution)

    def fits(self, config: NoConfig, candidate: "Candidate") -> str | None:
        compiler = candidate.configs.get("native_dynamo")
        is_cut = compiler is not None and compiler.scope == "block"
        if candidate.data > 1 and candidate.divides_model:
            return "sharding needs contiguous parameters"
        return "blocks that are compiled separately choose their own layout" if is_cut else None

    def affect(self, effects: "Effects", config: NoConfig) -> None:
        effects.is_channels_last = True

    def check(self, config: NoConfig, site: Site) -> None:
        axis = next((name for name in ("tensor", "pipe") if site.axis(name) > 1), None)
        if axis is not None and site.axis("data") * site.axis("zero") * site.axis("sequence") > 1:
            raise ConflictError(
                f"channels_last and data or sequence ranks with a {axis!r} axis cannot be used together: gradients are averaged by "
                "sharding, which needs parameters that are contiguous, and kernels of this layout are not. Remove channels_last."
            )
        convolutions = nn.Conv2d | nn.Conv3d
        if site.model is not None and not any(isinstance(module, convolutions) for module in site.model.modules()):
            raise UnsupportedMethodError(
                f"channels_last: {type(site.model).__name__} has no Conv2d or Conv3d, so there is no layout to change. Remove it."
            )

    def apply(self, ctx: "Application", config: NoConfig) -> None:
        count = to_channels_last(ctx.model)
        ctx.input_changes.append(channels_last_input)
        ctx.note(f"channels_last: {count} convolution kernels")


_SMALL_WORLD = 8
"""Up to here a search compares it with an update that is not fused; beyond, the mesh alone makes enough candidates."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose kernel takes parameters that are split over ranks."""


class FusedOptimizer(Method):
    """`fused=True`, else `foreach=True`, else no change. The plan reports which one was chosen."""

    name, group, stage = "fused_optimizer", "optimizer", Stage.OPTIMIZER
    why = "the update runs in one kernel"
    short_label = "fused"
    is_minor = is_simple = sets_update_loop = leaves_no_trace = True

    def options(self, scope: "SearchScope") -> list[Option]:
        recipe, model = scope.task.recipe(), scope.task.model or nn.Module()
        is_fused = recipe is not None and recipe.build in _FUSED and _why_unchanged(recipe, model) is None
        return self.flag_options(scope, is_fused)

    def may_be_left_out(self, scope: "SearchScope") -> bool:
        return scope.world <= _SMALL_WORLD

    def affect(self, effects: "Effects", config: NoConfig) -> None:
        effects.update_passes /= UNFUSED_UPDATE
        effects.update_temporary = 0.0

    def apply(self, ctx: "Application", config: NoConfig) -> None:
        recipe = ctx.recipe
        if recipe is None:
            ctx.note("fused_optimizer: there is no optimizer")
            return
        name = getattr(recipe.build, "__name__", repr(recipe.build))
        fused = _FUSED_SHARDED if any(is_dtensor(p) for p in ctx.model.parameters() if p.requires_grad) else _FUSED
        if problem := _why_unchanged(recipe, ctx.model):
            ctx.note(f"fused_optimizer: unchanged, because {problem}")
        elif recipe.build in fused:
            recipe.settings["fused"], recipe.is_changed = True, True
        elif isinstance(recipe.build, type) and "foreach" in inspect.signature(recipe.build).parameters:
            recipe.settings["foreach"], recipe.is_changed = True, True
            ctx.note(f"fused_optimizer: foreach, because {name} has no fused kernel for these parameters")
        else:
            ctx.note(f"fused_optimizer: unchanged, because {name} has neither a fused nor a foreach form")


def _why_unchanged(recipe: OptimizerRecipe, model: nn.Module) -> str | None:
    """Return why neither form of the update can be chosen for a model, or None."""
    for key in ("fused", "foreach"):
        if recipe.settings.get(key) is not None:
            return f"{key} was given"
    if len({is_dtensor(parameter) for parameter in model.parameters() if parameter.requires_grad}) > 1:
        return "some parameters are split over ranks and others are not"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            return f"the parameter {name} is {parameter.dtype}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"the layer {name} has sparse gradients"
    if is_fused_wrong(recipe.build, model.parameters()):
        return "torch's fused SGD does not update 16-bit parameters on the CPU"
    return None


@dataclass(frozen=True, kw_only=True)
class CpuThreadsConfig:
    threads: Positive | None = None
    """Threads of each process; None: this process's share of the CPUs that it may use."""


class CpuThreads(Method):
    """`torch.set_num_threads`, for the whole process."""

    name, group, stage = "cpu_threads", "threads", Stage.MESH
    Config = CpuThreadsConfig
    short = "threads"
    why = "number of threads for one operation, in the whole process"
    unproved_on = frozenset({"cpu"})
    must_win = leaves_no_trace = True
    not_simulated = "it does not change memory"

    def local_candidates(self, device: torch.device, world: int) -> tuple[Any, ...]:
        """Return one thread, half of this process's CPUs, and all of them, without the number of now."""
        if self.requires(None, device, world) is not None:
            return ()
        share = cpu_share()
        counts = {1, max(1, share // 2), share} - {torch.get_num_threads()}
        return tuple(CpuThreadsConfig(threads=count) for count in sorted(counts))

    def options(self, scope: "SearchScope") -> list[Option]:
        offered, kept = [config.threads for config in scope.local.get(self.name, ())], scope.kept(self.name)
        if kept:
            found = [kept[0].threads or (offered or [scope.machine.threads])[-1]]
        elif scope.must(self.name):
            found = offered or [scope.machine.threads]
        else:
            found = offered if scope.is_cpu and scope.is_here and scope.usable(self) else []
        return [((self.name, scope.config(self, threads=threads)),) for threads in found]

    def settled(self, config: CpuThreadsConfig, candidate: "Candidate") -> CpuThreadsConfig:
        return replace(config, threads=config.threads or cpu_share())

    def affect(self, effects: "Effects", config: CpuThreadsConfig) -> None:
        effects.threads = config.threads

    def label(self, config: CpuThreadsConfig) -> str:
        return f"threads {config.threads}"

    def requires(self, profile: object, device: torch.device, world: int) -> str | None:
        return None if device.type == "cpu" else f"operations run on {device.type}, not on the CPU's threads"

    def apply(self, ctx: "Application", config: CpuThreadsConfig) -> None:
        torch.set_num_threads(config.threads or cpu_share())


def cpu_share() -> int:
    """Return how many CPUs each process on this machine may use if they share them equally."""
    world = launched_world()
    around = None if world is None else world.local_world_size
    return max(1, usable_cpus() // (around or get_num_processes()))
