"""Replace hand-written layers by torch's fused ones, where that provably changes nothing.

A pair names what it replaces and makes the replacement. It is kept only if it gives the same outputs: each replacement is tried on made-up
input against the original. Names and state-dict keys stay.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.core.errors import ConfigError, ConfigTypeError, MethodConfigError, unknown_name
from drivetrain.core.types import Settings
from drivetrain.module.surgery import replace_module_classes
from drivetrain.module.wrapping import GeneratedClass, subclass_of
from drivetrain.strategy.method import Method, Stage, config_errors

if TYPE_CHECKING:
    from drivetrain.strategy.method import Application

_ATTENTION = "sdpa"


@dataclass(frozen=True, kw_only=True)
class ModuleReplaceConfig:
    pairs: tuple[tuple[str, Any], ...] | None = None
    """Pairs to use, each with its keywords; None for all that apply."""


class ModuleReplace(Method):
    """Verified replacement of modules."""

    name, group, stage = "module_replace", "module_replace", Stage.MODULE
    Config = ModuleReplaceConfig
    why = "hand-written layers become fused ones"
    is_searched, leaves_no_trace = False, True
    not_simulated = "replaced modules are compared by their values, and fake tensors have none"

    def parse(self, config: object = None) -> ModuleReplaceConfig:
        """Also accept `{pair: keywords}` and a list of pairs."""
        if isinstance(config, str):
            config = (config,)
        if isinstance(config, list | tuple):
            config = {"pairs": dict.fromkeys(config)}
        elif isinstance(config, dict) and "pairs" not in config:
            config = {"pairs": config} if config else None
        return super().parse(config)

    def read(self, values: Settings) -> Settings:
        if values.get("pairs") is None:
            return values
        valid = [_ATTENTION, *_pairs]
        for name, _ in values["pairs"]:
            if name not in valid:
                raise MethodConfigError(unknown_name("pair", name, valid, where=self.name))
        return {"pairs": tuple((name, kwargs or ()) for name, kwargs in values["pairs"])}

    def apply(self, ctx: "Application", config: ModuleReplaceConfig) -> None:
        wanted = None if config.pairs is None else {name: dict(kwargs) for name, kwargs in config.pairs}
        names: list[str] = []
        remarks: list[str] = []
        if wanted is None or wanted.pop(_ATTENTION, None) is not None:
            names, remarks = fuse_attention(ctx.model, ctx.sample)
        with config_errors():
            replaced, more = replace_pairs(ctx.model, wanted)
        names += replaced
        ctx.note(f"module_replace: {len(names)} replaced" + (f" ({', '.join(names[:4])}…)" if names else ""))
        for remark in remarks + more:
            ctx.note(f"module_replace: {remark}")


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_EPSILONS = ("eps", "epsilon", "variance_epsilon", "norm_eps")
_TOLERANCE, _MODEL_TOLERANCE = 1e-5, 1e-4


class ReplacePair:
    """The base of pairs: a test for what is replaced, and the factory of its replacement."""

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module may be replaced."""
        raise NotImplementedError

    def replace(self, module: nn.Module, **kwargs: object) -> nn.Module | None:
        """Return the replacement with the same parameters, or None to keep the module."""
        raise NotImplementedError

    def sample(self, module: nn.Module) -> tuple[object, ...] | None:
        """Return random arguments to compare the two on; None if the pair needs no comparison."""
        return None


@dataclass(frozen=True)
class _Registered:
    pair: ReplacePair
    kwargs: Mapping[str, object]
    supported_dtypes: frozenset[torch.dtype]


_pairs: dict[str, _Registered] = {}


def register_replace_pair(
    pair_name: str,
    kwargs: Mapping[str, object] | None = None,
    supported_dtypes: Sequence[torch.dtype] = FLOATS,
    pair_cls: type[ReplacePair] | None = None,
) -> Callable[[type[ReplacePair]], type[ReplacePair]]:
    """Register a pair under a name: pass the class, or use the result as a decorator."""

    def register(cls: type[ReplacePair]) -> type[ReplacePair]:
        if not (isinstance(cls, type) and issubclass(cls, ReplacePair)):
            raise ConfigTypeError(f"register_replace_pair({pair_name!r}): expected a class derived from ReplacePair.")
        if pair_name in _pairs:
            raise ConfigError(f"register_replace_pair: a pair named {pair_name!r} already exists.")
        _pairs[pair_name] = _Registered(cls(), dict(kwargs or {}), frozenset(supported_dtypes))
        return cls

    if pair_cls is not None:
        register(pair_cls)
    return register


def replace_pairs(
    model: nn.Module, pairs: Mapping[str, Mapping[str, object]] | None = None
) -> tuple[list[str], list[str]]:
    """Replace in place. Return the names of the replaced modules, and remarks about those that were not."""
    wanted = {name: {} for name in _pairs} if pairs is None else pairs
    replaced: list[str] = []
    remarks: list[str] = []
    for pair_name, kwargs in wanted.items():
        if pair_name not in _pairs:
            raise ConfigError(unknown_name("pair", pair_name, _pairs, where="module_replace"))
        registered = _pairs[pair_name]
        new_modules: dict[nn.Module, nn.Module] = {}
        for name, module in model.named_modules():
            if name and registered.pair.matches(module):
                new, remark = _verified(registered, module, kwargs)
                if remark:
                    remarks.append(f"{name}: {remark}")
                elif new is not None:
                    replaced.append(name)
                    new_modules[module] = new
        replace_module_classes(model, {nn.Module: lambda old, _: new_modules.get(old)})  # noqa: B023 (called here)
    return replaced, remarks


