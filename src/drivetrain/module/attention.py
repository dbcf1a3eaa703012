"""Add a bias to the attention scores of any model, through one adapter per kind of attention layer.

An `AttentionBias` returns what to add to the scaled scores. An adapter knows how many heads a layer has, whether it is causal,
and how to apply the bias. Layers of transformers are reached through its attention interface, torch's own multi-head attention
through its mask, and any other layer that calls `F.scaled_dot_product_attention` by intercepting that call. Parameters, names and
state-dict keys do not change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain.core.errors import ConfigError, ConfigTypeError
from drivetrain.module.wrapping import GeneratedClass, add_mixin, user_class

ATTRIBUTE = "attention_bias"
"""Under which name an attention layer holds its bias."""
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class AttentionBias(nn.Module):
    """Returns what is added to the scores: a tensor that broadcasts to (batch, heads, queries, keys)."""

    was_used = False
    """Set when the bias is read; a layer that never reads it does not use it."""

    def scores(self, queries: int, keys: int) -> Tensor:
        """Return the bias for the last `queries` of `keys` positions."""
        raise NotImplementedError

    def forward(self, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
        self.was_used = True
        return self.scores(queries, keys).to(dtype)


Inject = Callable[[nn.Module, AttentionBias], None]


@dataclass(frozen=True, kw_only=True)
class AttentionAdapter:
    """How to work with one class of attention layers."""

    heads: Callable[[nn.Module], int]
    causal: Callable[[nn.Module], bool]
    inject: Inject


_by_class: dict[type[nn.Module] | str, AttentionAdapter] = {}


def register_attention(
    cls: type[nn.Module] | str,
    *,
    heads: str | int | Callable[[nn.Module], int],
    causal: str | bool | Callable[[nn.Module], bool],
    inject: Inject | None = None,
) -> None:
    """Register how to bias the attention layers of a class, or of all classes with a name.

    `heads` and `causal` are values, names of attributes, or functions of the layer. Without `inject`, calls of
    `F.scaled_dot_product_attention` inside the layer are intercepted.
    """
    if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigTypeError(f"register_attention({cls!r}): expected a class of modules, or its name.")
    if cls in _by_class:
        raise ConfigError(f"register_attention: {_name(cls)} is already registered.")
    _by_class[cls] = AttentionAdapter(
        heads=_reader(heads, int), causal=_reader(causal, bool), inject=inject or intercept_attention_calls
    )


def registered_attention() -> list[str]:
    """Return the names of the classes that have an adapter."""
    return sorted(map(_name, _by_class))


def find_attention(model: nn.Module) -> list[tuple[str, nn.Module, AttentionAdapter]]:
    """Return name, layer and adapter of every self-attention of a model that has an adapter."""
    across = {module.multihead_attn for module in model.modules() if isinstance(module, nn.TransformerDecoderLayer)}
    found = []
    for name, module in model.named_modules():
        adapter = _adapter_of(module)
        if adapter is not None and module not in across and not getattr(module, "is_cross_attention", False):
            found.append((name, module, adapter))
    return found


def unused_biases(model: nn.Module) -> list[str]:
    """Return the names of the layers that hold a bias and have not used it."""
    holders = [(name, getattr(module, ATTRIBUTE, None)) for name, module in model.named_modules()]
    return [name for name, bias in holders if isinstance(bias, AttentionBias) and not bias.was_used]


def _adapter_of(module: nn.Module) -> AttentionAdapter | None:
    cls = user_class(module)
    return next((_by_class[key] for key in (*cls.__mro__, cls.__name__) if key in _by_class), None)


def _name(cls: type | str) -> str:
    return cls if isinstance(cls, str) else cls.__name__


def _reader(what: object, kind: type) -> Callable[[nn.Module], Any]:
    if callable(what):
        return what
    if isinstance(what, str):
        return lambda module: kind(getattr(module, what))
    return lambda module: kind(what)


def combine(bias: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Return the additive mask of a bias and of the mask that the attention call received."""
    if is_causal:
        queries, keys = bias.shape[-2:]
        bias = bias.masked_fill(bias.new_ones(queries, keys, dtype=torch.bool).tril().logical_not(), float("-inf"))
    if mask is None:
        return bias
    if mask.dtype is torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask


