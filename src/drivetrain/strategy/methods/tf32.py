"""float32 products with a 10-bit mantissa on tensor cores."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.strategy.method import Method, Option, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.space import SearchScope


@dataclass(frozen=True, kw_only=True)
class Tf32Config:
    precision: str = "high"


class Tf32(Method):
    """TF32 for matrix products and convolutions of the whole process."""

    name, group, stage, numerics = "tf32", "precision", Stage.MODULE, "tf32"
    Config = Tf32Config
    short = "precision"
    dimension = "precision"
    why = "float32 products on tensor cores, in the whole process"
    leaves_no_trace = True
    not_simulated = "it does not change memory"

    def options(self, scope: "SearchScope") -> list[Option]:
        return self.flag_options(scope, "tf32" in scope.machine.flops)

    def label(self, config: Tf32Config) -> str:
        return ""  # the precision says it

    def affect(self, effects: "Effects", config: Tf32Config) -> None:
        if effects.rate == "float32":  # with 16 bits, few products are left for it
            effects.precision = effects.rate = "tf32"

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("precision", "high") != "high":
            raise self.bad("precision", values["precision"], "'high'")
        return values

    def requires(self, profile: object, device: torch.device, world: int) -> str | None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a CUDA device of compute capability 8.0 or newer"
        return None

    def apply(self, ctx: "Application", config: Tf32Config) -> None:
        # The older switch sets the newer one too; the newer alone makes reading the older an error, and the compiler reads it.
        torch.set_float32_matmul_precision("high")
        backends: Any = torch.backends
        for backend in (backends.cudnn.conv, backends.cudnn.rnn):
            backend.fp32_precision = "tf32"
        ctx.note("tf32: applies to the whole process")
