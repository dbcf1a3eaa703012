import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.params import muon_groups, select_parameters
from tests.module import models


def sides(model, **kw):
    groups = muon_groups(model, **kw)
    return [name for name, _ in groups.muon], [name for name, _ in groups.other], dict(groups.reasons)


def test_hidden_weights_go_to_muon_and_the_rest_to_the_other():
    model = models.GPT2(depth=2)
    muon, other, reasons = sides(model)
    parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    assert sorted(muon) == sorted(f"transformer.h.{i}.{part}.weight" for i in range(2) for part in parts)
    assert reasons["transformer.wte.weight"] == "tied to an embedding"
    assert reasons["transformer.wpe.weight"] == "embedding"
    assert reasons["transformer.ln_f.weight"] == reasons["transformer.h.0.attn.qkv.bias"] == "vector"
    assert sorted(muon + other) == sorted(name for name, _ in model.named_parameters())


def test_an_untied_last_linear_is_the_output_head():
    muon, other, reasons = sides(models.Llama(depth=2))
    assert reasons["lm_head.weight"] == "output head" and "lm_head.weight" in other
    assert "model.layers.1.down_proj.weight" in muon


def test_the_last_linear_of_a_repeated_block_is_no_head():
    muon, other, _ = sides(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3))
    assert "layers.2.linear2.weight" in muon and "layers.0.self_attn.in_proj_weight" in muon
    assert all(name.endswith(("bias", "norm1.weight", "norm2.weight")) for name in other)


def test_convolution_kernels_are_hidden_weights():
    muon, other, reasons = sides(models.ResNet(depths=(2, 2)))
    assert "layer1.0.conv2.weight" in muon and "(out, rest)" in reasons["layer1.0.conv2.weight"]
    assert reasons["fc.weight"] == "output head" and "bn1.weight" in other


def test_tokens_tables_and_stacks_are_left_to_the_other():
    model = models.ViT(depth=2)
    model.blocks[0].attn.bias_table = nn.Parameter(torch.zeros(9, 2))
    model.experts = nn.Module()
    model.experts.weights = nn.Parameter(torch.zeros(4, 8, 8))
    model.wide_norm = nn.LayerNorm([4, 4])
    muon, _, reasons = sides(model)
    assert reasons["pos_embed"] == "embedding"
    assert reasons["cls_token"].startswith("held next to layers")
    assert reasons["blocks.0.attn.bias_table"].startswith("held next to layers")
    assert reasons["experts.weights"] == "stack of matrices, not one"
    assert reasons["wide_norm.weight"] == "normalisation"
    assert "patch_embed.weight" in muon and "blocks.1.mlp.up.weight" in muon


def test_a_matrix_with_one_row_is_a_vector_in_disguise():
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    muon, _, reasons = sides(model)
    assert muon == ["2.weight"] and reasons["0.weight"] == reasons["1.weight"] == "one row or column"


def test_frozen_parameters_are_split_like_the_others_and_names_are_clean():
    model = models.Llama(depth=2)
    trained = sides(model)
    model.model.layers[0].requires_grad_(False)
    assert sides(models.Shell(model)) == trained
    assert sorted(trained[0] + trained[1]) == sorted(name for name, _ in model.named_parameters())


def test_more_can_be_kept_from_muon_by_name():
    muon, other, reasons = sides(models.Llama(depth=2), other=["model.layers.1", "*.gate_proj.weight"])
    assert reasons["model.layers.1.up_proj.weight"] == "named in `other`"
    assert "model.layers.0.gate_proj.weight" in other and "model.layers.0.up_proj.weight" in muon


def test_the_split_explains_itself():
    text = muon_groups(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).explain()
    assert text.splitlines() == [
        "muon: 1 tensors, 16 elements",
        "other: 3 tensors, 14 elements",
        "muon   0.weight  hidden weight",
        "other  0.bias    vector",
        "other  1.weight  output head",
        "other  1.bias    vector",
    ]


def test_parameters_are_selected_by_name_module_and_pattern_in_model_order():
    model = models.GPT2(depth=2)
    assert list(select_parameters(model, "transformer.ln_f")) == ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert list(select_parameters(model, "transformer.ln_f.bias")) == ["transformer.ln_f.bias"]
    norms = list(select_parameters(model, ["transformer.ln_f", "*.ln_?.weight"]))
    assert norms == [
        *(f"transformer.h.{i}.ln_{j}.weight" for i in range(2) for j in (1, 2)),
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    ]
    assert len(select_parameters(model, "transformer.h.*.mlp")) == 8
    assert len(select_parameters(models.Shell(model), "*")) == len(list(model.parameters()))


def test_a_name_ends_at_a_dot():
    model = nn.ModuleDict({"enc": nn.Linear(1, 1), "encoder": nn.Linear(1, 1)})
    assert list(select_parameters(model, "enc")) == ["enc.weight", "enc.bias"]


def test_a_pattern_that_matches_nothing_names_the_nearest_and_the_first_level():
    model = nn.ModuleDict({"encoder": nn.Linear(1, 1), "decoder": nn.Linear(1, 1)})
    with pytest.raises(ConfigError) as caught:
        select_parameters(model, ["encoder", "enocder"], where="optim.updated_modules")
    text = str(caught.value)
    assert text.startswith("optim.updated_modules: unknown parameter or module of ModuleDict 'enocder'")
    assert "Did you mean 'encoder'?" in text and "First-level modules: encoder, decoder." in text
    with pytest.raises(ConfigError, match=r"Did you mean 'encoder\.weight'"):
        select_parameters(model, "encoder.weigth")
