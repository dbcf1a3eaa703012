"""Mixed precision: parameters in float32, products in 16 bits (Micikevicius et al., 2018)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.errors import UnsupportedMethodError
from drivetrain.strategy.method import Method, Option, Site, Stage
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application
    from drivetrain.strategy.effects import Effects
    from drivetrain.strategy.search.candidates import Candidate
    from drivetrain.strategy.search.space import SearchScope

_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class AmpConfig:
    dtype: str = "auto"
    """`bfloat16`, `float16`, or `auto`: bfloat16 where the device has it, else float16."""
    skip_if_nonfinite: bool = False
    """Whether an update with a gradient that is not finite is left out; float16 always does."""


class SixteenBits(Method):
    """What mixed and half precision share: the choice of the type."""

    short = "dtype"
    dimension = "precision"
    unproved_on = frozenset({"cpu"})
    leaves_no_trace = True

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        if "dtype" in values:
            name = str(values["dtype"]).removeprefix("torch.")
            name = _NAMES.get(name, name)
            if name not in ("auto", *_DTYPES):
                raise self.bad("dtype", values["dtype"], "'bf16', 'fp16' or 'auto'")
            values["dtype"] = name
        for key, value in values.items():
            if key != "dtype" and not isinstance(value, bool):
                raise self.bad(key, value, "True or False")
        return values

    def chosen_dtype(self, config: Any, device: torch.device) -> torch.dtype:
        """Return the type to compute in on a device."""
        if config.dtype != "auto":
            return _DTYPES[config.dtype]
        return torch.bfloat16 if _has_bf16(device) else torch.float16

    def label(self, config: object) -> str:
        return ""  # the precision says it

    def simulated(self, config: Any) -> Any:
        """Return bfloat16 for float16: it is as large and needs no scaler."""
        return replace(config, dtype="bfloat16") if config.dtype == "float16" else config

    def check(self, config: Any, site: Site) -> None:
        if config.dtype == "bfloat16" and not _has_bf16(site.device):
            raise UnsupportedMethodError(
                f"{self.name}: bfloat16 needs a CPU or a CUDA device of compute capability 8.0 or newer; "
                f"{site.device} does not support it. "
                "Use 'fp16' or 'auto'."
            )


class AmpNative(SixteenBits):
    """Autocast over forward and loss, with a gradient scaler for float16."""

    name, group, stage, numerics = "amp_native", "amp", Stage.MODULE, "mixed"
    Config = AmpConfig
    why = "matrix products in 16 bits, parameters in float32"

    def is_redundant(self, config: AmpConfig, site: Site) -> str | None:
        return "half computes in the same type already" if "half" in site.names else None

    def clash(self, config: AmpConfig, others: Mapping[str, object], device: torch.device) -> str | None:
        for name, other in others.items():
            method = find_method(name)
            if method is self or not isinstance(method, SixteenBits):
                continue
            kinds = self.chosen_dtype(config, device), method.chosen_dtype(other, device)
            if kinds[0] != kinds[1]:
                return (
                    f"{self.name} computes in {kinds[0]} and {name} in {kinds[1]}; a model can use only one. Give both the same type, or "
                    "keep one method."
                )
        return None

    def options(self, scope: "SearchScope") -> list[Option]:
        dtype = sixteen_bits(scope)
        is_offered = scope.must(self.name) or (dtype in scope.machine.flops and scope.usable(self))
        return [((self.name, scope.config(self, dtype=dtype)),)] if is_offered else []

    def settled(self, config: AmpConfig, candidate: "Candidate") -> AmpConfig:
        return replace(config, dtype="bfloat16") if config.dtype == "auto" else config

    def affect(self, effects: "Effects", config: AmpConfig) -> None:
        effects.precision = effects.rate = config.dtype
        effects.arithmetic, effects.cast_width = "bfloat16", 2.0

    def apply(self, ctx: "Application", config: AmpConfig) -> None:
        ctx.autocast_dtype = ctx.scaler_dtype = self.chosen_dtype(config, ctx.device)
        ctx.skip_nonfinite = config.skip_if_nonfinite


def sixteen_bits(scope: "SearchScope") -> str:
    """Return the 16-bit type that a search uses: the one that was asked for, else what the machine is fast in."""
    kept = next((config.dtype for config in scope.kept(AmpNative.name)), "auto")
    return kept if kept != "auto" else "bfloat16" if "bfloat16" in scope.machine.flops or scope.is_cpu else "float16"


def _has_bf16(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)
