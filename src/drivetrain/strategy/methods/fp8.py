"""Linear layers in 8-bit floating point (Micikevicius et al., 2022), by the layers of `drivetrain.module.fp8`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.core.errors import MethodConfigError, unknown_name
from drivetrain.module.fp8 import FORMATS, RECIPES, convert_linears_to_fp8, supports_fp8
from drivetrain.strategy.method import Method, Option, Site, Stage, is_whole
from drivetrain.strategy.methods.amp_native import AmpNative, sixteen_bits
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.space import SearchScope


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    include: tuple[str, ...] = ()
    """Layers whose dotted name contains one of these words are taken too: small ones, and the output head."""
    exclude: tuple[str, ...] = ("head",)
    """Layers whose dotted name contains one of these words stay as they are."""
    recipe: str = "tensorwise"
    format: str = "HYBRID"
    """`HYBRID`: gradients in e5m2, the rest in e4m3; `E4M3`: all in e4m3."""
    min_features: int = 2048
    """Smaller layers are slower in 8 bits and stay."""


class Fp8(Method):
    """Matrix products in 8 bits."""

    name, group, stage, numerics = "fp8", "amp", Stage.MODULE, "low"
    Config = Fp8Config
    ignored_keys = ("margin", "interval", "amax_history_len", "amax_compute_algo")
    dimension = AmpNative.dimension
    why = "large linear layers multiply in 8 bits"
    not_simulated = "it needs the device itself"

    def options(self, scope: "SearchScope") -> list[Option]:
        """Offer it together with 16-bit autocast, for all that stays out of 8 bits."""
        amp, rates = find_method(AmpNative.name), scope.machine.flops
        is_fast = "float8" in rates and sixteen_bits(scope) == "bfloat16" and bool(amp.options(scope))
        if not scope.must(self.name) and not (is_fast and scope.may(amp.name) and scope.usable(self)):
            return []
        return [((amp.name, scope.config(amp, dtype="bfloat16")), (self.name, scope.config(self)))]

    def label(self, config: Fp8Config) -> str:
        return ""  # the precision says it

    def affect(self, effects: "Effects", config: Fp8Config) -> None:
        effects.precision = effects.rate = "float8"
        effects.arithmetic, effects.cast_width = "bfloat16", 2.0

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("recipe", "tensorwise") not in RECIPES:
            raise MethodConfigError(unknown_name("recipe", values["recipe"], RECIPES, where=self.name))
        values["format"] = str(values.get("format", "HYBRID")).upper()
        if values["format"] not in FORMATS:
            raise MethodConfigError(unknown_name("format", values["format"], FORMATS, where=self.name))
        for key in ("include", "exclude"):
            if isinstance(values.get(key), str):
                values[key] = (values[key],)
            if not all(isinstance(word, str) and word for word in values.get(key, ())):
                raise self.bad(key, values[key], "words that names of layers contain")
        if not is_whole(values.get("min_features", 1)):
            raise self.bad("min_features", values["min_features"], "a whole number of at least 1")
        return values

    def requires(self, profile: object, device: torch.device, world: int) -> str | None:
        return None if supports_fp8(device) else "it needs a CUDA device of compute capability 8.9 or newer"

    def check(self, config: Fp8Config, site: Site) -> None:
        if site.model is None:
            return
        linears = [name for name, module in site.model.named_modules() if isinstance(module, nn.Linear)]
        for word in config.include:
            if not any(word in name for name in linears):
                raise MethodConfigError(
                    f"fp8: include={word!r} matches no linear layer of {type(site.model).__name__}. Its linear layers: "
                    f"{', '.join(linears[:12]) or 'none'}{', ...' if len(linears) > 12 else ''}."
                )

    def apply(self, ctx: "Application", config: Fp8Config) -> None:
        settings: dict[str, Any] = {"recipe": config.recipe, "format": config.format, "include": config.include}
        names = convert_linears_to_fp8(ctx.model, min_features=config.min_features, skip=config.exclude, **settings)
        shown = f" ({', '.join(names)})" if 0 < len(names) <= 4 else ""
        ctx.note(f"fp8: {len(names)} linear layers{shown}")
