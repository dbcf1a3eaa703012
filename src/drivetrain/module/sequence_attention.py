"""Attention over a sequence whose parts are on different ranks.

Ulysses (Jacobs et al., 2023, arXiv 2309.14509): before attention each rank exchanges its part of the sequence, with all heads, for the
whole sequence with its share of the heads; afterwards it exchanges them back. Ring (Liu et al., 2023, arXiv 2310.01889): keys and values
rotate between ranks while queries stay; torch's own implementation, on CUDA. Calls of `F.scaled_dot_product_attention` are intercepted
while a block runs, so any model that uses it is supported.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from drivetrain.core.errors import ConfigError
from drivetrain.module.attention import added_mask
from drivetrain.module.wrapping import GeneratedClass, add_mixin


class SequenceAttention:
    """The attention of one block: queries, keys and values are this rank's part of a sequence of `length`."""

    def __init__(self, group: ProcessGroup, length: int, ring: "RingAttention | None" = None, notes: Any = None):
        self.group, self.length, self.ring = group, length, ring
        self.notes = notes
        """Where the call is noted, while a model is being checked."""
        self.size, self.rank = group.size(), group.rank()

    def __call__(self, call: dict[str, Any]) -> Tensor:
        query, key = call["query"], call["key"]
        local = self.length // self.size
        if query.ndim != 4 or query.shape[-2] != local:
            return F.scaled_dot_product_attention(**call)  # not over the sequence: inside each position, say
        if key.shape[-2] != local:
            return self._across(call)
        if self.ring is not None:
            if self.notes is not None:
                whole = {name: gather_sequence(call[name], 2, self.group) for name in ("query", "key", "value")}
                self.notes.record_full_call({**call, **whole})
            return self.ring(call)
        heads = query.shape[1]
        check_heads(heads, self.size)
        query, key, value = with_shared_heads(call, self.size)
        mask = local_mask(call.get("attn_mask"), heads, self.length, self.size, self.rank)
        query, key, value = (to_heads(x, self.group, self.size) for x in (query, key, value))
        if self.notes is not None:
            self.notes.note([query, key, value], call)
        call = {**call, "query": query, "key": key, "value": value, "attn_mask": mask}
        if key.shape[1] != query.shape[1]:
            call["enable_gqa"] = True
        else:
            call.pop("enable_gqa", None)  # the plain kernels are chosen only without it
        return to_sequence(F.scaled_dot_product_attention(**call), self.group, self.size)

    def _across(self, call: dict[str, Any]) -> Tensor:
        """Attend from this rank's queries to another sequence, which is whole."""
        if call.get("is_causal"):
            raise ConfigError(
                "sequence_parallel: causal attention to a sequence of another length cannot be split. Remove sequence_parallel, or "
                "give the model a set_sp method."
            )
        mask = call.get("attn_mask")
        if mask is not None and mask.ndim >= 2 and mask.shape[-2] == self.length:
            local = self.length // self.size
            call = {**call, "attn_mask": mask.narrow(-2, self.rank * local, local)}
        return F.scaled_dot_product_attention(**call)


