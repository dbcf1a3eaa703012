"""Split each rank's part of the global batch into several forward passes, and update once."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.strategy.method import Method, Stage, is_whole

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    size: int | None = None
    """Samples of one forward pass on one rank; None: what the accumulation leaves, or the whole part."""
    accumulation: int | None = None
    """Forward passes before an update; None: what the size asks for."""


class MicroBatch(Method):
    """Gradient accumulation at a constant global batch."""

    name, group, stage = "micro_batch", "batch", Stage.MODULE
    Config = MicroBatchConfig
    short = "size"

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("size") == "auto":
            values["size"] = None  # without a search: one forward pass
        for key in ("size", "accumulation"):
            if values.get(key) is not None and not is_whole(values[key]):
                raise self.bad(
                    key, values[key], "a whole number of at least 1" + (", or 'auto'" if key == "size" else "")
                )
        return values

    def apply(self, ctx: "PlanContext", config: MicroBatchConfig) -> None:
        splits = config.size is not None or config.accumulation is not None
        if splits and any(isinstance(module, _BatchNorm) for module in ctx.model.modules()):
            ctx.note("micro_batch: batch norms take their statistics from each micro-batch, not from the whole batch")

    def reason(self, config: MicroBatchConfig) -> str:
        parts = [f"{config.size} samples a pass"] if config.size else []
        parts += [f"{config.accumulation} passes an update"] if config.accumulation else []
        return ", ".join(parts) or "one pass an update"
