"""Replay recorded kernels instead of launching them one by one; the compiler records them."""

from typing import TYPE_CHECKING, Any

import torch

from drivetrain.strategy.method import Method, NoConfig, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext


class CudaGraphs(Method):
    """`torch.compile(mode="reduce-overhead")`; needs batches of one shape."""

    name, group, stage = "cuda_graphs", "dynamo", Stage.MESH
    why = "kernels are replayed without launch cost; batches must have one shape"

    def requires(self, profile: Any, device: torch.device, world: int) -> str | None:
        return None if device.type == "cuda" else "it needs a CUDA device"

    def expand(self, config: NoConfig) -> dict[str, Any]:
        """Stand for itself and the compiler, which records the kernels that it makes."""
        return {"cuda_graphs": None, "native_dynamo": None}

    def apply(self, ctx: "PlanContext", config: NoConfig) -> None:
        ctx.note("cuda_graphs: use drop_last=True, a smaller last batch would be recorded anew")
