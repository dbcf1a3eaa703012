"""Linear layers in 8-bit floating point (Micikevicius et al., 2022), by the layers of `drivetrain.module.fp8`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.errors import MethodConfigError, unknown_name
from drivetrain.module.fp8 import RECIPES, convert_linears_to_fp8, supports_fp8
from drivetrain.strategy.method import Method, Stage, is_whole

if TYPE_CHECKING:
    from drivetrain.strategy.apply import PlanContext


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    exclude: tuple[str, ...] = ("head",)
    """Layers whose dotted name contains one of these words stay as they are."""
    recipe: str = "tensorwise"
    min_features: int = 2048
    """Smaller layers are slower in 8 bits and stay."""


class Fp8(Method):
    """Matrix products in 8 bits."""

    name, group, stage, numerics = "fp8", "amp", Stage.MODULE, "low"
    Config = Fp8Config
    deaf = ("margin", "interval", "amax_history_len", "amax_compute_algo", "format")
    why = "large linear layers multiply in 8 bits"

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("recipe", "tensorwise") not in RECIPES:
            raise MethodConfigError(unknown_name("recipe", values["recipe"], RECIPES, where=self.name))
        exclude = values.get("exclude", ("head",))
        values["exclude"] = (exclude,) if isinstance(exclude, str) else exclude
        if not is_whole(values.get("min_features", 1)):
            raise self.bad("min_features", values["min_features"], "a whole number of at least 1")
        return values

    def requires(self, profile: Any, device: torch.device, world: int) -> str | None:
        return None if supports_fp8(device) else "it needs a CUDA device of compute capability 8.9 or newer"

    def apply(self, ctx: "PlanContext", config: Fp8Config) -> None:
        names = convert_linears_to_fp8(ctx.model, config.recipe, config.min_features, config.exclude)  # type: ignore[arg-type]
        ctx.note(f"fp8: {len(names)} linear layers")
