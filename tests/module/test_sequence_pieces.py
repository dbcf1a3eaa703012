"""Norms, dropouts and residual sums on pieces of the sequence, between layers that are split: same losses, same gradients, or a refusal."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.distributed_tensors import is_dtensor, synchronise
from drivetrain.module.sequence_pieces import run_on_pieces
from drivetrain.module.sequence_pieces_check import find_pieces
from drivetrain.module.tensor_inference import infer_tp_plan
from drivetrain.module.tensor_parallel import expand_tp_plan, find_tp_plan, parallelize
from tests.strategy.tasks import TENSOR_PLAN, VOCAB, WIDTH, Attention, TinyGPT

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCAB}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=VOCAB, n_positions=32, **rates, **tokens)
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(intermediate_size=32, **SIZES))


class Encoder(nn.Module):
    """torch's own layers, whose attention stays whole."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


MODELS = {"tiny": TinyGPT, "gpt2": gpt2, "llama": llama, "encoder": Encoder}


def styles_of(model, size):
    own = find_tp_plan(model)
    return expand_tp_plan(model, own, size) if own else infer_tp_plan(model, size).styles


def logits_of(out):
    return out if isinstance(out, torch.Tensor) else out.logits


def compare(names):
    """Return how far losses and gradients on pieces are from the plain model's, and what norms were given."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(2))
    for name in names:
        torch.manual_seed(0)
        plain = MODELS[name]()
        torch.manual_seed(0)
        model = MODELS[name]()
        synchronise(list(model.parameters()), mesh)
        styles = styles_of(model, mesh.size())
        plan = find_pieces(model, styles, mesh.size())
        parallelize(model, mesh, styles, unreduced=plan.closers)
        run_on_pieces(model, mesh, plan)
        shapes = set()
        norm = model.get_submodule(plan.norms[-1])
        hook = norm.register_forward_pre_hook(
            lambda module, args, shapes=shapes: shapes.add(args[0].to_local().shape[1])
        )
        losses = []
        for one in (plain, model):
            loss = F.cross_entropy(logits_of(one(tokens)).flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
        hook.remove()
        errors = []
        for (key, expected), (other, parameter) in zip(plain.named_parameters(), model.named_parameters()):
            assert key == other
            grad = parameter.grad.full_tensor() if is_dtensor(parameter.grad) else parameter.grad
            errors.append((grad - expected.grad).abs().max().item() / max(1e-3, expected.grad.abs().max().item()))
        with torch.no_grad():  # a length that does not divide runs whole
            odd = (logits_of(model(tokens[:, :7])) - logits_of(plain(tokens[:, :7]))).abs().max().item()
        with pytest.raises(ConfigError, match="7 positions must divide"):
            model(tokens[:, :7])
        found[name] = losses, max(errors), shapes, odd, list(model.state_dict()) == list(plain.state_dict())
    return found


def check(results, size):
    for found in results:
        for name, (losses, error, shapes, odd, same_keys) in found.items():
            assert losses[0] == pytest.approx(losses[1], rel=1e-5), name
            assert error < 1e-3 and odd < 1e-4, (name, error, odd)
            assert shapes == {8 // size} and same_keys, name


def test_losses_and_gradients_on_pieces_are_those_of_the_plain_model(world2, world4):
    check(world2(compare, ["tiny", "encoder"]), 2)
    check(world4(compare, ["tiny"]), 4)


@pytest.mark.slow
def test_models_of_transformers_on_pieces_have_the_losses_and_gradients_of_the_plain_ones(world2):
    pytest.importorskip("transformers")
    check(world2(compare, ["gpt2", "llama"], timeout=180), 2)


def test_what_stands_between_split_layers_is_found():
    model = TinyGPT()
    plan = find_pieces(model, expand_tp_plan(model, TENSOR_PLAN, 2), 2)
    assert plan.blocks == {"blocks.0": False, "blocks.1": True}
    assert plan.norms == [f"blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2)]
    assert plan.closers == [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attention.out", "down")]
    pytest.importorskip("transformers")
    model = gpt2()
    plan = find_pieces(model, styles_of(model, 2), 2)
    assert plan.closers[:2] == ["transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_proj"], (
        "the first of them is whole"
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = Encoder()
    find_pieces(model, {"layers.layers.0.linear1": "colwise", "layers.layers.0.linear2": "rowwise"}, 2)
    assert torch.equal(torch.get_rng_state(), before)


class Odd(nn.Module):
    """A pre-norm block with something in it that pieces cannot have."""

    def __init__(self, what):
        super().__init__()
        self.what, self.scale = what, nn.Parameter(torch.ones(WIDTH))
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        if self.what == "after":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.down(F.gelu(self.up(x))))
        if self.what == "scale":
            x = x * self.scale
        if self.what == "mean":
            x = x - x.mean(1, keepdim=True)
        normed = self.norm1(x)
        x = (normed if self.what == "normed" else x) + self.attention(normed)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x + torch.zeros(x.shape[0], 8, WIDTH) if self.what == "length" else x


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("after", "no norm comes before"),
        ("scale", "scale is used on pieces outside a norm"),
        ("mean", "does not treat positions one by one|mixes positions"),
        ("normed", "norm1 is added to the residual stream"),
        ("length", "depends on the length it sees"),
    ],
)
def test_blocks_that_are_not_the_same_on_pieces_are_refused_with_the_reason(what, reason):
    model = nn.Sequential(Odd(what), Odd(what))
    patterns = {key.removeprefix("blocks."): style for key, style in TENSOR_PLAN.items()}
    with pytest.raises(ConfigError) as caught:
        find_pieces(model, expand_tp_plan(model, patterns, 2), 2)
    assert re.search(reason, str(caught.value)) and "method sequence_parallel" in str(caught.value)


def test_models_without_split_blocks_and_plans_that_decide_themselves_are_refused():
    with pytest.raises(ConfigError, match="Linear has none"):
        find_pieces(nn.Linear(4, 4), {}, 2)
    model = TinyGPT()
    styles = {**expand_tp_plan(model, TENSOR_PLAN, 2), "blocks.0.norm1": "sequence"}
    with pytest.raises(ConfigError, match="norm1 the style 'sequence'"):
        find_pieces(model, styles, 2)
