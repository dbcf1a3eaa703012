"""Positions in ALiBi: the penalty on distance, and learned position embeddings, which are zeroed, made long enough and frozen."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.algorithms.surgery import Optimizers
from drivetrain.core.errors import ConfigError, unknown_name
from drivetrain.module.attention import AttentionBias
from drivetrain.module.surgery import update_params_in_optimizer
from drivetrain.module.wrapping import written_class

_TABLES = {"BertEmbeddings": "position_embeddings", "RobertaEmbeddings": "position_embeddings", "GPT2Model": "wpe"}
"""Where classes of transformers keep their table."""
_COUNTING_BUFFERS = ("position_ids", "token_type_ids")


def find_position_tables(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the holders and attribute names of the position embeddings that are known by class."""
    named = [(module, _TABLES.get(written_class(module).__name__)) for module in model.modules()]
    return [(module, name) for module, name in named if name is not None]


def position_table_at(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return holder and attribute name of the position embedding at a dotted path; a leading `module.` is passed over."""
    path = path.removeprefix("module.")
    holder_path, _, name = path.rpartition(".")
    known = dict(model.named_modules())
    table = known.get(path)
    if table is None or not isinstance(getattr(table, "weight", None), Tensor):
        tables = [key for key, module in known.items() if isinstance(module, nn.Embedding)]
        raise ConfigError(unknown_name("embedding", path, tables, where="apply_alibi(position_embedding_attribute=)"))
    return known[holder_path], name


def retire_position_table(holder: nn.Module, name: str, length: int, optimizers: Optimizers) -> None:
    """Replace a table of position embeddings by zeros for `length` positions that are never trained."""
    old: Any = getattr(holder, name)
    first = 0 if old.padding_idx is None else old.padding_idx + 1  # positions are counted from behind the padding
    weight = old.weight
    if len(weight) == length + first and not weight.requires_grad and not weight.any():
        return  # done before
    zeros = nn.Parameter(weight.new_zeros(length + first, weight.shape[1]), requires_grad=False)
    new = nn.Embedding(len(zeros), weight.shape[1], padding_idx=old.padding_idx, _weight=zeros, _freeze=True)
    setattr(holder, name, new.train(old.training))
    held = (
        []
        if optimizers is None
        else [optimizers]
        if isinstance(optimizers, torch.optim.Optimizer)
        else list(optimizers)
    )
    if any(p is weight for one in held for group in one.param_groups for p in group["params"]):
        update_params_in_optimizer([weight], [], held)
    _lengthen(holder, len(zeros))


def _lengthen(holder: nn.Module, length: int) -> None:
    """Let what counts positions next to the table count as far as it."""
    for name in _COUNTING_BUFFERS:
        buffer = holder._buffers.get(name)
        if buffer is not None:
            row = torch.arange(length, device=buffer.device) if name == "position_ids" else buffer.new_zeros(length)
            holder._buffers[name] = row.to(buffer.dtype).expand(1, -1)
    config = getattr(holder, "config", None)
    if config is not None and hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = length


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of the heads: a geometric series for powers of two, filled up from the next one otherwise.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        ratio = 2 ** (-(2 ** (3 - math.log2(heads))))
        return [ratio ** (index + 1) for index in range(heads)]
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: heads - power]


class AlibiBias(AttentionBias):
    """Slope times key position where only the past is seen, which differs from the distance by a constant per query and so makes
    the same attention; otherwise minus slope times distance."""

    slopes: Tensor

    def __init__(self, heads: int, causal: bool):
        super().__init__()
        self.causal = causal
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)), persistent=False)

    def scores(self, queries: int, keys: int) -> Tensor:
        slopes = self.slopes.float()[None, :, None, None]
        place = torch.arange(keys, device=self.slopes.device, dtype=torch.float32)
        if self.causal:
            return slopes * place
        return -slopes * (place[keys - queries :, None] - place[None, :]).abs()
