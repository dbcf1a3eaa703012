"""The penalty has the paper's slopes, arrives in every kind of attention, and lets models read longer than they learned."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.algorithms.alibi import Alibi, AlibiBias, alibi_slopes, apply_alibi, policy_registry, register_attention
from drivetrain.algorithms.alibi.algorithm import scale_sequences
from drivetrain.algorithms.stochastic_depth import apply_stochastic_depth
from drivetrain.compat.composer_types import _attn, enlarge_mask
from drivetrain.core.errors import NoEffectWarning
from drivetrain.train.trainer import Trainer
from drivetrain.train.verification import verify_resume
from tests.algorithms.surgery_models import Attention, TextNet


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_slopes_of_powers_of_two_are_a_geometric_series(heads):
    ratio = 2 ** (-(2 ** (3 - math.log2(heads))))
    assert alibi_slopes(heads) == pytest.approx([ratio ** (i + 1) for i in range(heads)])


def test_other_counts_are_filled_up_from_the_next_power():
    assert alibi_slopes(8)[0] == 0.5 and alibi_slopes(8)[-1] == 2**-8
    assert alibi_slopes(6) == pytest.approx([*alibi_slopes(4), alibi_slopes(8)[0], alibi_slopes(8)[2]])
    assert len(alibi_slopes(12)) == 12


def test_the_two_forms_of_the_bias():
    slopes = torch.tensor(alibi_slopes(2))
    both = AlibiBias(2, causal=False).scores(3, 4)
    for head in range(2):
        for i in range(3):
            for j in range(4):
                assert both[0, head, i, j] == pytest.approx(-slopes[head].item() * abs(i + 1 - j))
    causal = AlibiBias(2, causal=True).scores(3, 4)
    torch.testing.assert_close(causal, slopes[None, :, None, None] * torch.arange(4.0))


def reference_attention(q, k, v, bias, allowed):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v


register_attention(Attention, heads="heads", causal=True)


def test_calls_of_torch_s_kernel_inside_a_layer_are_met():
    torch.manual_seed(0)
    layer = Attention(8, 2)
    net = nn.Sequential(layer)
    x = torch.randn(3, 5, 8)
    before = net(x)
    apply_alibi(net, 16)
    q, k, v = layer.qkv(x).view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    distance = -(torch.arange(5.0)[:, None] - torch.arange(5.0)).abs()
    bias = torch.tensor(alibi_slopes(2))[:, None, None] * distance
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = layer.out(reference_attention(q, k, v, bias, allowed).transpose(1, 2).reshape(3, 5, 8))
    torch.testing.assert_close(net(x), expected)
    assert not torch.allclose(before, expected)
    compiled = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [None, "padding", "causal", "bool"])
def test_torch_s_multihead_attention_adds_the_penalty_to_its_mask(training, mask):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x, length = torch.randn(2, 4, 8), 4
    net = nn.Sequential()
    net.add_module("attention", attention)
    apply_alibi(nn.ModuleDict({"a": attention}), 16)
    allowed = torch.ones(2, 2, length, length, dtype=torch.bool)
    kwargs = {}
    if mask == "padding":
        kwargs["key_padding_mask"] = torch.tensor([[False] * 4, [False, False, False, True]])
        allowed[1, :, :, 3] = False
    elif mask == "causal":
        kwargs["attn_mask"] = torch.full((length, length), float("-inf")).triu(1)
        allowed = allowed.tril()
    elif mask == "bool":
        kwargs["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
        allowed = allowed.tril()
    q, k, v = (
        F.linear(x, attention.in_proj_weight, attention.in_proj_bias).view(2, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
    )
    bias = AlibiBias(2, causal=False).scores(length, length)
    mixed = reference_attention(q, k, v, bias, allowed).transpose(1, 2).reshape(2, length, 8)
    for need_weights in (True, False):
        out, _ = attention(x, x, x, need_weights=need_weights, **kwargs)
        torch.testing.assert_close(out, attention.out_proj(mixed), atol=1e-5, rtol=1e-4)


def test_torch_s_encoder_meets_it_in_training_and_evaluation():
    net = TextNet()
    tokens = torch.randint(0, 16, (2, 6))
    before = net.eval()(tokens)
    apply_alibi(net, 64)
    after = net.eval()(tokens)
    assert not torch.allclose(before, after)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    torch.testing.assert_close(net.train()(tokens), after, atol=1e-5, rtol=1e-4)


def make_hf(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)
    kind = transformers.BertConfig if name == "bert" else transformers.RobertaConfig
    config = kind(**sizes, intermediate_size=16, max_position_embeddings=10)
    return (transformers.BertForMaskedLM if name == "bert" else transformers.RobertaForMaskedLM)(config)


@pytest.mark.parametrize("name", ["gpt2", "bert", "roberta"])
def test_models_of_transformers_change_their_logits_and_read_longer_texts(name):
    model = make_hf(name).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(3, 20, (2, 6))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    before = model(input_ids=ids, attention_mask=mask).logits
    apply_alibi(model, 32, optimizers=optimizer)
    after = model(input_ids=ids, attention_mask=mask).logits
    assert not torch.allclose(before, after, atol=1e-6)
    changed = ids.clone()
    changed[1, 5] = (ids[1, 5] - 2) % 17 + 3
    torch.testing.assert_close(model(input_ids=changed, attention_mask=mask).logits[:, :4], after[:, :4])
    long = torch.randint(3, 20, (1, 30))
    assert model(input_ids=long).logits.shape == (1, 30, 20)
    tables = [p for key, p in model.named_parameters() if "wpe" in key or "position_embeddings" in key]
    assert len(tables) == 1 and not tables[0].any() and not tables[0].requires_grad
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert id(tables[0]) not in held
    if name == "gpt2":  # the future stays hidden
        other = ids.clone()
        other[:, 5] = (ids[:, 5] - 2) % 17 + 3
        torch.testing.assert_close(model(input_ids=other).logits[:, :5], model(input_ids=ids).logits[:, :5])


def test_gpt2_attends_with_the_formula():
    model = make_hf("gpt2").eval()
    apply_alibi(model, 32)
    layer = model.transformer.h[0].attn
    x = torch.randn(1, 5, 8)
    q, k, v = (t.view(1, 5, 2, 4).transpose(1, 2) for t in layer.c_attn(x).split(8, dim=2))
    bias = torch.tensor(alibi_slopes(2))[:, None, None] * torch.arange(5.0)
    mixed = reference_attention(q, k, v, bias, torch.ones(5, 5, dtype=torch.bool).tril())
    torch.testing.assert_close(layer(x)[0], layer.c_proj(mixed.transpose(1, 2).reshape(1, 5, 8)))


def test_a_layer_that_does_not_ask_for_its_bias_is_named():
    class Deaf(nn.Module):
        heads = 2

        def forward(self, x):
            return x

    register_attention(Deaf, heads="heads", causal=False)
    net = nn.Sequential(Deaf())
    apply_alibi(net, 8)
    with pytest.raises(RuntimeError, match="layers 0 did not use"):
        net(torch.randn(1, 2, 4))


class TwoInputs(nn.Module):
    """Declares one of its two inputs for trials, as multimodal models of transformers do."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(8, 2)
        self.dummy_inputs = {"x": torch.zeros(1, 3, 8)}

    def forward(self, x, pixels=None):
        return self.attention(x) + pixels.mean()


