"""Keep in host memory what does not fit on the device (Ren et al., 2021, ZeRO-Offload, arXiv 2101.06840).

With `fsdp` and `zero2`, parameters, gradients and optimizer state are in host memory, and `fully_shard` copies each block's
parameters to the device when it needs them. Without sharding, the optimizer trains copies on the host: Adam's state, twice the
size of the parameters, is never on the device.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConflictError
from drivetrain.core.types import Settings
from drivetrain.module.optimizers import host_copy, with_master_weights
from drivetrain.strategy.method import Method, Option, Site, Stage
from drivetrain.strategy.methods.fsdp import SHARDING

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Candidate, Effects, SearchScope

_PARTS = ("params", "optimizer")
_LARGE_STATE = 0.3
"""The share of the budget above which parameters, gradients and optimizer state are so large that moving them to the host could pay."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    what: tuple[str, ...] = _PARTS
    """`params` and `optimizer`; without sharding the parameters always stay on the device."""
    pin_memory: bool = True
    """Whether host memory is pinned, so that transfers overlap with other work; pinned memory cannot be swapped out."""


class CpuOffload(Method):
    """Optimizer state, and with sharding also the parameters, in host memory."""

    name, group, stage = "cpu_offload", "offload", Stage.OPTIMIZER
    Config = OffloadConfig
    short, copies_parameters = "what", True
    conflicts = {
        "cuda_graphs": "A recorded graph cannot wait for the host. Remove one of them.",
        "zero1": "Both move the optimizer's state. Use fsdp or zero2 with cpu_offload, or zero1 alone.",
    }
    why = "the optimizer's state is kept and updated in host memory"
    short_label = "cpu offload"
    is_minor = True

    def options(self, scope: "SearchScope") -> list[Option]:
        profile = scope.profile
        state = 2 * profile.parameter_bytes + profile.optimizer_bytes
        return self.flag_options(scope, not scope.is_cpu and state > _LARGE_STATE * scope.budget)

    def fits(self, config: OffloadConfig, candidate: "Candidate") -> str | None:
        amp = candidate.configs.get("amp_native")
        is_scaled = amp is not None and amp.dtype == "float16"
        return "gradients in float16 are scaled on the device" if is_scaled else None

    def affect(self, effects: "Effects", config: OffloadConfig) -> None:
        effects.optimizer_on_host, effects.update_temporary = True, 0.0
        effects.parameters_on_host = effects.is_sharded
        effects.is_tracked = False

    def on_host(self, config: OffloadConfig, is_sharded: bool) -> tuple[str, ...]:
        return ("params", "grads", "optimizer") if is_sharded else ("optimizer",)

    def read(self, values: Settings) -> Settings:
        what = values.get("what", _PARTS)
        what = (what,) if isinstance(what, str) else tuple(what)
        if not what or any(part not in _PARTS for part in what):
            raise self.bad("what", values.get("what"), "'params', 'optimizer' or both")
        values["what"] = tuple(part for part in _PARTS if part in what)
        return values

    def check(self, config: OffloadConfig, site: Site) -> None:
        is_sharded = not SHARDING.isdisjoint(site.names)
        if is_sharded and config.what != _PARTS:
            raise ConflictError(
                f"cpu_offload: what={list(config.what)!r}, but under sharding parameters and optimizer state move to the host together. "
                "Remove `what`."
            )
        if not is_sharded and "optimizer" not in config.what:
            raise ConflictError(
                "cpu_offload: what=['params'] needs sharding, which copies the parameters of each block to the device when it runs. "
                "Add fsdp, or offload 'optimizer'."
            )

    def apply(self, ctx: "Application", config: OffloadConfig) -> None:
        if not SHARDING.isdisjoint(ctx.plan.site.names):
            return  # sharding has put everything on the host already
        if ctx.recipe is None:
            ctx.note("cpu_offload: there is no optimizer to offload")
            return
        if "params" in config.what:
            ctx.note("cpu_offload: parameters stay on the device, because the plan does not shard them")

        def on_host(inner: Any, groups: object, settings: Settings) -> Optimizer:
            pins = pins_memory(ctx, config)
            masters = {
                id(p): nn.Parameter(host_copy(p, p.dtype, pins), requires_grad=p.requires_grad)
                for p in ctx.model.parameters()
            }
            return with_master_weights(inner, masters, groups, settings)

        half = ctx.plan.config("half")
        if half is None or not half.master_weights:  # else its float32 copies are those on the host
            ctx.recipe_changes.append(lambda recipe: recipe.wrap(on_host))


def pins_memory(ctx: "Application", config: OffloadConfig) -> bool:
    """Return whether a plan pins its host copies. That needs a device that reads them."""
    return config.pin_memory and ctx.device.type == "cuda"
