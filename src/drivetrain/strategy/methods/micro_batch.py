"""Split each rank's part of the global batch into several forward passes, and update once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.core.types import Settings
from drivetrain.strategy.method import Method, Positive, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, BatchSplit, Candidate, SearchScope


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
