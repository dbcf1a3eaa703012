"""Parameters, gradients and optimizer state split over ranks, gathered block by block when needed (Zhao et al., 2023).

A mesh with both `zero` and `data` axes shards along `zero` and replicates along `data` (hybrid sharding).
ZeRO-1 keeps whole parameters and splits the optimizer state alone (Rajbhandari et al., 2020, arXiv 1910.02054).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.core.errors import ConfigError, ConflictError
from drivetrain.core.types import Settings
from drivetrain.module.blocks import select_modules
from drivetrain.module.optimizers import split_optimizer
from drivetrain.module.pipeline_parts import StagePart
from drivetrain.module.precision import autocast_forward
from drivetrain.module.sharding import shard_fully
from drivetrain.runtime.ranks import data_group
from drivetrain.strategy.mesh import GRADIENT_AXES
from drivetrain.strategy.method import (
    Function,
    Method,
    NoConfig,
    Option,
    Site,
    Stage,
    is_whole,
    selected,
)
from drivetrain.strategy.snapshot import materialise

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Candidate, Effects, SearchScope

SHARDING = frozenset({"fsdp", "zero2"})
"""The methods that split parameters over data ranks."""


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    wrap: Any = "auto"
    """What becomes a unit: "auto" for the model's blocks, classes, names, or a smallest number of elements."""
    ignored: Any = ()
    """Classes or names of modules whose parameters are not sharded."""
    reshard_after_forward: bool | int = True
    """Whether gathered parameters are freed between forward and backward; an int reshards to that many ranks."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state are in host memory."""
    param_init_fn: Function | None = None
    """Initialises each module of a model on the meta device; None for `reset_parameters`."""


class Fsdp(Method):
    """Fully sharded data parallel."""

    name, group, stage = "fsdp", "zero", Stage.SHELL
    aliases: ClassVar[tuple[str, ...]] = ("fsdp2",)
    Config = FsdpConfig
    needs_processes = is_alone_in_group = leaves_no_trace = True
    dimension, shards_axis = "sharding", "zero"
    gathers: ClassVar[int] = 2
    """How often parameters are gathered in one pass."""
    renamed = {
        "atorch_wrap_cls": "wrap",
        "atorch_size_based_min_num_params": "wrap",
        "atorch_ignored_cls": "ignored",
    }
    ignored_keys: ClassVar[tuple[str, ...]] = (
        *("limit_all_gathers", "forward_prefetch", "use_orig_params", "sync_module_states", "backward_prefetch"),
        *("trainable_outermost", "wrap_trainable_outmost"),
    )
    why = "parameters, gradients and optimizer state are split over ranks"

    def options(self, scope: "SearchScope") -> list[Option]:
        return sharding_options(self, scope)

    def affect(self, effects: "Effects", config: object) -> None:
        effects.is_sharded, effects.shards = True, effects.axes.get("zero", 1)
        effects.optimizer_shards = effects.shards
        effects.gathers, effects.gathers_whole = self.gathers, self.gathers == 1
        # Shards stay in float32 and are gathered in 16 bits: those are the copies.
        effects.parameter_width, effects.cast_width = None, 0.0

    def amount(self, config: object) -> int:
        return 1 + self.gathers

    def pinned(self, config: Any, names: Iterable[str], units: tuple[str, ...], repeated: tuple[str, ...]) -> Option:
        return ((self.name, replace(config, wrap=units) if config.wrap == "auto" and units else config),)

    def on_host(self, config: Any, is_sharded: bool) -> tuple[str, ...]:
        return ("params", "grads", "optimizer") if config.cpu_offload else ()

    def read(self, values: Settings) -> Settings:
        if "wrap" in values and not is_whole(values["wrap"]):
            expected = "'auto', classes, names, or a smallest number of elements"
            values["wrap"] = self.selectors("wrap", values["wrap"], expected)
        if ignored := values.get("ignored"):
            values["ignored"] = self.selectors("ignored", ignored if isinstance(ignored, tuple) else (ignored,))
        reshard = values.get("reshard_after_forward", True)
        if not (isinstance(reshard, bool) or is_whole(reshard)):
            raise self.bad("reshard_after_forward", reshard, "True, False or a number of ranks")
        if "reduce_dtype" in values:
            values["reduce_dtype"] = dtype_name(values["reduce_dtype"])
        return values

    def is_redundant(self, config: Any, site: Site) -> str | None:
        offloads = config.cpu_offload or "cpu_offload" in site.names
        if offloads and torch.distributed.is_initialized():
            return None
        if site.world > 1 and all(site.axis(axis) == 1 for axis in GRADIENT_AXES):
            return "no two ranks hold the same parameters, so there is nothing to shard"
        return super().is_redundant(config, site)

    def check(self, config: FsdpConfig, site: Site) -> None:
        for value in (config.wrap, *config.ignored):
            if site.model is not None and not isinstance(value, int) and value != "auto":
                self.select(site.model, value)

    def apply(self, ctx: "Application", config: FsdpConfig) -> None:
        shard_over_data(ctx, config)


@dataclass(frozen=True, kw_only=True)
class Zero2Config(FsdpConfig):
    reshard_after_forward: bool | int = False


class Zero2(Fsdp):
    """`fully_shard` without resharding after forward."""

    name = "zero2"
    aliases = ()
    gathers = 1
    Config = Zero2Config
    ignored_keys = (*Fsdp.ignored_keys, "not_use_fsdp", "use_ds_zero")
    why = "gradients and optimizer state are split over ranks"