def test_inputs_that_are_not_enough_leave_the_check_to_the_first_pass():
    model = TwoInputs().train()
    apply_alibi(model, 16)
    assert model.training and len(model._forward_hooks) == 1
    model(torch.randn(1, 3, 8), torch.zeros(2))
    assert not model._forward_hooks


def test_registered_twice_is_refused():
    with pytest.raises(ValueError, match="already"):
        register_attention(Attention, heads=2, causal=True)
    with pytest.raises(TypeError):
        register_attention(3, heads=2, causal=True)


class OldGPT2Attention(nn.Module):
    """Attention as transformers had it before its interface."""

    def __init__(self):
        super().__init__()
        self.qkv, self.attn_dropout = nn.Linear(8, 24), nn.Dropout(0.0)
        self.register_buffer("bias", torch.ones(4, 4, dtype=torch.bool).tril()[None, None])

    def _attn(self, query, key, value, attention_mask=None, head_mask=None):
        raise NotImplementedError

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self._attn(q, k, v)[0].transpose(1, 2).reshape(x.shape)


def test_the_older_form_of_the_call_replaces_a_method_and_a_mask():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wpe, self.attention = nn.Embedding(4, 8), OldGPT2Attention()

        def forward(self, x):
            return self.attention(x + self.wpe(torch.arange(x.shape[1])))

    model = Model()
    apply_alibi(
        model,
        max_sequence_length=16,
        heads_per_layer=2,
        position_embedding_attribute="module.wpe",
        attention_module=OldGPT2Attention,
        attr_to_replace="_attn",
        alibi_attention=_attn,
        mask_replacement_function=enlarge_mask,
    )
    x = torch.randn(1, 10, 8)
    out = model(x)
    q, k, v = model.attention.qkv(x).view(1, 10, 3, 2, 4).permute(2, 0, 3, 1, 4)
    bias = torch.tensor(alibi_slopes(2))[:, None, None] * torch.arange(10.0)
    expected = reference_attention(q, k, v, bias, torch.ones(10, 10, dtype=torch.bool).tril())
    torch.testing.assert_close(out, expected.transpose(1, 2).reshape(1, 10, 8))
    assert model.attention.bias.shape == (1, 1, 16, 16) and model.wpe.weight.shape == (16, 8)


