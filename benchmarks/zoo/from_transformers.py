"""Models of transformers, built from small random configurations without a network."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import default_collate

from benchmarks.zoo.task import Entry, Sample, Task, make_samples, mixes_samples, without_dropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY, LENGTH, WIDTH, IMAGE = 64, 12, 32, 32

DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2}
ENCODER = {**DECODER, "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": IMAGE,
    "patch_size": 8, "num_labels": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
STEPS = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "dropout": 0.0, **STEPS,
}  # fmt: skip
AUDIO = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16, "num_labels": 4,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False,
}  # fmt: skip


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=generator)


def _causal(generator: torch.Generator) -> Sample:
    ids = _tokens(generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _masked(generator: torch.Generator) -> Sample:
    ids = _tokens(generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _classified(generator: torch.Generator) -> Sample:
    return {"input_ids": _tokens(generator), "labels": torch.randint(0, 4, (), generator=generator)}


def _translated(generator: torch.Generator) -> Sample:
    ids = _tokens(generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _tokens(generator, 8)}


def _image(generator: torch.Generator) -> Sample:
    pixels = torch.randn(3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 4, (), generator=generator)}


def _segmented(generator: torch.Generator) -> Sample:
    pixels = torch.randn(3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 4, (IMAGE, IMAGE), generator=generator)}


def _filled(generator: torch.Generator) -> Sample:
    pixels = torch.randn(3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "bool_masked_pos": torch.rand(16, generator=generator) > 0.5}


def _wave(generator: torch.Generator) -> Sample:
    wave = torch.randn(400, generator=generator)
    return {"input_values": wave, "labels": torch.randint(0, 4, (), generator=generator)}


def _speech(generator: torch.Generator) -> Sample:
    return {"input_features": torch.randn(8, 40, generator=generator), "labels": _tokens(generator, 6)}


def _pair(generator: torch.Generator) -> Sample:
    ids = _tokens(generator)
    pixels = torch.randn(3, IMAGE, IMAGE, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def _asking_for_a_loss(samples: list[dict[str, Tensor]]) -> dict[str, object]:
    return {**default_collate(samples), "return_loss": True}


TABLE: list[tuple[str, str, str, str, Callable[[torch.Generator], Sample], dict[str, object]]] = [
    # name, family, configuration, model, sample, settings
    ("gpt2", "decoder", "GPT2Config", "GPT2LMHeadModel", _causal, {
        "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    ("gpt_neox", "decoder", "GPTNeoXConfig", "GPTNeoXForCausalLM", _causal, {**DECODER, "hidden_dropout": 0.0}),
    ("opt", "decoder", "OPTConfig", "OPTForCausalLM", _causal, {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": WIDTH, "dropout": 0.0}),
    ("bloom", "decoder", "BloomConfig", "BloomForCausalLM", _causal, {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    ("llama", "decoder, grouped queries", "LlamaConfig", "LlamaForCausalLM", _causal, GROUPED),
    ("mistral", "decoder, grouped queries", "MistralConfig", "MistralForCausalLM", _causal, {**GROUPED, "sliding_window": 8}),
    ("qwen2", "decoder, grouped queries", "Qwen2Config", "Qwen2ForCausalLM", _causal, GROUPED),
    ("qwen3", "decoder, grouped queries", "Qwen3Config", "Qwen3ForCausalLM", _causal, {**GROUPED, "head_dim": 8}),
    ("gemma2", "decoder, grouped queries", "Gemma2Config", "Gemma2ForCausalLM", _causal, {**GROUPED, "head_dim": 8}),
    ("phi3", "decoder, grouped queries", "Phi3Config", "Phi3ForCausalLM", _causal, {**GROUPED, "resid_pdrop": 0.0}),
    ("olmo2", "decoder, grouped queries", "Olmo2Config", "Olmo2ForCausalLM", _causal, GROUPED),
    ("falcon", "decoder, one key", "FalconConfig", "FalconForCausalLM", _causal, {
        **DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    ("mixtral", "experts", "MixtralConfig", "MixtralForCausalLM", _causal, {**GROUPED, **EXPERTS}),
    ("qwen2_moe", "experts", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", _causal, {
        **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    ("olmoe", "experts", "OlmoeConfig", "OlmoeForCausalLM", _causal, {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    ("mamba", "state space", "MambaConfig", "MambaForCausalLM", _causal, {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 8, "num_hidden_layers": 2, "pad_token_id": 0}),
    ("mamba2", "state space", "Mamba2Config", "Mamba2ForCausalLM", _causal, {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 8, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
        "n_groups": 2, "chunk_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    ("rwkv", "recurrent", "RwkvConfig", "RwkvForCausalLM", _causal, {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "attention_hidden_size": WIDTH, "intermediate_size": 64,
        "context_length": 32}),
    ("bert", "encoder", "BertConfig", "BertForMaskedLM", _masked, ENCODER),
    ("roberta", "encoder", "RobertaConfig", "RobertaForSequenceClassification", _classified, {**ENCODER, "num_labels": 4}),
    ("electra", "encoder", "ElectraConfig", "ElectraForMaskedLM", _masked, {**ENCODER, "embedding_size": WIDTH}),
    ("albert", "encoder, shared layers", "AlbertConfig", "AlbertForMaskedLM", _masked, {**ENCODER, "embedding_size": 16}),
    ("distilbert", "encoder", "DistilBertConfig", "DistilBertForMaskedLM", _masked, {
        "vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32,
        "dropout": 0.0, "attention_dropout": 0.0}),
    ("deberta_v2", "encoder", "DebertaV2Config", "DebertaV2ForSequenceClassification", _classified, {**ENCODER, "num_labels": 4}),
    ("modernbert", "encoder", "ModernBertConfig", "ModernBertForMaskedLM", _masked, {**DECODER, "attn_implementation": "sdpa"}),
    ("t5", "encoder-decoder", "T5Config", "T5ForConditionalGeneration", _translated, {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, **STEPS}),
    ("bart", "encoder-decoder", "BartConfig", "BartForConditionalGeneration", _translated, BART),
    ("marian", "encoder-decoder", "MarianConfig", "MarianMTModel", _translated, BART),
    ("pegasus", "encoder-decoder", "PegasusConfig", "PegasusForConditionalGeneration", _translated, BART),
    ("whisper", "audio", "WhisperConfig", "WhisperForConditionalGeneration", _speech, {
        **BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "suppress_tokens": None,
        "begin_suppress_tokens": None}),
    ("wav2vec2", "audio", "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", _wave, AUDIO),
    ("hubert", "audio", "HubertConfig", "HubertForSequenceClassification", _wave, AUDIO),
    ("vit", "vision", "ViTConfig", "ViTForImageClassification", _image, VISION),
    ("deit", "vision", "DeiTConfig", "DeiTForImageClassification", _image, VISION),
    ("beit", "vision", "BeitConfig", "BeitForImageClassification", _image, {**VISION, "drop_path_rate": 0.0}),
    ("dinov2", "vision", "Dinov2Config", "Dinov2ForImageClassification", _image, VISION),
    ("swin", "vision", "SwinConfig", "SwinForImageClassification", _image, {
        "image_size": IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
        "num_labels": 4, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0}),
    ("convnextv2", "vision", "ConvNextV2Config", "ConvNextV2ForImageClassification", _image, {
        "num_channels": 3, "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": 4}),
    ("resnet_hf", "vision", "ResNetConfig", "ResNetForImageClassification", _image, {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic", "num_labels": 4}),
    ("segformer", "vision, dense", "SegformerConfig", "SegformerForSemanticSegmentation", _segmented, {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [2, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 4,
        "hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}),
    ("vit_mim", "vision, masked", "ViTConfig", "ViTForMaskedImageModeling", _filled, {**VISION, "encoder_stride": 8}),
    ("clip", "multimodal", "CLIPConfig", "CLIPModel", _pair, {
        "text_config": {**DECODER, "projection_dim": 16}, "vision_config": {**VISION, "projection_dim": 16}, "projection_dim": 16}),
    ("siglip", "multimodal", "SiglipConfig", "SiglipModel", _pair, {"text_config": DECODER, "vision_config": VISION}),
]  # fmt: skip


def _build(config: str, model: str, sample: Callable[[torch.Generator], Sample], settings: dict[str, object]) -> Task:
    import transformers

    torch.manual_seed(0)
    built: PreTrainedModel = getattr(transformers, model)(getattr(transformers, config)(**settings))
    without_dropout(built)
    contrasts = sample is _pair  # every sample is compared with all others of its batch
    collate = _asking_for_a_loss if contrasts else None
    return Task(
        model=built, data=make_samples(sample), collate_fn=collate, mixes_samples=contrasts or mixes_samples(built)
    )


ENTRIES = [
    Entry(name=name, family=family, build=partial(_build, config, model, sample, settings), needs="transformers")
    for name, family, config, model, sample, settings in TABLE
]
