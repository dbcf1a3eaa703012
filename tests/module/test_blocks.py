import os

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.module.blocks import find_blocks, repeated_blocks, select_modules
from drivetrain.module.checkpointing import checkpoint_blocks
from tests.module import models


def shape_of(model, sample=None):
    """Path, class name and number of members of each repeated group."""
    groups = find_blocks(model, sample)
    return [(group.path, group.cls.__name__, len(group.members)) for group in groups if group.repeats]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (models.GPT2, [("transformer.h", "Block", 6)]),
        (models.Llama, [("model.layers", "LlamaLayer", 5)]),
        (models.Bert, [("encoder.layer", "Block", 4)]),
        (models.T5, [("encoder.block", "T5Block", 3), ("decoder.block", "T5Block", 3)]),
        (models.ViT, [("blocks", "Block", 4)]),
        (models.CLIP, [("text_model.layers", "Block", 3), ("vision_model.layers", "Block", 4)]),
        (models.ResNet, [("", "Bottleneck", 16)]),
        (models.Swin, [("layers", "Block", 12)]),
        (models.ConvNeXt, [("stages", "ConvNeXtBlock", 18)]),
        (models.UNet, [("", "Down", 4), ("", "Up", 4)]),
        (models.MoE, [("layers", "MoEBlock", 3)]),
    ],
)
def test_blocks_of_well_known_architectures_are_found(build, expected):
    assert shape_of(build()) == expected


def test_encoder_and_decoder_of_torch_transformer_are_two_families():
    model = nn.Transformer(16, 2, 3, 2, 32, batch_first=True)
    assert shape_of(model) == [
        ("encoder.layers", "TransformerEncoderLayer", 3),
        ("decoder.layers", "TransformerDecoderLayer", 2),
    ]


def test_stages_inside_one_sequential_are_one_family_too():
    stages = [nn.Sequential(models.Block(8), models.Block(8)) for _ in range(3)]
    assert shape_of(nn.Sequential(nn.Linear(8, 8), *stages)) == [("", "Block", 6)]


def test_named_stacks_in_a_module_dict_stay_two_families():
    stack = lambda: nn.ModuleList([models.Block(8) for _ in range(2)])
    model = nn.ModuleDict({"encoder": stack(), "decoder": stack()})
    assert shape_of(model) == [("encoder", "Block", 2), ("decoder", "Block", 2)]


def test_dicts_in_a_list_are_opened_because_they_do_not_run_themselves():
    layer = nn.TransformerEncoderLayer
    pairs = [nn.ModuleDict({"first": layer(8, 2, 16), "mix": nn.Linear(8, 8)}) for _ in range(3)]
    (group,) = find_blocks(nn.Sequential(nn.Linear(8, 8), nn.ModuleList(pairs)))
    assert group.names == ("1.0.first", "1.1.first", "1.2.first")


def test_layers_with_a_parametrization_are_still_layers():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2))
    assert not repeated_blocks(model)


def test_numbered_attributes_need_running_numbers():
    model = nn.Module()
    model.block1, model.block2, model.block9 = models.Block(8), models.Block(8), models.Block(8)
    assert shape_of(model) == []
    del model.block9
    assert shape_of(model) == [("", "Block", 2)]


def test_a_tiny_plain_mlp_is_one_unit():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    (group,) = find_blocks(model)
    assert group.members == (model,) and group.path == "" and not group.repeats
    assert group.share == 1.0 and repeated_blocks(model) == []


def test_a_large_plain_mlp_is_cut_at_module_boundaries_into_units_of_at_least_a_million():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(6)], nn.Linear(1500, 10))
    groups = find_blocks(model)
    assert [group.names for group in groups] == [(str(i),) for i in range(6)]
    assert all(group.params >= 1_000_000 for group in groups)


def test_custom_single_layers_are_not_blocks_but_leaves_with_several_matrices_are():
    norms = nn.ModuleList([models.RMSNorm(4) for _ in range(3)])
    assert shape_of(nn.ModuleDict({"norms": norms})) == []

    class RawBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))

    assert shape_of(nn.ModuleList([RawBlock() for _ in range(3)])) == [("", "RawBlock", 3)]


def test_large_leftovers_join_when_blocks_hold_less_than_half():
    model = models.Llama(vocab=5000, width=8, depth=3)
    groups = find_blocks(model)
    assert [group.path for group in groups] == ["model.embed_tokens", "model.layers"]
    assert [group.repeats for group in groups] == [False, True]
    assert sum(group.share for group in groups) >= 0.5


