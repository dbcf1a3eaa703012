"""Split the layers of a model over the ranks of the `pipe` axis and run micro-batches through them as a pipeline.

Each rank keeps the parameters of its own stages only. `result.model(batch)` runs the whole schedule, backward included.
"""

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain.core.errors import (
    ConfigError,
    ConflictError,
    MethodConfigError,
    UnsupportedMethodError,
    unknown_name,
)
from drivetrain.core.types import Settings
from drivetrain.module.blocks import repeated_blocks
from drivetrain.strategy.method import Method, Option, Positive, Site, Stage, config_errors
from drivetrain.strategy.methods.fsdp import SHARDING

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Candidate, Effects, SearchScope


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    schedule: str = "auto"
    """`1F1B`, `Interleaved1F1B`, `GPipe`; "auto": interleaved if a rank has several stages, else 1F1B."""
    microbatches: Positive | None = None
    """Equal parts of a rank's batch that follow each other through the stages; None: two for each rank of the axis."""
    split: Any = "auto"
    """Modules before which stages begin, by dotted name; "auto": where the work is balanced."""
    stages: Positive | None = None
    """Stages over all ranks, a multiple of the axis; None: as many as `split` implies, else one on each rank, or two if interleaved."""


class PipelineParallel(Method):
    """Stages of a model on different ranks."""

    name, group, stage = "pipeline_parallel", "parallel", Stage.PIPELINE
    Config = PipelineConfig
    needs_processes = True
    short = "split"
    renamed: ClassVar[dict[str, str]] = {
        "nstages": "stages",
        "chunks": "microbatches",
        "pipe_schedule": "schedule",
        "insert_before_modules": "split",
    }
    conflicts: ClassVar[dict[str, str]] = {
        "zero1": "Use fsdp or zero2, or plain data parallelism, with a pipeline.",
        "cuda_graphs": "A pipeline communicates with other ranks between its steps. Remove cuda_graphs.",
        "sequence_parallel": "Stages exchange whole sequences. Use one of them.",
    }
    axis: ClassVar[str] = "pipe"
    short_label = ""  # the mesh names it
    why = "layers are split over the ranks of the pipe axis"
    prevents_simulation = "pipeline stages exchange shapes, which a fake process group cannot do"

    def axis_sizes(self, scope: "SearchScope") -> list[int]:
        if scope.profile.has_batchnorm:
            return []  # whose statistics micro-batches would change
        blocks = sum(unit.count for unit in scope.profile.units if unit.path)
        return list(range(2, min(scope.world, blocks) + 1))

    def axis_options(self, scope: "SearchScope", size: int, micro: int, accumulation: int) -> list[Option]:
        """Cut a pass into at least as many micro-batches as stages, so that all stages are busy, and do not accumulate further."""
        parts = (size, 2 * size, 4 * size, 8 * size)
        possible = [count for count in parts if accumulation == 1 and count <= micro and micro % count == 0]
        return [((self.name, scope.config(self, microbatches=count)),) for count in possible]

    def settled(self, config: PipelineConfig, candidate: "Candidate") -> PipelineConfig:
        return replace(config, microbatches=self.microbatches(config, candidate.pipe))

    def affect(self, effects: "Effects", config: PipelineConfig) -> None:
        effects.stages = effects.axes.get("pipe", 1)
        effects.parts = self.microbatches(config, effects.stages)
        effects.parameter_ranks *= effects.stages
        effects.holds_gradients = True

    def sample_multiple(self, config: PipelineConfig, site: Site) -> int:
        return self.microbatches(config, site.axis("pipe"))

    def microbatches(self, config: PipelineConfig, ranks: int) -> int:
        """Return the number of micro-batches of a pass for a size of the pipe axis."""
        return config.microbatches or 2 * ranks

    def read(self, values: Settings) -> Settings:
        if "schedule" in values and values["schedule"] != "auto":
            from drivetrain.module.pipeline_schedule import read_schedule

            if not isinstance(values["schedule"], str):
                raise self.bad("schedule", values["schedule"], "'auto', '1F1B', 'Interleaved1F1B' or 'GPipe'")
            with config_errors():
                values["schedule"] = read_schedule(values["schedule"])
        split = values.get("split", "auto")
        if isinstance(split, str) and split != "auto":
            values["split"] = (split,)
        elif split != "auto" and not (
            isinstance(split, tuple) and split and all(isinstance(name, str) for name in split)
        ):
            raise self.bad("split", split, "'auto' or names of the modules before which stages begin")
        return values

    def check(self, config: PipelineConfig, site: Site) -> None:
        self.require_axis(site)
        stages, schedule, microbatches = self.shape(config, site.axis("pipe"))
        if schedule == "Interleaved1F1B" and microbatches % site.axis("pipe"):
            raise self.bad(
                "microbatches", microbatches, f"a multiple of the pipe axis ({site.axis('pipe')}) to interleave"
            )
        if schedule == "1F1B" and microbatches < stages:
            raise self.bad("microbatches", microbatches, f"at least as many as stages ({stages}) for 1F1B, or GPipe")
        if site.model is not None and config.split != "auto":
            modules = [name for name, _ in site.model.named_modules() if name]
            for name in config.split:
                if name not in modules:
                    raise MethodConfigError(unknown_name("module", name, modules, where="pipeline_parallel: split"))

    def shape(self, config: PipelineConfig, ranks: int) -> tuple[int, str, int]:
        """Return the number of stages, the schedule and the number of micro-batches for a size of the pipe axis."""
        named = None if config.split == "auto" else len(config.split) + 1
        stages = config.stages or named or ranks * (2 if config.schedule == "Interleaved1F1B" else 1)
        if named is not None and stages != named:
            raise MethodConfigError(
                f"pipeline_parallel: split names {named - 1} modules, which makes {named} stages, but stages={stages}. Set one of them."
            )
        if stages % ranks:
            raise MethodConfigError(
                f"pipeline_parallel: {stages} stages do not divide over a pipe axis of {ranks}. Choose a multiple of {ranks}."
            )
        schedule = config.schedule
        if schedule == "auto":
            schedule = "Interleaved1F1B" if stages > ranks else "1F1B"
        elif (schedule == "Interleaved1F1B") != (stages > ranks):
            expected = "Interleaved1F1B" if stages > ranks else "1F1B or GPipe"
            raise self.bad("schedule", schedule, f"{expected} for {stages} stages on {ranks} ranks")
        return stages, schedule, self.microbatches(config, ranks)

    def apply(self, ctx: "Application", config: PipelineConfig) -> None:
        """Split the model and replace it by this rank's stages."""
        from drivetrain.module.pipeline import split_model
        from drivetrain.module.pipeline_schedule import PipelinedModel

        stages, schedule, microbatches = self.shape(config, ctx.plan.site.axis("pipe"))
        _check_methods(ctx, schedule)
        if ctx.loss_func is None:
            raise ConfigError(
                "pipeline_parallel: a pipeline runs forward and backward together and needs loss_func. Pass it."
            )
        seen, given = ctx.sample_arguments(), None
        if seen is not None:
            given = inspect.signature(ctx.model.forward).bind(*seen[0], **seen[1]).arguments
        with config_errors("pipeline_parallel: "):
            split = split_model(ctx.model, stages, split=config.split, given=given)
        group = ctx.mesh.get_group("pipe")
        rank, ranks = group.rank(), group.size()
        own = range(rank, stages, ranks)
        _check_whole_blocks(ctx, split)
        for names in split.tied:
            if len({stage % ranks for stage in names}) < len(names):
                raise MethodConfigError(
                    f"pipeline_parallel: the stages {', '.join(map(str, names))} share a parameter ({', '.join(names.values())}), and two "
                    "of them are on one rank. Use one stage on each rank."
                )
        ctx.whole = ctx.model
        ctx.model = PipelinedModel(
            ctx.model, split, own, schedule=schedule, microbatches=microbatches, group=group, device=ctx.device
        )
        if (recipe := ctx.recipe) is not None:
            recipe.is_changed = True  # an optimizer of the whole model holds parameters that are elsewhere now
            inner = recipe.groups
            recipe.groups = lambda model: list(inner(model)) or [{"params": []}]  # a stage may have none of them
        shares = ", ".join(f"{share:.0%}" for share in split.shares)
        ctx.note(
            f"pipeline_parallel: {schedule}, {microbatches} micro-batches, {stages} stages that begin at {', '.join(split.starts)} "
            f"({shares} of the work)"
        )


