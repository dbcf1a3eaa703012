"""Small models of many architectures, and what each of their parameters gets from a plan, compared with a plain loop.

The loop is SGD with momentum, because adaptive optimizers hide errors in the scale of a gradient. A parameter's error is relative to its
own movement in the plain loop, so that one small parameter that is wrong cannot hide among the others.
"""

import contextlib
import copy
import os
import warnings
from functools import cache

import torch
from torch.utils.data import Dataset

from drivetrain.core.errors import ConfigError, ConflictError, DistributedError, PlanInfeasible
from drivetrain.module.wrapping import named_clean_parameters
from drivetrain.runtime.ranks import clear_data_ranks, data_rank
from drivetrain.strategy.trial.checking import NOT_EXACT, TOLERANCES
from drivetrain.train.auto import auto_accelerate

ROWS, LENGTH, VOCAB = 8, 12, 64
SGD = {"lr": 0.05, "momentum": 0.9}
STEPS = 2
DEVICE = os.environ.get("PLAN_MATRIX_DEVICE", "cpu")
"""Where plans train: all ranks may share one GPU. The plain loop is on the CPU."""
if DEVICE != "cpu":
    torch.backends.cudnn.allow_tf32 = False
EXACT, LOST = TOLERANCES["exact"], 0.6
"""How far a parameter's movement may be from the plain one's: rounding of float32, and the most where autocast rounds a lot."""

_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
_KV = {"num_key_value_heads": 4}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CONFIGS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_TEXT, **_KV}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**_TEXT, **_KV, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_TEXT, **_KV}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_TEXT, **_KV, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_TEXT, **_KV}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_TEXT, **_KV, "num_local_experts": 4}),
    "mixtral with router loss": (
        "MixtralForCausalLM", "MixtralConfig",
        {**_TEXT, **_KV, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 5.0},
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_TEXT, **_KV, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {**_TEXT, **_KV}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_TEXT, **_KV, "pad_token_id": 0}),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_TEXT, **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)}),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 32, "dropout": 0.0},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**_TEXT, **_NO_DROPOUT}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {**_TEXT, **_NO_DROPOUT}),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
         "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "bart": (
        "BartForConditionalGeneration", "BartConfig",
        {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 8, "max_target_positions": 32, "num_mel_bins": 8,
         "dropout": 0.0,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "suppress_tokens": None,
         "begin_suppress_tokens": None},
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8,
         "num_labels": 4, **_NO_DROPOUT},
    ),
    "resnet": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic", "num_labels": 4},
    ),
}  # fmt: skip
"""By architecture: the model's class, its configuration's class, and the configuration's values."""
DENSE = ("llama", "gpt2", "bert")
"""Three architectures of different structure, on which all pairs of methods are tried."""


SINGLES = ("mixtral with router loss",)
"""Only single methods are tried on these. Their losses cannot be divided exactly, which the check of a plan warns of."""
IGNORED = -100


def make_model(name):
    import transformers

    transformers.logging.set_verbosity_error()
    cls, config, values = CONFIGS[name]
    torch.manual_seed(0)
    return getattr(transformers, cls)(getattr(transformers, config)(**values)).train()


def make_rows(name, rows=ROWS, seed=1):
    """Return `rows` samples as keyword arguments of the model's forward."""
    generator = torch.Generator().manual_seed(seed)

    def tokens():
        return torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)

    if name in ("vit", "resnet"):
        side = 16 if name == "vit" else 32
        pixels = torch.randn(rows, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 4, (rows,), generator=generator)}
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 16, generator=generator), "labels": with_ignored(tokens())}
    if name in ("t5", "bart", "bert"):
        return {"input_ids": tokens(), "labels": with_ignored(tokens())}
    if name == "roberta":
        return {"input_ids": tokens(), "labels": torch.randint(0, 2, (rows,), generator=generator)}
    ids = tokens()
    return {"input_ids": ids, "labels": with_ignored(ids)}


