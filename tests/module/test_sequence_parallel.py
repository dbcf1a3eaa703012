"""Blocks on pieces of a sequence: the same loss and gradients, or a refusal that says why."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.sequence_attention import to_heads, to_sequence
from drivetrain.module.sequence_parallel import split_sequence
from tests.strategy.tasks import make_model

WIDTH, VOCAB, LENGTH = 16, 32, 8


def rotate(x, table):
    cos, sin = table
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def make_table(length):
    angles = torch.arange(length)[:, None] / 10 ** torch.arange(2)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


class Rotary(nn.Module):
    """A block whose queries and keys are turned by tables that come from outside, with keys shared by heads."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(WIDTH, WIDTH)
        self.dropped = nn.Dropout(0.0)

    def forward(self, x, table, mask=None):
        b, t, _ = x.shape
        heads = self.qkv(self.norm(x)).view(b, t, 8, 4).transpose(1, 2)
        q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        table = make_table(t) if self.kind == "positions inside" else table
        q, k = rotate(q, table), rotate(k, table)
        if self.kind == "mask inside":
            mask = torch.ones(t, t, dtype=torch.bool).tril()
        if self.kind == "eager":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            y = ((q @ k.mT / 2).masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), -torch.inf)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return x + x.roll(1, 1) if self.kind == "mixes positions" else x


class RotaryModel(nn.Module):
    def __init__(self, kind="rotary"):
        super().__init__()
        self.kind = kind
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([Rotary(kind) for _ in range(3)])
        self.bias = nn.Parameter(torch.randn(4, LENGTH, LENGTH))

    def forward(self, tokens):
        x = self.embedding(tokens)
        table = make_table(tokens.shape[1])
        mask = self.bias if self.kind == "learned bias" else None
        states = []
        for layer in self.layers:
            x = layer(x, table, mask=mask)
            states.append(x)
            if self.kind == "between":
                x = x - x.mean(1, keepdim=True)
        if self.kind == "collected":
            x = sum(states)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own layers, with the sequence first."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = (self.embedding(tokens) + self.position.weight[: tokens.shape[1]]).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        padding = torch.zeros(tokens.shape, dtype=torch.bool)
        padding[0, -2:] = True
        return self.head(self.encoder(x, mask=mask, src_key_padding_mask=padding.float() * -1e9)).transpose(0, 1)


def make(kind):
    torch.manual_seed(0)
    return make_model() if kind == "tiny" else Encoder() if kind == "encoder" else RotaryModel(kind)


def compare(kinds):
    """Return, for each model, the largest error of the loss and of a gradient, and how it was run."""
    group, found = dist.group.WORLD, {}
    tokens = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    for kind in kinds:
        plain, split = make(kind), make(kind)
        split_sequence(split, group, 0 if kind == "encoder" else 1)
        split = copy.deepcopy(split)
        assert [name for name, _ in split.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert list(split.state_dict()) == list(plain.state_dict())
        expected = F.cross_entropy(plain(tokens).flatten(0, 1), tokens.flatten())
        loss = F.cross_entropy(split(tokens).flatten(0, 1), tokens.flatten())
        expected.backward()
        loss.backward()
        error = 0.0
        for first, second in zip(plain.parameters(), split.parameters()):
            if first.grad is None:
                continue
            gradient = second.grad.clone()
            dist.all_reduce(gradient)
            error = max(
                error, float((gradient / group.size() - first.grad).abs().max() / first.grad.abs().max().clamp(1e-3))
            )
        with torch.no_grad():
            odd = (
                float((split.eval()(tokens[:, :5]) - plain.eval()(tokens[:, :5])).abs().max())
                if kind != "learned bias"
                else 0.0
            )
        mode = next(iter(split._sequence_split.checked.values()))
        found[kind] = (abs(loss.item() - expected.item()), error, odd, mode)
    return found


CHAINS = ("tiny", "rotary", "encoder", "learned bias")
SINGLES = ("between", "collected")


def test_loss_and_gradients_are_those_of_the_whole_model(world2, world4):
    for world in (world2, world4):
        for result in world(compare, (*CHAINS, *SINGLES)):
            for kind, (loss, gradient, odd, mode) in result.items():
                assert loss < 1e-5 and gradient < 1e-4 and odd < 1e-5, (kind, loss, gradient, odd)
                assert mode == ("single" if kind in SINGLES else "chain"), kind


def refusals(cases):
    found = {}
    for kind, length in cases:
        model = make(kind)
        split_sequence(model, dist.group.WORLD)
        try:
            model(torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1)))
        except ConfigError as error:
            found[kind, length] = str(error)
    return found