def check_heads(heads: int, size: int) -> None:
    """Raise if the number of heads does not divide over the ranks."""
    if heads % size:
        sizes = [n for n in range(2, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"sequence_parallel: {heads} attention heads do not divide over {size} ranks. Sizes of the sequence axis that do: "
            f"{', '.join(map(str, sizes)) or 'none'}."
        )


def with_shared_heads(call: dict[str, Any], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values. Keys and values that several heads share are repeated if they do not divide."""
    if call["key"].shape[1] % size:
        call = {**call, **repeated_heads(call)}
    return call["query"], call["key"], call["value"]


def repeated_heads(call: dict[str, Any]) -> dict[str, Tensor]:
    """Return keys and values with one head for each head of the queries."""
    repeats = call["query"].shape[1] // call["key"].shape[1]
    return {name: call[name].repeat_interleave(repeats, 1) for name in ("key", "value")}


def local_mask(mask: Tensor | None, heads: int, length: int, size: int, rank: int) -> Tensor | None:
    """Return the mask for this rank's heads. It must cover the whole sequence."""
    if mask is None:
        return None
    if mask.shape[-1] not in (1, length) or (mask.ndim > 1 and mask.shape[-2] not in (1, length)):
        raise ConfigError(
            f"sequence_parallel: a block made an attention mask of shape {tuple(mask.shape)} itself, from its piece of a sequence of "
            f"{length}. Make the mask outside the blocks and pass it in, or give the model a set_sp method."
        )
    if mask.ndim >= 3 and mask.shape[-3] == heads and heads > 1:
        return mask.narrow(-3, rank * (heads // size), heads // size)
    return mask


def to_heads(x: Tensor, group: ProcessGroup, size: int) -> Tensor:
    """Exchange (batch, heads, part, width) for (batch, heads / size, whole sequence, width)."""
    batch, heads, piece, width = x.shape
    parts = x.reshape(batch, size, heads // size, piece, width).permute(1, 0, 2, 3, 4)
    return _exchange(parts, group).permute(1, 2, 0, 3, 4).reshape(batch, heads // size, size * piece, width)


def to_sequence(x: Tensor, group: ProcessGroup, size: int) -> Tensor:
    """Exchange (batch, heads / size, whole sequence, width) for (batch, heads, part, width)."""
    batch, heads, length, width = x.shape
    parts = x.reshape(batch, heads, size, length // size, width).permute(2, 0, 1, 3, 4)
    return _exchange(parts, group).permute(1, 0, 2, 3, 4).reshape(batch, size * heads, length // size, width)


def gather_sequence(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the whole sequence on every rank.

    Backward adds up what the ranks computed from the whole, and each keeps its piece of the sum. Where all continue alike, that is
    the number of ranks times the gradient, so one mean over data and sequence ranks is right for every parameter.
    """
    gather = getattr(collectives, "all_gather_single_autograd", None)  # its name from torch 2.13 on
    return (gather or collectives.all_gather_tensor_autograd)(x.contiguous(), dim, group)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Send the i-th part to rank i and return what all sent here; the gradient goes the same way back."""
    return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, group)


class SequenceMultihead(GeneratedClass):
    """Multi-head attention through `F.scaled_dot_product_attention`, which torch's own forward hides. It returns no weights."""

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
    ) -> Any:
        own: Any = self
        mask, is_causal = _one_mask(own, query, key_padding_mask, attn_mask, is_causal)
        if not own.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        projected = _projected(own, query, key, value)
        heads = [x.unflatten(-1, (own.num_heads, own.head_dim)).transpose(1, 2) for x in projected]
        query, key, value = heads
        out = F.scaled_dot_product_attention(query, key, value, mask, own.dropout if own.training else 0.0, is_causal)
        out = F.linear(out.transpose(1, 2).flatten(2), own.out_proj.weight, own.out_proj.bias)
        return (out if own.batch_first else out.transpose(0, 1)), None


def open_multihead(block: nn.Module) -> None:
    """Make the multi-head attention layers inside a block call the intercepted function."""
    for name, module in block.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or isinstance(module, SequenceMultihead):
            continue
        if module.bias_k is not None or module.add_zero_attn:
            raise ConfigError(
                f"sequence_parallel: the attention {name!r} adds its own keys (add_bias_kv, add_zero_attn), which have no position. "
                "Build it without them."
            )
        add_mixin(module, SequenceMultihead)


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [F.linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases)]


def _one_mask(
    module: nn.MultiheadAttention, query: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """Return what is added to the scores, and whether they are causal; in torch's masks True means "ignore"."""
    if is_causal and mask is not None and padding is None:
        return None, True  # torch promises that the mask is the causal one
    scores = None if mask is None else added_mask(mask, query)
    if scores is not None and scores.ndim == 3:
        scores = scores.unflatten(0, (-1, module.num_heads))
    if padding is not None:
        ignored = added_mask(padding, query)[:, None, None, :]
        scores = ignored if scores is None else scores + ignored
    return scores, False


class RingAttention:
    """torch's context-parallel attention on parts that are in the order of the ranks."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        # The public context manager does the same, but only until it is left; here backward runs in the user's loop.
        try:
            from torch.distributed.tensor.experimental._context_parallel import _attention as ring

            ring._cp_options.enable_load_balance = False  # pieces are contiguous
            ring._enable_cp_dtensor_dispatcher()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"sequence_parallel: this torch ({torch.__version__}) has no ring attention that can be used here ({error}). Use "
                "impl='ulysses'."
            ) from error

    def __deepcopy__(self, memo: object) -> "RingAttention":
        return self

    def __call__(self, call: dict[str, Any]) -> Tensor:
        if call.get("attn_mask") is not None:
            raise ConfigError(
                "sequence_parallel: ring attention supports causal and full attention, but the model passes a mask. Use impl='ulysses'."
            )
        if call["key"].shape[1] != call["query"].shape[1]:
            call = {**call, **repeated_heads(call)}
            call.pop("enable_gqa", None)
        for name in ("query", "key", "value"):
            local = call[name].contiguous()
            call = {**call, name: DTensor.from_local(local, self.mesh, [Shard(2)], run_check=False)}
        out: Any = F.scaled_dot_product_attention(**call)
        return out.to_local()