def test_parameters_and_shares_count_each_parameter_once():
    model = models.Llama()
    (group,) = find_blocks(model)
    assert group.params == sum(p.numel() for p in model.model.layers.parameters())
    assert group.share == pytest.approx(group.params / sum(p.numel() for p in model.parameters()))


def test_a_parameter_shared_between_blocks_counts_for_neither():
    model = nn.ModuleList([models.Block(8) for _ in range(3)])
    for block in model[1:]:
        block.mlp.up.weight = model[0].mlp.up.weight
    (group,) = find_blocks(model)
    own = sum(p.numel() for p in model[0].parameters()) - model[0].mlp.up.weight.numel()
    assert group.params == 3 * own


def test_one_layer_used_many_times_is_no_family():
    layer = models.Block(8)
    assert shape_of(nn.ModuleList([layer] * 4)) == []


def test_experts_are_recognised_by_a_fake_run_where_no_router_shows_them():
    model = models.MoE(depth=2, has_router=False)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    assert shape_of(model, tokens) == [("layers", "MoEBlock", 2)]
    assert shape_of(model, (tokens,)) == shape_of(model, {"tokens": tokens}) == [("layers", "MoEBlock", 2)]
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_fake_run_agrees_that_the_blocks_of_stages_are_a_chain():
    assert shape_of(models.Swin(), torch.zeros(2, 4, 3)) == [("layers", "Block", 12)]


def test_a_sample_that_cannot_be_run_falls_back_to_the_structure():
    assert shape_of(models.Swin(), torch.zeros(1)) == [("layers", "Block", 12)]


def test_blocks_are_the_same_after_checkpointing_every_second_one():
    model = models.GPT2()
    checkpoint_blocks(model, every=2)
    assert shape_of(model) == [("transformer.h", "Block", 6)]


def test_blocks_are_found_through_a_wrapper():
    assert shape_of(models.Shell(models.GPT2())) == [("transformer.h", "Block", 6)]


def test_modules_are_selected_by_class_name_pattern_and_list():
    model = models.GPT2(depth=2)
    mlps = [name for name, _ in select_modules(model, models.Mlp)]
    assert mlps == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert [name for name, _ in select_modules(model, "Mlp")] == mlps
    assert [name for name, _ in select_modules(model, "transformer.h.*.mlp")] == mlps
    both = select_modules(model, [models.Mlp, model.transformer["h"][0].attn])
    assert [name for name, _ in both] == ["transformer.h.0.attn", *mlps]


def test_an_unknown_class_name_lists_the_block_classes():
    with pytest.raises(ConfigError, match=r"'Blok'.*Did you mean 'Block'.*Repeated blocks of GPT2: Block"):
        select_modules(models.GPT2(), "Blok")


@pytest.mark.peers
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("GPT2Model", [("h", "GPT2Block", 6)]),
        ("LlamaModel", [("layers", "LlamaDecoderLayer", 4)]),
        ("BertModel", [("encoder.layer", "BertLayer", 4)]),
        ("T5Model", [("encoder.block", "T5Block", 3), ("decoder.block", "T5Block", 3)]),
    ],
)
def test_blocks_of_transformers_models(kind, expected):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
    settings = {
        "GPT2Model": ("GPT2Config", {"n_embd": 32, "n_head": 2, "n_layer": 6, "vocab_size": 64}),
        "LlamaModel": ("LlamaConfig", {**small, "num_hidden_layers": 4, "num_key_value_heads": 2}),
        "BertModel": ("BertConfig", {**small, "num_hidden_layers": 4}),
        "T5Model": (
            "T5Config",
            {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2, "vocab_size": 64},
        ),
    }
    name, values = settings[kind]
    model = getattr(transformers, kind)(getattr(transformers, name)(**values))
    assert shape_of(model) == expected


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "cls", "count"),
    [
        ("vit_tiny_patch16_224", "Block", 12),
        ("resnet50", "Bottleneck", 16),
        ("swin_tiny_patch4_window7_224", "SwinTransformerBlock", 12),
        ("convnext_tiny", "ConvNeXtBlock", 18),
    ],
)
def test_blocks_of_timm_models(name, cls, count):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model(name)
    assert [(kind, members) for _, kind, members in shape_of(model)] == [(cls, count)]