def test_models_that_would_be_wrong_on_pieces_are_refused_by_what_is_wrong(world2):
    cases = {
        ("positions inside", 8): "a block finds positions from the length it sees",
        ("mask inside", 8): "made an attention mask of shape \\(4, 4\\) itself",
        ("eager", 8): "no block calls F.scaled_dot_product_attention",
        ("mixes positions", 8): "sequence_parallel: RotaryModel computes different results",
        ("rotary", 7): "a sequence of 7 positions does not divide over 2 ranks. Pad it to 8",
    }
    for result in world2(refusals, list(cases)):
        for case, text in cases.items():
            assert re.search(text, result[case]), (case, result.get(case))


def test_heads_must_divide(world4):
    for result in world4(many_heads):
        assert "2 attention heads do not divide over 4 ranks" in result


def many_heads():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    split_sequence(model, dist.group.WORLD)
    with pytest.raises(ConfigError) as caught:
        model(torch.randn(2, 8, 8))
    return str(caught.value)


def there_and_back():
    group = dist.group.WORLD
    whole = torch.arange(2 * 4 * 8 * 3, dtype=torch.float32).view(2, 4, 8, 3)
    size, rank = group.size(), group.rank()
    piece = whole.chunk(size, 2)[rank]
    heads = to_heads(piece, group, size)
    return torch.equal(heads, whole.chunk(size, 1)[rank]) and torch.equal(to_sequence(heads, group, size), piece)


def test_positions_are_traded_for_heads_and_back(world4):
    assert all(world4(there_and_back))


def test_a_model_without_blocks_and_keys_without_positions_are_refused():
    with pytest.raises(ConfigError, match="no repeated blocks"):
        split_sequence(nn.Linear(4, 4), None)
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layer.self_attn = nn.MultiheadAttention(8, 2, add_bias_kv=True)

    class Group:
        size = rank = staticmethod(lambda: 1)

    with pytest.raises(ConfigError, match="add_bias_kv"):
        split_sequence(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), Group())


@pytest.mark.gpu
def test_ring_attention_of_one_rank_is_attention(monkeypatch):
    from torch.distributed.device_mesh import init_device_mesh

    from drivetrain.module.sequence_attention import RingAttention
    from drivetrain.runtime.group import destroy_group

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        ring = RingAttention(init_device_mesh("cuda", (1,)))
        call = {
            name: torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for name in ("query", "key", "value")
        }
        expected = F.scaled_dot_product_attention(**call, is_causal=True)
        found = ring({**call, "is_causal": True})
        assert torch.allclose(found.float(), expected.float(), atol=2e-2)
        found.sum().backward()
        assert call["key"].grad is not None
    finally:
        destroy_group()


def test_a_table_of_positions_is_cut_also_where_a_row_is_as_long_as_the_sequence():
    from types import SimpleNamespace

    from drivetrain.module.sequence_parallel import _cut

    split = SimpleNamespace(seq_dim=1, piece=lambda x, dim: x.narrow(dim, 4, 4))
    table = torch.arange(64.0).view(1, 8, 8)
    cos, sin = _cut(split, 8, 2, "position_embeddings", (table, -table))
    assert torch.equal(cos, table[:, 4:]) and torch.equal(sin, -table[:, 4:])
    assert _cut(split, 8, 2, "pairs", table) is table  # one entry for each pair of positions
