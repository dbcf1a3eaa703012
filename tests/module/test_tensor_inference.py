"""Inferred tensor plans: pairs are found by trying a block, and what would not add up stays whole."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.module.tensor_inference import infer_tp_plan
from tests.strategy.tasks import TENSOR_PLAN, TinyGPT

WIDTH = 12


class GlobalHeads(nn.Module):
    """Counts heads globally: as many heads on every rank, each with fewer features. It would run, and be wrong."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, 2, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Holds queries, keys and values in one matrix."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, -1, 3).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class NormedQueries(nn.Module):
    """Norms queries with parameters that all heads share."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, 3).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(self.norm(q), k, v).transpose(1, 2).flatten(2))


class Eager(nn.Module):
    """Writes attention out, with a mask buffer, as many teaching models do."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, 3).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.mT / 3**0.5).masked_fill(~self.mask[:t, :t], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, attention, hidden=8):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention()
        self.gate, self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def blocks(attention, **kwargs):
    return nn.Sequential(*[Block(attention, **kwargs) for _ in range(3)])


class Asserting(Eager):
    """Checks sizes without a message, as much code does."""

    def forward(self, x):
        assert self.q(x).shape[-1] == WIDTH
        return super().forward(x)


MLP = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
ATTENTION = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}


@pytest.mark.parametrize(
    ("attention", "remark"),
    [
        (GlobalHeads, "do not add up"),
        (Fused, "globally|do not add up"),
        (NormedQueries, "partial gradients"),
        (Asserting, "global number of features"),
    ],
)
def test_attention_that_cannot_be_split_stays_whole_beside_a_split_mlp(attention, remark):
    plan = infer_tp_plan(blocks(attention), 2)
    assert plan.styles == {f"{index}.{name}": style for index in range(3) for name, style in MLP.items()}
    assert any(re.search(remark, text) for text in plan.remarks)


def test_layers_that_are_paired_by_what_they_compute():
    plan = infer_tp_plan(blocks(Eager), 2)
    assert plan.styles["1.attention.q"] == "colwise" and plan.styles["1.attention.out"] == "rowwise"
    assert len(plan.styles) == 3 * 7 and not plan.remarks
    expected = {name.replace("*", index): style for index in "01" for name, style in TENSOR_PLAN.items()}
    assert infer_tp_plan(TinyGPT(), 2).styles == expected
    with torch.device("meta"):
        model = TinyGPT()
    assert infer_tp_plan(model, 4).styles == expected


def test_sizes_that_do_not_divide_leave_layers_whole():
    plan = infer_tp_plan(blocks(Eager), 4)  # four heads of three, and eight hidden features
    assert plan.styles["0.attention.q"] == "colwise" and plan.styles["0.up"] == "colwise"
    plan = infer_tp_plan(blocks(Eager, hidden=9), 2)
    assert "0.up" not in plan.styles and any("0: down, gate, up are not split" in text for text in plan.remarks)
    plan = infer_tp_plan(blocks(Eager), 6)  # twelve features divide, but not into heads
    assert plan.styles == {}


def test_a_norm_between_two_layers_and_results_used_twice_are_seen():
    class NormBetween(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = (
                nn.Linear(8, 8),
                nn.LayerNorm(8, elementwise_affine=False),
                nn.Linear(8, 8),
            )

        def forward(self, x):
            return x + self.second(self.norm(self.first(x)))

    class UsedTwice(NormBetween):
        def forward(self, x):
            hidden = self.first(x)
            return hidden.sum(-1, keepdim=True) + self.second(hidden.relu())

    for cls in (NormBetween, UsedTwice):
        plan = infer_tp_plan(nn.Sequential(cls(), cls()), 2)
        assert plan.styles == {} and "are not split" in plan.remarks[0]


def test_a_model_is_left_as_it_was_and_a_block_that_cannot_be_tried_is_named():
    model = blocks(Eager)
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    infer_tp_plan(model, 2)
    assert torch.equal(torch.get_rng_state(), random) and model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, table):
            return self.b(self.a(x) * table)

    plan = infer_tp_plan(nn.ModuleList([Odd(), Odd()]), 2)
    assert plan.styles == {} and "0 could not be tried (TypeError" in plan.remarks[0]
    assert infer_tp_plan(nn.Linear(4, 4), 2).remarks == ["there are no repeated blocks"]


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_models_of_transformers_are_understood(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 1}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, **sizes))
        split, whole = {"transformer.h.1.mlp.c_fc": "colwise", "transformer.h.1.mlp.c_proj": "rowwise"}, "c_attn"
    elif name == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **small))
        split, whole = {"bert.encoder.layer.1.attention.self.query": "colwise"}, "pooler"
    else:
        config = transformers.LlamaConfig(num_key_value_heads=2, **sizes, **small)
        model = transformers.LlamaForCausalLM(config)
        split, whole = {"model.layers.1.self_attn.o_proj": "rowwise", "model.layers.1.mlp.gate_proj": "colwise"}, "norm"
    styles = infer_tp_plan(model, 2).styles
    assert split.items() <= styles.items()
    assert not any(whole in layer for layer in styles)


def test_a_block_that_would_take_too_much_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr("drivetrain.module.tensor_inference.MOST_TRIED", 100)
    plan = infer_tp_plan(TinyGPT(), 2)
    assert not plan.styles and "was not tried" in plan.remarks[0]