def test_policies_are_checked_like_the_reference_s():
    class Layer(nn.Module):
        pass

    with pytest.raises(ValueError, match="3"):
        policy_registry.register(Layer)(lambda module, index: None)
    with pytest.raises(NameError, match="max_sequence_length"):
        policy_registry.register(Layer)(lambda module, index, length: None)
    with pytest.raises(TypeError):
        policy_registry.register(int)(lambda module, index, max_sequence_length: None)

    @policy_registry.register(Layer)
    def replace(module, module_index, max_sequence_length):
        return nn.Linear(max_sequence_length, 1)

    try:
        with pytest.raises(ValueError, match="already"):
            policy_registry.register(Layer)(replace)
        net = nn.Sequential(Layer())
        apply_alibi(net, 7)
        assert net[0].in_features == 7
    finally:
        del policy_registry[Layer]


def test_batches_become_shorter_and_taller():
    batch = {"input_ids": torch.arange(16).view(2, 8), "mask": torch.ones(2, 8, 3), "name": "x"}
    scaled = scale_sequences(batch, 0.25)
    assert torch.equal(scaled["input_ids"], torch.arange(16).view(8, 2))
    assert scaled["mask"].shape == (8, 2, 3) and scaled["name"] == "x"
    pair = scale_sequences((torch.zeros(4, 2), torch.zeros(4, 2)), 2)
    assert isinstance(pair, tuple) and pair[0].shape == (2, 4)


def test_labels_without_a_sequence_are_named():
    with pytest.raises(ValueError, match="'labels'"):
        scale_sequences({"input_ids": torch.zeros(2, 8), "labels": torch.zeros(2)}, 0.25)
    with pytest.raises(ValueError, match="length 1.5"):
        scale_sequences([torch.zeros(2, 6)], 0.25)


def test_impossible_settings_are_refused():
    for settings in ({"max_sequence_length": 0}, {"max_sequence_length": 8, "train_sequence_length_scaling": 0}):
        with pytest.raises(ValueError):
            Alibi(**settings)
    assert len(Alibi(8, train_sequence_length_scaling=1).events) == 1


def test_a_wrong_embedding_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="embed"):
        apply_alibi(TextNet(), 8, position_embedding_attribute="embde")


class Texts(torch.utils.data.Dataset):
    """Token rows as the mappings that models of transformers take."""

    def __init__(self):
        self.rows = torch.randint(3, 20, (16, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def test_a_model_of_transformers_trains_on_short_texts_and_resumes_exactly():
    pytest.importorskip("transformers")

    def build():
        model = make_hf("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Trainer(model, None, optimizer, callbacks=(), algorithms=[Alibi(32, 0.5)])

    settings = {"per_device_batch_size": 4, "train_dataloader_kwargs": {"num_workers": 0}}
    assert verify_resume(build, Texts(), num_steps=4, **settings).is_exact
    trainer = build()
    losses = trainer.train(Texts(), num_epochs=4, **settings).get_metric_values("train_loss_epoch")
    assert losses[-1] < losses[0]
    assert trainer.model(input_ids=torch.randint(3, 20, (1, 30))).logits.shape == (1, 30, 20)


def test_blocks_that_are_skipped_in_the_first_pass_are_checked_later():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    apply_stochastic_depth(model, nn.TransformerEncoderLayer, drop_rate=0.5, drop_distribution="uniform")
    apply_alibi(model, 16)
    for _ in range(8):
        model(torch.randn(2, 4, 8))
    assert not model._forward_hooks  # by then every layer has run, and the check is over


def test_batches_keep_their_length_where_no_attention_was_found():
    model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(NoEffectWarning, match="no supported attention"):
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, (), algorithms=[Alibi(32, 0.5)])
    trainer.state.batch = batch = (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    trainer.engine.run_event("after_dataloader")
    assert trainer.state.batch is batch
