"""Replay recorded kernels instead of launching them one by one; the compiler records them."""

from typing import TYPE_CHECKING, Any

import torch

from drivetrain.strategy.method import Method, NoConfig, Option, Stage
from drivetrain.strategy.registry import method_names

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.candidates import Candidate
    from drivetrain.strategy.search.space import SearchScope


_COMPILER = "native_dynamo"


class CudaGraphs(Method):
    """`torch.compile(mode="reduce-overhead")`; needs batches of one shape."""

    name, group, stage = "cuda_graphs", "dynamo", Stage.MESH
    why = "kernels are replayed without launch cost; batches must have one shape"
    compiles = records_kernels = True
    warm_up_steps = 1
    not_simulated = "there is nothing to record on fake tensors"

    def options(self, scope: "SearchScope") -> list[Option]:
        return self.flag_options(scope, not scope.is_cpu and _COMPILER in method_names())

    def fits(self, config: NoConfig, candidate: "Candidate") -> str | None:
        compiler = candidate.configs.get(_COMPILER)
        if compiler is None or compiler.scope != "model" or candidate.world > 1:
            return "it records a whole compiled model on one rank"
        names = {"cpu_offload", "checkpoint"} & candidate.configs.keys()
        return f"{min(names)} does not run in recorded kernels" if names else None

    def affect(self, effects: "Effects", config: NoConfig) -> None:
        effects.is_recorded = True

    def label(self, config: NoConfig) -> str:
        return "graphs"

    def requires(self, profile: object, device: torch.device, world: int) -> str | None:
        return None if device.type == "cuda" else "it needs a CUDA device"

    def expand(self, config: NoConfig) -> dict[str, Any]:
        """Stand for itself and the compiler, which records the kernels that it makes."""
        return {self.name: None, _COMPILER: None}

    def apply(self, ctx: "Application", config: NoConfig) -> None:
        ctx.note("cuda_graphs: use drop_last=True, a smaller last batch would be recorded again")
