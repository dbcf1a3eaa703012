"""Gated linear units (Shazeer, 2020, arXiv 2002.05202): a transformer's feed-forward network in which one projection gates another.

`act(W1 h)` becomes `act(G h) * (V h)`. The two output-side parts of the old network, its last projection and its norm, stay; the gate
and the value projection are new.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.algorithms.surgery import ModelSurgery, Optimizers, disable_fused_encoder, warn_no_effect
from drivetrain.core.errors import ConfigError, ConfigTypeError
from drivetrain.core.types import Settings
from drivetrain.module.surgery import count_module_instances, replace_module_classes
from drivetrain.module.wrapping import user_class

Activation = Callable[[Tensor], Tensor]


class GatedProjection(nn.Module):
    """`act(G h) * (V h)`: takes the place of a feed-forward network's first projection and its activation."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        act_fn: Activation,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
    ):
        super().__init__()
        self.gated_layer = nn.Linear(in_features, out_features, bias=gated_layer_bias)
        self.non_gated_layer = nn.Linear(in_features, out_features, bias=non_gated_layer_bias)
        self.act = act_fn

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.act(self.gated_layer(hidden_states)) * self.non_gated_layer(hidden_states)


class GatedFeedForward(GatedProjection):
    """A gated feed-forward network: `wo(dropout(act(G h) * (V h)))`."""

    def __init__(
        self,
        d_embed: int,
        d_ff: int,
        dropout_rate: float,
        act_fn: Activation,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
        *,
        wo: nn.Linear | None = None,
    ):
        super().__init__(d_embed, d_ff, act_fn, gated_layer_bias, non_gated_layer_bias)
        self.wo = nn.Linear(d_ff, d_embed) if wo is None else wo
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.wo(self.dropout(super().forward(hidden_states)))


class BERTGatedFFOutput(GatedFeedForward):
    """The gated network of a BERT layer, with the residual connection and norm that belong to it."""

    def __init__(
        self,
        d_embed: int,
        d_ff: int,
        dropout_rate: float,
        act_fn: Activation,
        layernorm_eps: float,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
        *,
        wo: nn.Linear | None = None,
        layernorm: nn.Module | None = None,
    ):
        super().__init__(d_embed, d_ff, dropout_rate, act_fn, gated_layer_bias, non_gated_layer_bias, wo=wo)
        self.layernorm = nn.LayerNorm(d_embed, eps=layernorm_eps) if layernorm is None else layernorm

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:  # type: ignore[override]
        return self.layernorm(super().forward(hidden_states) + input_tensor)


Plan = dict[nn.Module, Callable[[], nn.Module]]
"""Which modules to replace, and what makes their replacements."""


class Gating(NamedTuple):
    """What an adapter needs to build gated layers."""

    act_fn: Activation
    gated_layer_bias: bool
    non_gated_layer_bias: bool


class FeedForwardAdapter(NamedTuple):
    """How to gate the feed-forward networks of one class of transformer layers."""

    activation: Callable[[nn.Module], Any]
    plan: Callable[[nn.Module, Gating], Plan]


_by_class: dict[type[nn.Module] | str, FeedForwardAdapter] = {}


def register_feed_forward(
    cls: type[nn.Module] | str, *, activation: Callable[[nn.Module], Any], plan: Callable[[nn.Module, Gating], Plan]
) -> None:
    """Define how to gate the layers of a class, or of all classes of a name.

    `activation(layer)` returns the function it uses, `plan(layer, gating)` which of its modules are replaced by what.
    """
    if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigTypeError(f"register_feed_forward({cls!r}): expected a class of modules, or its name.")
    if cls in _by_class:
        raise ConfigError(f"register_feed_forward: {_name(cls)} is already registered.")
    _by_class[cls] = FeedForwardAdapter(activation, plan)


def _adapter_of(module: nn.Module) -> FeedForwardAdapter | None:
    cls = user_class(module)
    return next((_by_class[base] for base in cls.__mro__ if base in _by_class), None) or _by_class.get(cls.__name__)


def _name(cls: type | str) -> str:
    return cls if isinstance(cls, str) else cls.__name__