def shard_over_data(ctx: "Application", config: FsdpConfig) -> None:
    """Shard the model over the data axes of the mesh. A requested precision becomes the mixed-precision policy."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    axes = [axis for axis in ("data", "zero") if ctx.plan.site.axis(axis) > 1]
    mesh = shard_mesh(ctx.mesh, axes, has_sequence=ctx.plan.site.axis("sequence") > 1)
    dtype, reduce_dtype = ctx.autocast_dtype, getattr(torch, config.reduce_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype, output_dtype=None if dtype is None else torch.float32
    )
    # The policy casts parameters; autocast joins them with buffers and what the forward makes itself.
    if dtype is not None:
        autocast_forward(ctx.model, ctx.device.type, dtype)
    if isinstance(ctx.model, StagePart):
        ctx.model.compute_dtype = dtype
    settings: dict[str, Any] = {"reshard_after_forward": config.reshard_after_forward}
    settings["keeps_float64"] = dtype is not None and "half" not in ctx.plan.site.names
    offload = ctx.plan.config("cpu_offload")
    cpu_offload = config.cpu_offload or offload is not None
    if cpu_offload:
        pins = ctx.device.type == "cuda" and (offload is None or offload.pin_memory)
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
    if config.ignored:
        modules = select_modules(ctx.model, selected(ctx.model, config.ignored), where="ignored")
        settings["ignored_params"] = {p for _, module in modules for p in module.parameters()}
        for parameter in settings["ignored_params"]:
            parameter.data = parameter.data.to(ctx.device)
    is_meta = any(parameter.is_meta for parameter in ctx.model.parameters())
    wrap = selected(ctx.model, config.wrap)
    ctx.model = shard_fully(ctx.model, mesh, wrap=wrap, mixed_precision=policy, **settings)
    if is_meta:
        materialise(ctx.model, ctx.device if not cpu_offload else torch.device("cpu"), config.param_init_fn)
    for buffer in ctx.model.buffers():
        buffer.data = buffer.data.to(ctx.device)


def dtype_name(value: object) -> str:
    """Return the name of a dtype that was given as a dtype, a name or a short name.

    >>> dtype_name("bf16"), dtype_name(torch.float16)
    ('bfloat16', 'float16')
    """
    name = str(value).removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(name, name)


def sharding_options(method: Method, scope: "SearchScope") -> list[Option]:
    """Return the option to shard over data ranks if there are several; on a CPU only on request."""
    is_sensible = not scope.is_cpu or scope.needs_dimension(str(method.dimension))
    return method.flag_options(scope, is_sensible) if scope.world > 1 else []


def shard_mesh(mesh: DeviceMesh, axes: list[str], has_sequence: bool = False) -> DeviceMesh:
    """Return the part of the mesh to shard over: one axis, or `data` outside and `zero` inside for hybrid sharding.

    Ranks along `sequence` hold the same parameters, so they shard them too, together with the innermost of the others.
    """
    names = list(mesh.mesh_dim_names or ())
    if len(axes) == 2 and names.index("data") > names.index("zero"):
        raise ConfigError(
            "fsdp: with both axes, list ('zero', n) before ('data', m): ranks that shard together must be adjacent."
        )
    if has_sequence:
        inner = [name for name in names if name in {*axes[-1:], "sequence"}]
        if len(inner) == 2:
            shards = mesh[tuple(inner)]._flatten("_".join(inner))
            return shards if len(axes) < 2 else mesh["data", "_".join(inner)]
        axes = ["sequence"]
    if len(axes) < 2:
        present = axes or [name for name in ("zero", "data") if name in names]
        if not present:
            raise ConfigError(
                f"fsdp: the mesh has the axes {', '.join(names)}, but parameters are sharded along 'zero' or 'data'. Add ('zero', 1)."
            )
        return mesh if mesh.ndim == 1 else mesh[present[0]]
    return mesh if mesh.ndim == 2 else mesh["data", "zero"]


class Zero1(Method):
    """DDP with the optimizer's state split over ranks."""

    name, group, stage = "zero1", "zero", Stage.OPTIMIZER
    needs_processes = is_alone_in_group = splits_optimizer = leaves_no_trace = True
    dimension = Fsdp.dimension
    ignored_keys = ("use_ds_zero", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm")
    conflicts = {"tensor_parallel": "Use fsdp or zero2 with tensor_parallel."}
    why = "optimizer state is split over the data ranks"

    def options(self, scope: "SearchScope") -> list[Option]:
        return sharding_options(self, scope)

    def fits(self, config: NoConfig, candidate: "Candidate") -> str | None:
        is_plain = candidate.data > 1 and not candidate.divides_model
        return None if is_plain else "it needs data ranks that hold the whole model"

    def affect(self, effects: "Effects", config: NoConfig) -> None:
        effects.optimizer_shards = effects.data_ranks

    def amount(self, config: NoConfig) -> int:
        return 1

    def period(self, config: NoConfig) -> int | None:
        return None  # whole parameters are dealt to ranks, which does not continue by any rule

    def apply(self, ctx: "Application", config: NoConfig) -> None:
        if ctx.recipe is None:
            raise ConflictError(
                "zero1 splits the optimizer's state, but there is no optimizer. Pass optim_func, or remove zero1."
            )
        ctx.recipe.wrap(lambda inner, groups, settings: split_optimizer(inner, groups, settings, data_group()))