def added_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Return what a mask of torch's multi-head attention, in which True means "ignore", adds to the scores."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))


class AttentionCalls(TorchFunctionMode):
    """Passes every call of scaled dot-product attention to a function, with its arguments by name."""

    def __init__(self, attend: Callable[[dict[str, Any]], Tensor]):
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        if func is F.scaled_dot_product_attention:
            return self.attend({**dict(zip(_ARGUMENTS, args)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))


class Intercepted(GeneratedClass):
    """Makes a layer's calls of scaled dot-product attention use its bias."""

    def forward(self, *args: object, **kwargs: object) -> object:
        with AttentionCalls(self._attend_with_bias):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _attend_with_bias(self, call: dict[str, Any]) -> Tensor:
        query, queries, keys = call["query"], call["query"].shape[-2], call["key"].shape[-2]
        bias = getattr(self, ATTRIBUTE)(queries, keys, query.dtype).expand(-1, -1, queries, keys)
        call["attn_mask"] = combine(bias, call.get("attn_mask"), call.pop("is_causal", False))
        return F.scaled_dot_product_attention(**call)


def intercept_attention_calls(module: nn.Module, bias: AttentionBias) -> None:
    """Give a layer a bias that its calls of `F.scaled_dot_product_attention` use."""
    setattr(module, ATTRIBUTE, bias)
    add_mixin(module, Intercepted)


class BiasedMultihead(GeneratedClass):
    """Makes a multi-head attention add its bias to the mask it receives."""

    batch_first: bool
    num_heads: int

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> object:
        is_batched = query.ndim == 3
        length_dim = 1 if is_batched and self.batch_first else 0
        rows = query.shape[1 - length_dim] if is_batched else 1
        queries, keys = query.shape[length_dim], key.shape[length_dim]
        bias = getattr(self, ATTRIBUTE)(queries, keys, query.dtype).expand(rows, self.num_heads, queries, keys)
        mask = None if attn_mask is None else added_mask(attn_mask, query)
        combined = combine(bias.reshape(-1, queries, keys), mask, is_causal and attn_mask is None)
        if key_padding_mask is not None:
            key_padding_mask = added_mask(key_padding_mask, query)
        return super().forward(  # type: ignore[misc]
            query, key, value, key_padding_mask, need_weights, combined, average_attn_weights
        )


def bias_multihead(module: nn.Module, bias: AttentionBias) -> None:
    """Give torch's multi-head attention a bias."""
    setattr(module, ATTRIBUTE, bias)
    add_mixin(module, BiasedMultihead)


def leave_fast_path(model: nn.Module) -> None:
    """Make torch's encoder layers call their attention also in evaluation, instead of one fused kernel that takes no bias."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.self_attn, BiasedMultihead):
            module.activation_relu_or_gelu = 0  # torch asks this flag before it takes the fused path


IMPLEMENTATION = "drivetrain_biased"


def bias_through_interface(module: nn.Module, bias: AttentionBias) -> None:
    """Give an attention layer of transformers a bias. Its model then uses our entry of the attention interface."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, biased_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    setattr(module, ATTRIBUTE, bias)
    config: Any = module.config
    config._attn_implementation = IMPLEMENTATION


def biased_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> object:
    """Attend as transformers does with torch's attention, and add the layer's bias if it has one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    bias = getattr(module, ATTRIBUTE, None)
    if bias is not None:
        queries, keys = query.shape[2], key.shape[2]
        scores = bias(queries, keys, query.dtype).expand(-1, -1, queries, keys)
        is_causal = kwargs.pop("is_causal", None)
        is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        attention_mask = combine(scores, attention_mask, is_causal and attention_mask is None and queries > 1)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


register_attention(nn.MultiheadAttention, heads="num_heads", causal=False, inject=bias_multihead)
for _bert in ("BertSelfAttention", "RobertaSelfAttention"):
    register_attention(_bert, heads="num_attention_heads", causal="is_causal", inject=bias_through_interface)
register_attention("GPT2Attention", heads="num_heads", causal="is_causal", inject=bias_through_interface)
