"""Replace hand-written layers by torch's fused ones, where that provably changes nothing.

A pair names what it replaces and makes the replacement. It is kept only if it gives the same outputs: each replacement is tried on made-up
input against the original. Names and state-dict keys stay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, ConfigTypeError, MethodConfigError, unknown_name
from drivetrain.module.surgery import replace_module_classes
from drivetrain.module.wrapping import GeneratedClass, subclass_of
from drivetrain.strategy.method import Method, Stage

if TYPE_CHECKING:
    from drivetrain.strategy.apply import Application

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

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        valid = [_ATTENTION, *pair_names()]
        pairs = values.get("pairs")
        if pairs is None:
            return values
        for name, _ in pairs:
            if name not in valid:
                raise MethodConfigError(unknown_name("pair", name, valid, where=self.name))
        values["pairs"] = tuple((name, kwargs or ()) for name, kwargs in pairs)
        return values

    def apply(self, ctx: "Application", config: ModuleReplaceConfig) -> None:
        wanted = None if config.pairs is None else {name: dict(kwargs) for name, kwargs in config.pairs}
        attention: tuple[list[str], list[str]] = ([], [])
        if wanted is None or wanted.pop(_ATTENTION, None) is not None:
            attention = fuse_attention(ctx.model, ctx.sample)
        try:
            replaced, remarks = replace_pairs(ctx.model, wanted)
        except ConfigError as error:
            raise MethodConfigError(str(error)) from error
        names = [*attention[0], *replaced]
        ctx.note(f"module_replace: {len(names)} replaced" + (f" ({', '.join(names[:4])}…)" if names else ""))
        for remark in (*attention[1], *remarks):
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
    kwargs: Mapping[str, object] = field(default_factory=dict)
    supported_dtypes: Sequence[torch.dtype] = FLOATS


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
        _pairs[pair_name] = _Registered(cls(), dict(kwargs or {}), tuple(supported_dtypes))
        return cls

    if pair_cls is not None:
        register(pair_cls)
    return register


def pair_names() -> list[str]:
    """Return the names of all pairs."""
    return list(_pairs)


def check_pair(name: str) -> None:
    """Raise for the name of an unknown pair."""
    if name not in _pairs:
        raise ConfigError(unknown_name("pair", name, _pairs, where="module_replace"))


def replace_pairs(
    model: nn.Module, pairs: Mapping[str, Mapping[str, object]] | None = None
) -> tuple[list[str], list[str]]:
    """Replace in place. Return the names of the replaced modules, and remarks about those that were not."""
    wanted = {name: {} for name in _pairs} if pairs is None else pairs
    replaced: list[str] = []
    remarks: list[str] = []
    for pair_name, kwargs in wanted.items():
        check_pair(pair_name)
        registered = _pairs[pair_name]
        names = {module: name for name, module in model.named_modules()}

        def decide(module: nn.Module, index: int) -> nn.Module | None:
            if not registered.pair.matches(module):  # noqa: B023 (called inside this turn of the loop)
                return None
            name = names[module]  # noqa: B023
            new, remark = _verified(registered, module, {**registered.kwargs, **kwargs})  # noqa: B023
            if remark:
                remarks.append(f"{name}: {remark}")
            elif new is not None:
                replaced.append(name)
            return new

        replace_module_classes(model, {nn.Module: decide})
    return replaced, remarks


def _verified(registered: _Registered, module: nn.Module, kwargs: Mapping[str, object]) -> tuple[nn.Module | None, str]:
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if dtypes - set(registered.supported_dtypes):
        return None, f"not replaced, because its type {dtypes} is not supported by the replacement"
    new = registered.pair.replace(module, **kwargs)
    sample = None if new is None else registered.pair.sample(module)
    if new is None or sample is None:
        return new, ""
    with torch.no_grad():
        expected, given = module(*sample), new(*sample)
    if not (isinstance(given, Tensor) and isinstance(expected, Tensor) and given.shape == expected.shape):
        return None, "not replaced, because the replacement returns outputs of another form"
    error = (given.float() - expected.float()).abs().max().item() / max(1.0, expected.float().abs().max().item())
    if not error <= _TOLERANCE:
        return None, f"not replaced, because the replacement differs by {error:.1e}"
    return new, ""


class _RmsNorm(ReplacePair):
    """A hand-written root-mean-square norm (Zhang & Sennrich, 2019) becomes nn.RMSNorm, which has a fused kernel."""

    def matches(self, module: nn.Module) -> bool:
        weight = module._parameters.get("weight")
        return (
            list(module._parameters) == ["weight"]
            and not module._modules
            and not module._buffers
            and weight is not None
            and weight.ndim == 1
            and "rms" in type(module).__name__.lower()
            and not isinstance(module, nn.RMSNorm)
        )

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
    from torch.utils._pytree import tree_leaves

    pairs = [(a, b) for a, b in zip(tree_leaves(expected), tree_leaves(given)) if isinstance(a, Tensor)]
    errors = [0.0]
    for a, b in pairs:
        if not isinstance(b, Tensor) or a.shape != b.shape:
            return float("inf")
        if a.is_floating_point():
            errors.append((a.float() - b.float()).abs().max().item() / max(1.0, a.float().abs().max().item()))
    return max(errors)
