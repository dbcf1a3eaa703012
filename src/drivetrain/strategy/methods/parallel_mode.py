"""Spread a global batch over processes and over time.

`parallel_mode` arranges the processes along the axes of a mesh; along `data`, gradients are averaged by DDP unless a method shards.
`auto_ddp` and `mixed_parallel` (Narayanan et al., 2021, arXiv 2104.04473) are other ways to write it. `micro_batch` splits each rank's
part into several forward passes, and updates once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.core.errors import MethodConfigError, StrategyError, UnsupportedMethodError, unknown_name
from drivetrain.core.types import Settings
from drivetrain.strategy.mesh import AXES, AXIS_ALIASES, Axes
from drivetrain.strategy.method import Method, Positive, Site, Stage, is_whole
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, BatchSplit, Candidate, SearchScope

_METHOD_OF_AXIS = {"pipe": "pipeline_parallel", "sequence": "sequence_parallel", "tensor": "tensor_parallel"}
"""Axes that only one method can use: without it, a mesh with more than one rank along them could not train."""


@dataclass(frozen=True, kw_only=True)
class ParallelModeConfig:
    axes: Axes = ()
    """Pairs of axis and size, the fastest varying first; empty: all processes along `data`."""
    rank_order: tuple[int, ...] | None = None
    """The process at each position of the mesh, outermost axis first; None for the order of the ranks."""
    sync_batchnorm: bool = False
    """Whether batch norms take their statistics over all data ranks."""
    static_graph: bool = False
    """Whether every step uses the same parameters, so that DDP needs to find them only once."""
    find_unused_parameters: bool = False
    """Whether the loss of a step may not use some parameters; DDP then searches for them in every step."""
    bucket_cap_mb: Positive | None = None
    """Size of DDP's gradient buckets; None for torch's default."""


class ParallelMode(Method):
    """Mesh axes and data parallelism."""

    name, group, stage = "parallel_mode", "parallel_mode", Stage.MESH
    Config = ParallelModeConfig
    short = "axes"
    lays_out_mesh = stays_idle = leaves_no_trace = True
    why = "each process takes its share of the global batch"

    def implied(self, candidate: "Candidate") -> Settings | None:
        if candidate.world == 1:
            return None
        axes = candidate.axes()
        return {"axes": tuple(axes)} if axes else {}

    def scaled_to(
        self, config: ParallelModeConfig, axes: Mapping[str, int], batch: "BatchSplit | None"
    ) -> ParallelModeConfig:
        return replace(config, axes=tuple((axis, axes[axis]) for axis, _ in config.axes))

    def parse(self, config: object = None) -> ParallelModeConfig:
        """Also accept `([(axis, size), ...], rank_order)`."""
        if isinstance(config, tuple | list) and not _is_axes(config):
            if len(config) > 3 or not config or not (config[0] is None or _is_axes(config[0])):
                raise self.bad(
                    "config", config, "([(axis, size), ...], rank_order) such as ([('tensor', 2), ('data', 4)], None)"
                )
            if len(config) == 3 and config[2]:
                raise MethodConfigError(
                    f"parallel_mode: multi_instance={config[2]!r} is not supported. Several instances of a model are the ranks along the "
                    "'data' axis."
                )
            config = {"axes": config[0] or (), "rank_order": config[1] if len(config) > 1 else None}
        return super().parse(config)

    def read(self, values: Settings) -> Settings:
        order, pairs = values.get("rank_order"), values.get("axes") or ()
        if order is not None and (not isinstance(order, tuple) or set(order) != set(range(len(order)))):
            raise self.bad("rank_order", order, "every rank from 0, once")
        if not _is_axes(pairs) and pairs != ():
            raise self.bad("axes", pairs, "pairs of axis and size, such as [('tensor', 2), ('data', 4)]")
        axes: dict[str, int] = {}
        for axis, size in pairs:
            name = AXIS_ALIASES.get(axis, axis)
            if name not in AXES:
                raise MethodConfigError(unknown_name("axis", axis, [*AXES, *AXIS_ALIASES], where="parallel_mode"))
            if not is_whole(size):
                raise self.bad(axis, size, "a whole number of at least 1")
            if name in axes:
                raise self.bad("axes", pairs, f"each axis once; {name!r} is listed twice")
            axes[name] = size
        return {**values, "axes": tuple(axes.items())}

    def check(self, config: ParallelModeConfig, site: Site) -> None:
        if config.rank_order is not None and len(config.rank_order) != site.world:
            raise StrategyError(
                f"parallel_mode: rank_order lists {len(config.rank_order)} ranks, but there are {site.world} processes."
            )
        if config.sync_batchnorm and site.device.type == "cpu" and site.world > 1:
            raise UnsupportedMethodError(
                "parallel_mode: sync_batchnorm needs an accelerator; torch does not support it on the CPU."
            )
        for axis, method in _METHOD_OF_AXIS.items():
            if site.axis(axis) > 1 and method not in site.names:
                raise StrategyError(
                    f"parallel_mode: there is a {axis!r} axis of size {site.axis(axis)} but no {method} in the plan. Add it."
                )

    def apply(self, ctx: "Application", config: ParallelModeConfig) -> None:
        if config.sync_batchnorm and ctx.plan.data_ranks > 1:
            ctx.model = nn.SyncBatchNorm.convert_sync_batchnorm(ctx.model)
        for name in ("static_graph", "find_unused_parameters", "bucket_cap_mb"):
            if value := getattr(config, name):
                ctx.ddp_settings[name] = value


def _is_axes(value: object) -> bool:
    """Return whether a value is a list of pairs that begin with a text."""
    return (
        isinstance(value, tuple | list)
        and bool(value)
        and all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in value)
    )


class AutoDdp(Method):
    """DDP over all processes."""

    name, group, stage = "auto_ddp", "parallel_mode", Stage.MESH
    stays_idle = leaves_no_trace = True
    why = "each process takes its share of the global batch"

    def expand(self, config: object) -> Settings:
        return {"parallel_mode": None}


@dataclass(frozen=True, kw_only=True)
class MixedParallelConfig:
    parallel_mode: Any = None
    """The value for `parallel_mode`; its axes decide which of the others are used."""
    tensor_config: Any = None
    """The value for `tensor_parallel`."""
    pipe_config: Any = None
    """The value for `pipeline_parallel`."""


_PARTS = {"parallel_mode": "parallel_mode", "tensor_config": "tensor_parallel", "pipe_config": "pipeline_parallel"}


class MixedParallel(Method):
    """Combines `parallel_mode` with the methods that its axes need."""

    name, group, stage = "mixed_parallel", "parallel", Stage.MESH
    aliases: ClassVar[tuple[str, ...]] = ("ds_3d_parallel", "deepspeed_3d_parallel")
    Config = MixedParallelConfig
    needs_processes, is_searched = True, False
    conflicts: ClassVar[dict[str, str]] = {
        "tensor_parallel": "Give its settings as tensor_config of mixed_parallel.",
        "pipeline_parallel": "Give its settings as pipe_config of mixed_parallel.",
    }

    def parse(self, config: object = None) -> MixedParallelConfig:
        """Read each part with the method that it belongs to."""
        if isinstance(config, Mapping):
            config = {
                key: find_method(_PARTS[key]).parse(value) if key in _PARTS and value is not None else value
                for key, value in config.items()
            }
        return super().parse(config)

    def read(self, values: Settings) -> Settings:
        if values.get("parallel_mode") is None:
            raise MethodConfigError(
                "mixed_parallel: parallel_mode is missing; expected the axes, such as {'parallel_mode': [('tensor', 2), ('pipe', 2), "
                "('data', 1)]}."
            )
        axes = {axis for axis, size in values["parallel_mode"].axes if size > 1}
        for key, axis in (("tensor_config", "tensor"), ("pipe_config", "pipe")):
            if values.get(key) is not None and axis not in axes:
                raise MethodConfigError(
                    f"mixed_parallel: {key} is set, but parallel_mode has no {axis!r} axis. Add it."
                )
        return values

    def plain(self, config: MixedParallelConfig) -> Settings:
        parts = {key: getattr(config, key) for key in _PARTS}
        return {key: None if part is None else find_method(_PARTS[key]).plain(part) for key, part in parts.items()}

    def expand(self, config: MixedParallelConfig) -> Settings:
        axes = {axis for axis, size in config.parallel_mode.axes if size > 1}
        settings = {"tensor": config.tensor_config, "pipe": config.pipe_config, "zero": None}
        methods = {**_METHOD_OF_AXIS, "zero": "fsdp"}
        parts = {methods[axis]: value for axis, value in settings.items() if axis in axes}
        return {"parallel_mode": config.parallel_mode, **parts}


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    size: Positive | None = None
    """Samples of one forward pass on one rank; None: what the accumulation leaves, or the whole part."""
    accumulation: Positive | None = None
    """Forward passes before an update; None: what the size requires."""


class MicroBatch(Method):
    """Gradient accumulation at a constant global batch."""

    name, group, stage = "micro_batch", "batch", Stage.MODULE
    Config = MicroBatchConfig
    short = "size"
    stays_idle = leaves_no_trace = True

    def splits(self, scope: "SearchScope", per_rank: int) -> list[tuple[int, int]]:
        if scope.profile.has_batchnorm:
            scope.note(
                "micro_batch: the model has batch norms, whose statistics a split batch would change, so the batch is not split"
            )
        for kept in scope.kept(self.name):
            if kept.size or kept.accumulation:
                size = kept.size or per_rank // kept.accumulation
                return [(size, per_rank // size)] if size and per_rank % size == 0 else []
        if scope.profile.has_batchnorm or not scope.may(self.name):
            return [(per_rank, 1)]
        return [(size, per_rank // size) for size in range(per_rank, 0, -1) if per_rank % size == 0]

    def implied(self, candidate: "Candidate") -> Settings | None:
        return {"size": candidate.micro} if candidate.accumulation > 1 else None

    def scaled_to(
        self, config: MicroBatchConfig, axes: Mapping[str, int], batch: "BatchSplit | None"
    ) -> MicroBatchConfig:
        return config if batch is None else replace(config, size=batch.micro, accumulation=batch.accumulation)

    def batch_split(self, config: MicroBatchConfig) -> tuple[int | None, int | None]:
        return config.size, config.accumulation

    def read(self, values: Settings) -> Settings:
        size = values.get("size")
        if isinstance(size, str) and size != "auto":
            raise self.bad("size", size, "a whole number of at least 1, or 'auto'")
        return {**values, "size": None} if size == "auto" else values  # without a search: one forward pass

    def apply(self, ctx: "Application", config: MicroBatchConfig) -> None:
        if config != MicroBatchConfig() and any(isinstance(module, _BatchNorm) for module in ctx.model.modules()):
            ctx.note("micro_batch: batch norms take their statistics from each micro-batch, not from the whole batch")

    def reason(self, config: MicroBatchConfig) -> str:
        parts = [f"{config.size} samples a pass"] if config.size else []
        parts += [f"{config.accumulation} passes an update"] if config.accumulation else []
        return ", ".join(parts) or "one pass an update"