def _verified(registered: _Registered, module: nn.Module, kwargs: Mapping[str, object]) -> tuple[nn.Module | None, str]:
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if dtypes - registered.supported_dtypes:
        return None, f"not replaced, because its type {dtypes} is not supported by the replacement"
    new = registered.pair.replace(module, **{**registered.kwargs, **kwargs})
    sample = None if new is None else registered.pair.sample(module)
    if new is None or sample is None:
        return new, ""
    with torch.no_grad():
        expected, given = module(*sample), new(*sample)
    error = _relative_error(expected, given) if isinstance(expected, Tensor) else None
    if error is None:
        return None, "not replaced, because the replacement returns outputs of another form"
    if not error <= _TOLERANCE:
        return None, f"not replaced, because the replacement differs by {error:.1e}"
    return new, ""


def _relative_error(expected: Tensor, given: object) -> float | None:
    """Return the largest difference, relative to the largest value; None for something else than a tensor of the same shape."""
    if not isinstance(given, Tensor) or given.shape != expected.shape:
        return None
    error = (given.float() - expected.float()).abs().max().item() / max(1.0, expected.float().abs().max().item())
    return math.inf if math.isnan(error) else error  # NaN compares as equal to any limit


class _RmsNorm(ReplacePair):
    """A hand-written root-mean-square norm (Zhang & Sennrich, 2019) becomes nn.RMSNorm, which has a fused kernel."""

    def matches(self, module: nn.Module) -> bool:
        weight = module._parameters.get("weight")
        is_one_vector = weight is not None and weight.ndim == 1 and len(module._parameters) == 1
        is_named = "rms" in type(module).__name__.lower() and not isinstance(module, nn.RMSNorm)
        return is_one_vector and is_named and not module._modules and not module._buffers

    def replace(self, module: nn.Module, **kwargs: Any) -> nn.Module | None:
        weight = module._parameters["weight"]
        assert weight is not None
        eps = next((float(value) for name in _EPSILONS if (value := getattr(module, name, None)) is not None), 1e-6)
        new = nn.RMSNorm(weight.shape[0], **{"eps": eps, **kwargs}, device="meta")
        new.weight = weight
        return new

    def sample(self, module: nn.Module) -> tuple[object, ...]:
        weight = module._parameters["weight"]
        assert weight is not None
        steps = torch.linspace(-2, 2, 6 * weight.shape[0], device=weight.device, dtype=weight.dtype)
        return (torch.cat([steps, steps * 1e-3]).view(12, weight.shape[0]),)  # small values show another epsilon


register_replace_pair("rms_norm", pair_cls=_RmsNorm)


class FusedAttention(GeneratedClass):
    """Multi-head attention that returns weights only on request, so that torch's fused kernel can run."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Attend. The fifth argument, or the keyword, still requests weights."""
        if len(args) < 5:
            kwargs.setdefault("need_weights", False)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def fuse_attention(model: nn.Module, run: Callable[[nn.Module], object] | None) -> tuple[list[str], list[str]]:
    """Make attention layers use `F.scaled_dot_product_attention`. Return the changed names, and remarks.

    `run` calls the model on a few samples. Whether a model uses the attention weights only shows in its outputs, so without samples
    nothing is changed.
    """
    config = getattr(model, "config", None)
    switch = getattr(model, "set_attn_implementation", None)  # models of transformers
    if getattr(config, "_attn_implementation", None) == "eager" and callable(switch):
        try:
            switch("sdpa")
        except ValueError:
            return [], [f"{type(model).__name__} has no alternative implementation of its attention"]
        return ["attention of the whole model"], []
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.MultiheadAttention}
    inside = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # these never ask for weights
    settled = {child for module in model.modules() if isinstance(module, inside) for child in module.children()}
    layers = {name: module for name, module in layers.items() if module not in settled}
    if not layers:
        return [], []
    if run is None:
        return [], [f"{name}: not replaced, because there is no sample to compare outputs on" for name in layers]
    expected = run(model)
    for module in layers.values():
        object.__setattr__(module, "__class__", subclass_of(nn.MultiheadAttention, FusedAttention))
    try:
        error = _largest_difference(expected, run(model))
        remark = None if error <= _MODEL_TOLERANCE else f"outputs differ by {error:.1e}"
    except (TypeError, AttributeError, ValueError, RuntimeError) as problem:  # it uses the weights
        remark = f"the model needs the attention weights ({problem})"
    if remark is None:
        return list(layers), []
    for module in layers.values():
        module.__class__ = nn.MultiheadAttention
    return [], [f"attention: not replaced, because {remark}"]


def _largest_difference(expected: object, given: object) -> float:
    largest = 0.0
    for a, b in zip(tree_leaves(expected), tree_leaves(given)):
        if isinstance(a, Tensor) and (a.is_floating_point() or not isinstance(b, Tensor) or a.shape != b.shape):
            error = _relative_error(a, b)
            largest = max(largest, math.inf if error is None else error)
    return largest
