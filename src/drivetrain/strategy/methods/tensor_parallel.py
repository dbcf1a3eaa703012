"""Split matrices over the ranks of the `tensor` axis, by an explicit or registered plan."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, MethodConfigError, StrategyError
from drivetrain.module.tensor_parallel import STYLES, expand_tp_plan, find_tp_plan, parallelize
from drivetrain.strategy.method import Method, Site, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig:
    plan: Any = "auto"
    """Layers and their styles, by dotted name or pattern; "auto": what `register_tp_plan` or the model itself says."""


class TensorParallel(Method):
    """Column-wise and row-wise linear layers."""

    name, group, stage = "tensor_parallel", "parallel", Stage.TENSOR
    Config = TensorParallelConfig
    needs_processes = True
    short = "plan"
    why = "matrices are split over the ranks of the tensor axis"

    def parse(self, config: Any = None) -> TensorParallelConfig:
        """Read also the plan itself, `{layer: style}`."""
        if isinstance(config, dict) and config and "plan" not in config and set(config.values()) <= set(STYLES):
            config = {"plan": config}
        return super().parse(config)

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        plan = values.get("plan", "auto")
        if plan == "auto":
            return values
        if not (isinstance(plan, tuple) and plan and all(isinstance(pair, tuple) and len(pair) == 2 for pair in plan)):
            raise self.bad("plan", plan, "'auto' or {layer: style}")
        for name, style in plan:
            if style not in STYLES:
                raise self.bad(f"plan[{name!r}]", style, f"one of {', '.join(STYLES)}")
        values["plan"] = tuple(sorted(plan))
        return values

    def check(self, config: TensorParallelConfig, site: Site) -> None:
        if site.axis("tensor") == 1:
            raise StrategyError(
                "tensor_parallel: the mesh has no 'tensor' axis. Add ('parallel_mode', [('tensor', 2), ('data', 1)]) or another size."
            )
        if site.model is not None:
            self._expanded(config, site)

    def _expanded(self, config: TensorParallelConfig, site: Site) -> dict[str, Any]:
        assert site.model is not None
        plan = find_tp_plan(site.model) if config.plan == "auto" else dict(config.plan)
        if not plan:
            raise MethodConfigError(
                f"tensor_parallel: there is no plan for {type(site.model).__name__}. Pass {{'plan': {{'layer.name': 'colwise', ...}}}}, or "
                "call drivetrain.register_tp_plan(cls, {...})."
            )
        try:
            return expand_tp_plan(site.model, plan, site.axis("tensor"))
        except ConfigError as error:
            raise MethodConfigError(str(error)) from error

    def apply(self, ctx: "PlanContext", config: TensorParallelConfig) -> None:
        from drivetrain.module.distributed_tensors import synchronise

        site = ctx.plan.site
        expanded = self._expanded(config, Site(device=site.device, world=site.world, axes=site.axes, model=ctx.model))
        mesh = ctx.mesh["tensor"] if ctx.mesh.ndim > 1 else ctx.mesh
        ctx.model.to(ctx.device)
        synchronise([*ctx.model.parameters(), *ctx.model.buffers()], mesh)  # all ranks cut the same matrices
        ctx.model = parallelize(ctx.model, mesh, expanded)
        ctx.note(f"tensor_parallel: {len(expanded)} layers over {mesh.size()} ranks")
