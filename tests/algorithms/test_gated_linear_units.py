"""Feed-forward networks become gated; what the model brings is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.algorithms.gated_linear_units import (
    BERTGatedFFOutput,
    GatedFeedForward,
    GatedLinearUnits,
    GatedProjection,
    apply_gated_linear_units,
    register_feed_forward,
)
from tests.algorithms.surgery_models import TextNet


def test_the_generic_network_gates_then_projects():
    net, h = GatedFeedForward(4, 8, 0.0, F.gelu, gated_layer_bias=True), torch.randn(3, 4)
    expected = net.wo(F.gelu(net.gated_layer(h)) * net.non_gated_layer(h))
    torch.testing.assert_close(net(h), expected)
    assert net.gated_layer.bias is not None and net.non_gated_layer.bias is None


def test_the_bert_form_adds_residual_and_norm():
    net, h, residual = BERTGatedFFOutput(4, 8, 0.0, F.relu, 1e-12), torch.randn(3, 4), torch.randn(3, 4)
    inner = net.wo(F.relu(net.gated_layer(h)) * net.non_gated_layer(h))
    torch.testing.assert_close(net(h, residual), net.layernorm(inner + residual))


@pytest.mark.parametrize("training", [True, False])
def test_torch_layers_compute_the_gated_product(training):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
    net = nn.Sequential(layer).train(training)
    apply_gated_linear_units(net)
    x = torch.randn(2, 5, 8)
    attended = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
    gate = layer.linear1
    assert isinstance(gate, GatedProjection)
    inner = layer.linear2(F.gelu(gate.gated_layer(attended)) * gate.non_gated_layer(attended))
    torch.testing.assert_close(net(x), layer.norm2(attended + inner), atol=1e-5, rtol=1e-4)


def test_bert_layers_are_gated_and_keep_their_last_projection():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_act="gelu",
    )
    model = transformers.BertForMaskedLM(config)
    layer = model.bert.encoder.layer[0]
    dense, norm = layer.output.dense, layer.output.LayerNorm
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_gated_linear_units(model, optimizers=optimizer)
    assert isinstance(layer.output, BERTGatedFFOutput) and isinstance(layer.intermediate, nn.Identity)
    assert layer.output.wo is dense and layer.output.layernorm is norm
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    ids = torch.randint(0, 20, (2, 6))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def test_two_activations_ask_for_a_choice():
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"))
    with pytest.raises(ValueError, match="gelu, relu"):
        apply_gated_linear_units(net)
    apply_gated_linear_units(net, act_fn=F.silu)
    assert net[0].linear1.act is F.silu


def test_a_layer_of_one_s_own_can_be_registered():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.down(self.up(x))

    def plan(layer, gating):
        return {layer.up: lambda: GatedProjection(4, 8, gating.act_fn)}

    register_feed_forward(Mine, activation=lambda layer: F.relu, plan=plan)
    with pytest.raises(ValueError, match="already"):
        register_feed_forward(Mine, activation=lambda layer: F.relu, plan=plan)
    net = nn.Sequential(Mine())
    apply_gated_linear_units(net)
    assert isinstance(net[0].up, GatedProjection)
    net(torch.randn(2, 4))


def test_the_activation_can_be_named():
    algorithm = GatedLinearUnits("silu")
    assert algorithm.act_fn is F.silu
    assert GatedLinearUnits(F.silu).config() == algorithm.config()
    with pytest.raises(ValueError, match="siluu"):
        GatedLinearUnits("siluu")
    apply_gated_linear_units(TextNet(), act_fn=F.silu)


def test_a_failed_application_leaves_the_activation():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    x = torch.randn(2, 3, 8)
    before = model(x)
    with pytest.raises(RuntimeError, match="not in any"):
        apply_gated_linear_units(model, torch.optim.SGD(model[0].norm1.parameters(), lr=0.1))
    torch.testing.assert_close(model(x), before)
