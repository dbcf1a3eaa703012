"""ALiBi for GPT-2 layers that compute attention in a method of their own, as transformers had them before its attention interface."""

from typing import Any

import torch
from torch import Tensor, nn


def _attn(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the past with the penalty of `self.attention_bias`; in place of `GPT2Attention._attn`."""
    scores = query @ key.transpose(-1, -2) * value.shape[-1] ** -0.5
    queries, keys = scores.shape[-2:]
    past = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
    scores = (scores + self.attention_bias(queries, keys, scores.dtype)).masked_fill(
        ~past, torch.finfo(scores.dtype).min
    )
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = self.attn_dropout(scores.softmax(dim=-1).to(value.dtype))
    if head_mask is not None:
        weights = weights * head_mask
    return weights @ value, weights


def enlarge_mask(module: nn.Module, max_sequence_length: int) -> nn.Module:
    """Let the causal mask that a layer keeps as its buffer `bias`, if it does, cover longer sequences."""
    old = module._buffers.get("bias")
    if old is not None:
        mask = torch.ones(max_sequence_length, max_sequence_length, dtype=torch.bool, device=old.device).tril()
        module._buffers["bias"] = mask.to(old.dtype)[None, None]
    return module