def _check_methods(ctx: "Application", schedule: str) -> None:
    """Reject what pipelines cannot do with other methods, the same on all ranks."""
    if getattr(ctx.plan.config("native_dynamo"), "scope", None) == "model":
        raise ConflictError(
            "native_dynamo with scope 'model' and pipeline_parallel cannot be used together. Use 'block'."
        )
    if schedule == "Interleaved1F1B" and ctx.scaler_dtype is torch.float16:
        raise UnsupportedMethodError(
            "pipeline_parallel: interleaved schedules do not support the gradient scaler of float16. Use ('amp_native', 'bf16'), "
            "or one stage on each rank."
        )
    for name, key in {**dict.fromkeys(sorted(SHARDING), "wrap"), "checkpoint": "wrap_class"}.items():
        config = ctx.plan.config(name)
        chosen = getattr(config, key, "auto")
        if chosen != "auto" and not isinstance(chosen, int):
            raise ConflictError(
                f"{name} names modules ({chosen}), but a pipeline stage may have none of them. Use 'auto'."
            )
        if getattr(config, "ignored", None):
            raise ConflictError(f"{name}: ignored={config.ignored} cannot be used with pipeline_parallel. Remove it.")


def _check_whole_blocks(ctx: "Application", split: Any) -> None:
    """Reject methods that work on blocks where a block is not a step of a stage any more, so that they would do nothing."""
    steps = {name for part in split.parts for name in part.targets}
    blocks = [name for name, _ in repeated_blocks(ctx.model)]
    for method in ("checkpoint", "native_dynamo"):
        if ctx.plan.config(method) is not None and not (blocks and set(blocks) <= steps):
            what = "the model has no repeated blocks" if not blocks else "stages begin inside blocks"
            raise ConflictError(
                f"{method} works on whole blocks with pipeline_parallel, and {what}. Use fewer stages, or remove {method}."
            )
