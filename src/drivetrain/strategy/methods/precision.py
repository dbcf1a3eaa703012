"""The methods that change the width of numbers: mixed precision (Micikevicius et al., 2018), TF32, 8-bit products
(Micikevicius et al., 2022) by the layers of `drivetrain.module.fp8`, and parameters in 16 bits with a float32 copy in the optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import MethodConfigError, UnsupportedMethodError
from drivetrain.core.types import Settings
from drivetrain.module.distributed_tensors import is_dtensor, like_sharded, synchronise
from drivetrain.module.fp8 import Format, Recipe, convert_linears_to_fp8, supports_fp8
from drivetrain.module.optimizers import host_copy, with_master_weights
from drivetrain.module.wrapping import named_clean_parameters
from drivetrain.strategy.method import Method, Option, Positive, Site, Stage
from drivetrain.strategy.methods.cpu_offload import pins_memory
from drivetrain.strategy.methods.fsdp import SHARDING, dtype_name
from drivetrain.strategy.registry import find_method

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application, Candidate, Effects, SearchScope


@dataclass(frozen=True, kw_only=True)
class SixteenBitsConfig:
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """`bfloat16`, `float16`, or `auto`: bfloat16 if the device supports it, else float16."""


@dataclass(frozen=True, kw_only=True)
class AmpConfig(SixteenBitsConfig):
    skip_if_nonfinite: bool = False
    """Whether to skip an update with a non-finite gradient; float16 always does."""


class SixteenBits(Method):
    """What mixed and half precision share: the choice of the 16-bit type."""

    short = "dtype"
    dimension = "precision"
    unproved_on = frozenset({"cpu"})
    short_label = ""  # the precision names it
    leaves_no_trace = True

    def read(self, values: Settings) -> Settings:
        if "dtype" in values:
            values["dtype"] = dtype_name(values["dtype"])
        return values

    def chosen_dtype(self, config: Any, device: torch.device) -> torch.dtype:
        """Return the type to compute in on a device."""
        is_bf16 = _has_bf16(device) if config.dtype == "auto" else config.dtype == "bfloat16"
        return torch.bfloat16 if is_bf16 else torch.float16

    def simulated(self, config: Any) -> Any:
        """Replace float16 by bfloat16, which has the same size and needs no scaler."""
        return replace(config, dtype="bfloat16") if config.dtype == "float16" else config

    def check(self, config: Any, site: Site) -> None:
        if config.dtype == "bfloat16" and not _has_bf16(site.device):
            raise UnsupportedMethodError(
                f"{self.name}: bfloat16 needs a CPU or a CUDA device of compute capability 8.0 or newer; {site.device} does not "
                "support it. Use 'fp16' or 'auto'."
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
        dtype, model = sixteen_bits(scope), scope.task.model
        has_effect = model is None or any(
            p.dtype != torch.float64 for p in model.parameters()
        )  # autocast leaves those alone
        is_offered = scope.must(self.name) or (has_effect and dtype in scope.machine.flops and scope.usable(self))
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
    """Return the 16-bit type that a search uses: the requested one, or the one that is fast on this machine."""
    kept = next((config.dtype for config in scope.kept(AmpNative.name)), "auto")
    return kept if kept != "auto" else "bfloat16" if "bfloat16" in scope.machine.flops or scope.is_cpu else "float16"


def _has_bf16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True, kw_only=True)
class Tf32Config:
    precision: Literal["high"] = "high"


class Tf32(Method):
    """TF32 for matrix products and convolutions of the whole process."""

    name, group, stage, numerics = "tf32", "precision", Stage.MODULE, "tf32"
    Config = Tf32Config
    short = "precision"
    dimension = "precision"
    why = "float32 products on tensor cores, in the whole process"
    leaves_no_trace = True
    short_label = ""  # the precision names it
    not_simulated = "it does not change memory"

    def options(self, scope: "SearchScope") -> list[Option]:
        return self.flag_options(scope, "tf32" in scope.machine.flops)

    def affect(self, effects: "Effects", config: Tf32Config) -> None:
        if effects.rate == "float32":  # with 16 bits, few products are left for it
            effects.precision = effects.rate = "tf32"

    def requires(self, profile: object, device: torch.device, world: int) -> str | None:
        is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return None if is_new else "it needs a CUDA device of compute capability 8.0 or newer"

    def apply(self, ctx: "Application", config: Tf32Config) -> None:
        # The older switch sets the newer one too; the newer alone makes reading the older an error, and the compiler reads it.
        torch.set_float32_matmul_precision("high")
        backends: Any = torch.backends
        for backend in (backends.cudnn.conv, backends.cudnn.rnn):
            backend.fp32_precision = "tf32"


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    include: tuple[str, ...] = ()
    """Layers whose dotted name contains one of these words are converted too, even small ones and the output head."""
    exclude: tuple[str, ...] = ("head",)
    """Layers whose dotted name contains one of these words are not converted."""
    recipe: Recipe = "tensorwise"
    format: Format = "HYBRID"
    """`HYBRID`: gradients in e5m2, the rest in e4m3; `E4M3`: all in e4m3."""
    min_features: Positive = 2048
    """Smaller layers are slower in 8 bits and are not converted."""


class Fp8(Method):
    """Matrix products in 8 bits."""

    name, group, stage, numerics = "fp8", "amp", Stage.MODULE, "low"
    Config = Fp8Config
    ignored_keys = ("margin", "interval", "amax_history_len", "amax_compute_algo")
    dimension = AmpNative.dimension
    why = "large linear layers multiply in 8 bits"
    short_label = ""  # the precision names it
    not_simulated = "it needs the device itself"

    def options(self, scope: "SearchScope") -> list[Option]:
        """Offer it together with 16-bit autocast, which covers everything that is not computed in 8 bits."""
        amp, rates = find_method(AmpNative.name), scope.machine.flops
        is_fast = "float8" in rates and sixteen_bits(scope) == "bfloat16" and bool(amp.options(scope))
        if not scope.must(self.name) and not (is_fast and scope.may(amp.name) and scope.usable(self)):
            return []
        return [((amp.name, scope.config(amp, dtype="bfloat16")), (self.name, scope.config(self)))]

    def affect(self, effects: "Effects", config: Fp8Config) -> None:
        effects.precision = effects.rate = "float8"
        effects.arithmetic, effects.cast_width = "bfloat16", 2.0

    def read(self, values: Settings) -> Settings:
        values["format"] = str(values.get("format", "HYBRID")).upper()
        for key in ("include", "exclude"):
            if isinstance(values.get(key), str):
                values[key] = (values[key],)
            if not all(isinstance(word, str) and word for word in values.get(key, ())):
                raise self.bad(key, values[key], "words that names of layers contain")
        return values

    def requires(self, profile: object, device: torch.device, world: int) -> str | None:
        return None if supports_fp8(device) else "it needs a CUDA device of compute capability 8.9 or newer"

    def check(self, config: Fp8Config, site: Site) -> None:
        modules = [] if site.model is None else site.model.named_modules()
        linears = [name for name, module in modules if isinstance(module, nn.Linear)]
        for word in config.include:
            if site.model is not None and not any(word in name for name in linears):
                raise MethodConfigError(
                    f"fp8: include={word!r} matches no linear layer of {type(site.model).__name__}. Its linear layers: "
                    f"{', '.join(linears[:12]) or 'none'}{', ...' if len(linears) > 12 else ''}."
                )

    def apply(self, ctx: "Application", config: Fp8Config) -> None:
        names = convert_linears_to_fp8(
            ctx.model, min_features=config.min_features, skip=config.exclude, recipe=config.recipe, format=config.format,
            include=config.include,
        )  # fmt: skip
        shown = f" ({', '.join(names)})" if 0 < len(names) <= 4 else ""
        ctx.note(f"fp8: {len(names)} linear layers{shown}")


@dataclass(frozen=True, kw_only=True)
class HalfConfig(SixteenBitsConfig):
    master_weights: bool = True
    """Whether the optimizer trains float32 copies."""


class Half(SixteenBits):
    """The whole model in 16 bits."""

    name, group, stage, numerics = "half", "half", Stage.MODULE, "low"
    Config = HalfConfig
    is_alone_in_group = copies_parameters = True
    why = "parameters and activations in 16 bits"

    def options(self, scope: "SearchScope") -> list[Option]:
        return self.flag_options(scope, sixteen_bits(scope) in scope.machine.flops)

    def fits(self, config: HalfConfig, candidate: "Candidate") -> str | None:
        if candidate.tensor > 1 or candidate.pipe > 1:
            return "its float32 copies are made from the whole model"
        names = {"chunked_cross_entropy", "cpu_offload"} & candidate.configs.keys()
        return f"a search does not combine it with {min(names)}" if names else None

    def affect(self, effects: "Effects", config: HalfConfig) -> None:
        effects.precision, effects.rate, effects.arithmetic = "half", "bfloat16", "bfloat16"
        effects.parameter_width, effects.cast_width = 2.0, 0.0

    def apply(self, ctx: "Application", config: HalfConfig) -> None:
        dtype = self.chosen_dtype(config, ctx.device)
        ctx.scaler_dtype = dtype
        if config.master_weights and not SHARDING.isdisjoint(ctx.plan.site.names):
            ctx.autocast_dtype = dtype  # shards stay in float32 and are gathered in 16 bits: these are the copies
            return
        originals = {name: p.data for name, p in ctx.model.named_parameters() if p.is_floating_point()}
        cast = partial(cast_floats, dtype)
        ctx.model._apply(cast)  # `to` would also cast complex numbers, which lose their imaginary part
        ctx.input_changes.append(cast)
        if config.master_weights:
            ctx.recipe_changes.append(lambda recipe: recipe.wrap(partial(_train_copies, ctx, originals)))


def cast_floats(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in another type."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _train_copies(
    ctx: "Application", originals: dict[str, Tensor], inner: Any, groups: object, settings: Settings
) -> Optimizer:
    """Return an optimizer of float32 copies, or wider ones where the parameters were."""
    masters: dict[int, nn.Parameter] = {}
    offload = ctx.plan.config("cpu_offload")
    axes = () if ctx.mesh is None else tuple(axis for axis in ctx.mesh.mesh_dim_names if axis != "pipe")
    for name, parameter in named_clean_parameters(ctx.model):
        if name not in originals:
            continue
        value = originals[name]
        value = value.to(ctx.device, torch.promote_types(value.dtype, torch.float32), copy=True)
        if axes:  # as was done to the parameters
            synchronise([value], ctx.mesh[axes] if len(axes) < ctx.mesh.ndim else ctx.mesh)
        if is_dtensor(parameter):
            value = like_sharded(value, parameter)
        if offload is not None:
            value = host_copy(value, value.dtype, pins_memory(ctx, offload))
        masters[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return with_master_weights(inner, masters, groups, settings)