def with_ignored(labels):
    """Return labels of which rows ignore very different numbers, so that a mean over tokens is none over samples."""
    ignored = torch.arange(len(labels)).mul(5).remainder(LENGTH - 3).unsqueeze(1)
    return labels.masked_fill(torch.arange(LENGTH) >= LENGTH - ignored, IGNORED)


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(next(iter(self.rows.values())))

    def __getitem__(self, index):
        return {key: value[index] for key, value in self.rows.items()}


def own_loss(batch, outputs):
    """Return the loss that the model computed."""
    return outputs.loss


def plain_movement(name, windows=None, dtype=None):
    """Return the parameters at the beginning and after each step of a plain loop on one process.

    `windows` holds, for each step, the passes that a plan divides its batch into, over all ranks. They matter to batch norms alone, whose
    statistics are those of a pass, as in DDP. `dtype` computes under autocast. "half" computes in bfloat16, with weights that are copies of
    those in float32.
    """
    model, data = make_model(name), make_rows(name, ROWS * STEPS)
    if dtype == "half":
        return half_movement(model, make_model(name).bfloat16(), data, windows)
    if windows is None:
        windows = [[cut(data, range(step * ROWS, (step + 1) * ROWS))] for step in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    seen = [{key: value.detach().clone() for key, value in model.named_parameters()}]
    for window in windows:
        for batch in window:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(**batch).loss
            (loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({key: value.detach().clone() for key, value in model.named_parameters()})
    return seen


def half_movement(model, half, data, windows):
    """Return the parameters at the beginning and after each step of a plain loop whose passes are in bfloat16."""
    if windows is None:
        windows = [[cut(data, range(step * ROWS, (step + 1) * ROWS))] for step in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    seen = [{key: value.detach().clone() for key, value in model.named_parameters()}]
    for window in windows:
        for batch in window:
            batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
            (half(**batch).loss / len(window)).backward()
        for parameter, copied in zip(model.parameters(), half.parameters()):
            parameter.grad = None if copied.grad is None else copied.grad.float()
        optimizer.step()
        half.zero_grad()
        with torch.no_grad():
            for parameter, copied in zip(model.parameters(), half.parameters()):
                copied.copy_(parameter)
        seen.append({key: value.detach().clone() for key, value in model.named_parameters()})
    return seen


def cut(data, rows):
    return {key: value[list(rows)] for key, value in data.items()}


@cache
def expected_movement(name, dtype=None):
    """Return what `plain_movement` does on whole batches, which is the same for all plans."""
    return plain_movement(name, None, dtype)


@cache
def has_batch_statistics(name):
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in make_model(name).modules())


def all_passes(name, own):
    """Return the passes of all data ranks by step, of which each has the same number of samples; together they are the batch."""
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, (data_rank(), own))
    windows = [[batch for rank in dict(gathered).values() for batch in rank[step]] for step in range(STEPS)]
    data = make_rows(name, ROWS * STEPS)
    for step, window in enumerate(windows):
        whole_batch = cut(data, range(step * ROWS, (step + 1) * ROWS))
        found = {key: torch.cat([batch[key] for batch in window]).flatten().sort()[0] for key in data}
        assert all(torch.equal(found[key], value.flatten().sort()[0]) for key, value in whole_batch.items())
    return windows


def whole(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().to("cpu", torch.float32, copy=True)


def planned_movement(name, plan, **kwargs):
    """Return this rank's parameters, whole, at the beginning and after each step of a plan; and its passes by step."""
    loss, skips_check = own_loss, name not in SINGLES
    if not skips_check:  # a loss that cannot be sent to other processes is checked in these ones
        loss = lambda batch, outputs: outputs.loss
    status, result, applied = auto_accelerate(
        make_model(name), torch.optim.SGD, Rows(make_rows(name, ROWS * STEPS)), loss, None, "unpack_dict", SGD,
        dataloader_args={"batch_size": ROWS, "num_workers": 0}, load_strategy=plan, device=DEVICE, strict=False,
        **{"ignore_dryrun_on_load_strategy": skips_check, **kwargs},
    )  # fmt: skip
    if not status:
        raise PlanInfeasible(f"the check of the plan failed: {applied.failure.message}")
    inner = getattr(result.optim, "inner", None)
    masters = {id(parameter): master for parameter, master in getattr(inner, "_served", ())}

    def state():
        return {key: whole(masters.get(id(value), value)) for key, value in named_clean_parameters(result.model)}

    seen, passes = [state()], [[]]
    for batch in result.dataloader:
        parts = getattr(result.model, "microbatches", 1)  # of a pipeline
        split = {key: value.tensor_split(parts) for key, value in batch.items()}
        passes[-1] += [{key: value[part] for key, value in split.items()} for part in range(parts)]
        batch = result.prepare_input(batch, result.context.device)
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        closed = result.optim.window_closed
        result.optim.step()
        result.optim.zero_grad()
        if closed:
            seen.append(state())
            passes.append([])
    return seen, passes[:-1], applied


def errors(plain, planned, floor):
    """Return by step and parameter how far its movement is from the plain one's; one that should move and does not has the error 1."""
    largest = max((plain[1][key] - plain[0][key]).norm().item() for key in plain[0])
    found = {}
    for step in range(1, len(plain)):
        for key, value in planned[step].items():
            expected = plain[step][key] - plain[step - 1][key]
            error = (value - planned[step - 1][key] - expected).norm().item()
            # What hardly moves is rounding, such as a bias of keys.
            found[step, key] = error / max(expected.norm().item(), floor * largest)
    return found


def compare(name, plan, planned, windows):
    """Return the worst parameter, its error, and what it may be.

    A plan in 16 bits moves a parameter as the plain loop or as a plain loop under autocast does, as closely as a trial wants it; where
    autocast itself is further from float32, twice as far as that. With `half`, and where `fully_shard` casts the weights, a plain loop in
    bfloat16 takes the place of autocast. Batch norms over one or two samples (`windows`) amplify rounding, so there only what is lost
    counts.
    """

    def plain(dtype=None):
        return expected_movement(name, dtype) if windows is None else plain_movement(name, windows, dtype)

    expected = plain()
    if not is_mixed(plan):
        found, allowed = errors(expected, planned, 1e-5), {}
    else:
        cast = plain("half" if methods_of(plan) & {"half", "fsdp", "zero2"} else torch.bfloat16)
        usual, other = errors(expected, cast, 1e-2), errors(cast, planned, 1e-2)
        found = {key: min(error, other[key]) for key, error in errors(expected, planned, 1e-2).items()}
        least = TOLERANCES["low" if "half" in methods_of(plan) else "mixed"] if windows is None else LOST
        allowed = {key: min(LOST, max(least, 2 * usual[key])) for key in found}
    (step, key), error = max(found.items(), key=lambda item: item[1] / allowed.get(item[0], EXACT))
    return f"{key} in step {step}", error, allowed.get((step, key), EXACT)


def methods_of(plan):
    return {item if isinstance(item, str) else item[0] for item in plan}


def is_mixed(plan):
    return bool(methods_of(plan) & {"amp_native", "half", "fp8"})


def try_cell(name, plan, **kwargs):
    """Return "ok", "warned: ...", "rejected: reason", "wrong: ..." or "crash: ..." for one plan of one architecture."""
    if "native_dynamo" in methods_of(plan):
        torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned, passes, applied = planned_movement(name, copy.deepcopy(plan), **kwargs)
            windows = all_passes(name, passes) if has_batch_statistics(name) else None
            key, error, allowed = compare(name, plan, planned, windows)
        warned = [reason for reason in applied.reasons if NOT_EXACT in reason]
        if not error <= allowed:
            return f"warned: {warned[0]}" if warned else f"wrong: {key} is off by {error:.3g}"
        if applied.dropped:
            return "warned: left out: " + "; ".join(f"{method}: {reason}" for method, reason in applied.dropped)
        return f"ok ({error:.1e})"
    except (ConfigError, ConflictError, DistributedError) as error:
        return f"rejected: {type(error).__name__}: {error}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {str(error).strip()[:600]}"
    finally:
        with contextlib.suppress(Exception):
            clear_data_ranks()
