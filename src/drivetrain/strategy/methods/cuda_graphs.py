"""Replay recorded kernels instead of launching them one by one; the compiler records them."""

from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.errors import ConflictError
from drivetrain.strategy.method import Method, NoConfig, Site, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext


class CudaGraphs(Method):
    """`torch.compile(mode="reduce-overhead")`; needs batches of one shape."""

    name, group, stage = "cuda_graphs", "dynamo", Stage.MESH
    why = "kernels are replayed without launch cost; batches must have one shape"

    def requires(self, profile: Any, device: torch.device, world: int) -> str | None:
        return None if device.type == "cuda" else "it needs a CUDA device"

    def check(self, config: NoConfig, site: Site) -> None:
        if "native_dynamo" not in site.names:
            raise ConflictError(
                "cuda_graphs records what the compiler makes, and there is no compile in the plan. Add 'compile'."
            )

    def apply(self, ctx: "PlanContext", config: NoConfig) -> None:
        ctx.note("cuda_graphs: use drop_last=True, a smaller last batch would be recorded anew")