def _plan_bert(layer: Any, gating: Gating) -> Plan:
    """Gate a BERT layer: the intermediate network passes its input on, the output network does all."""
    if not hasattr(layer.intermediate, "dense"):
        return {}
    intermediate, output = layer.intermediate, layer.output

    def make() -> nn.Module:
        return BERTGatedFFOutput(
            intermediate.dense.in_features, intermediate.dense.out_features, output.dropout.p, gating.act_fn,
            output.LayerNorm.eps, gating.gated_layer_bias, gating.non_gated_layer_bias,
            wo=output.dense, layernorm=output.LayerNorm,
        )  # fmt: skip

    return {intermediate: nn.Identity, output: make}


def _plan_torch(layer: Any, gating: Gating) -> Plan:
    """Gate torch's encoder or decoder layer: its first projection computes the gated product, its activation is done by then."""
    if isinstance(layer.linear1, GatedProjection):
        return {}
    in_features, out_features = layer.linear1.in_features, layer.linear1.out_features
    return {layer.linear1: lambda: GatedProjection(in_features, out_features, *gating)}


for _bert in ("BertLayer", "RobertaLayer"):
    register_feed_forward(
        _bert, activation=lambda layer: getattr(layer.intermediate, "intermediate_act_fn", None), plan=_plan_bert
    )
for _torch_layer in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
    register_feed_forward(_torch_layer, activation=lambda layer: layer.activation, plan=_plan_torch)


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: Optimizers = None,
    act_fn: Activation | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
) -> None:
    """Gate the feed-forward networks of a transformer; without `act_fn` they keep the activation they have."""
    layers = [(layer, adapter) for layer in model.modules() if (adapter := _adapter_of(layer)) is not None]
    if not layers:
        warn_no_effect(
            f"GatedLinearUnits found no supported feed-forward network in {type(model).__name__}. Registered: "
            f"{', '.join(sorted(map(_name, _by_class)))}. Register yours with register_feed_forward."
        )
        return
    layers = [(layer, adapter) for layer, adapter in layers if not count_module_instances(layer, GatedProjection)]
    if not layers:
        return  # done before
    act_fn = _activation_of(layers) if act_fn is None else act_fn
    gating = Gating(act_fn, gated_layer_bias, non_gated_layer_bias)
    plan: Plan = {}
    for layer, adapter in layers:
        plan |= adapter.plan(layer, gating)
    policies = {nn.Module: lambda module, index: plan[module]() if module in plan else None}
    replace_module_classes(model, policies, optimizers)
    for layer, _ in layers:
        if isinstance(getattr(layer, "linear1", None), GatedProjection):
            layer.activation = nn.Identity()
    disable_fused_encoder(model, GatedProjection)


def _activation_of(layers: list[tuple[nn.Module, FeedForwardAdapter]]) -> Activation:
    """Return the one activation that all layers use."""
    found = [adapter.activation(layer) for layer, adapter in layers]
    kinds = {_kind(one): one for one in found if one is not None}
    if len(kinds) != 1:
        raise ConfigError(
            f"GatedLinearUnits: expected one activation in the model, found {', '.join(sorted(kinds)) or 'none'}. Choose one: "
            "act_fn=torch.nn.functional.gelu."
        )
    return next(iter(kinds.values()))


def _kind(activation: object) -> str:
    """Name an activation, so that two GELU modules are one kind and a GELU and a ReLU are two."""
    if inspect.isroutine(activation):
        return activation.__name__
    return repr(activation) if isinstance(activation, nn.Module) else type(activation).__name__


class GatedLinearUnits(ModelSurgery):
    """Gates the feed-forward networks of the model."""

    function = staticmethod(apply_gated_linear_units)

    def __init__(
        self, act_fn: Activation | str | None = None, gated_layer_bias: bool = False, non_gated_layer_bias: bool = False
    ):
        if isinstance(act_fn, str):
            if not hasattr(F, act_fn):
                raise ConfigError(
                    f"GatedLinearUnits(act_fn={act_fn!r}): torch.nn.functional has no function of that name."
                )
            act_fn = getattr(F, act_fn)
        if act_fn is not None and not callable(act_fn):
            raise ConfigTypeError(f"GatedLinearUnits(act_fn={act_fn!r}): expected a function of a tensor, or its name.")
        self.act_fn: Activation | None = act_fn
        self.gated_layer_bias, self.non_gated_layer_bias = gated_layer_bias, non_gated_layer_bias

    def config(self) -> Settings:
        """Return the arguments; an activation of torch.nn.functional by its name, which a file can hold."""
        name = getattr(self.act_fn, "__name__", "")
        known = {"act_fn": name} if name and getattr(F, name, None) is self.act_fn else {}
        return {**super().config(), **known}
