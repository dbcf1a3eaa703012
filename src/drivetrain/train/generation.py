"""Sequences that a model generates, for metrics of an evaluation and for predictions.

The model is the user's own, inside DDP and compiled shells, whose forward is not that of `generate`. A model sharded by `fully_shard`
gathers weights in every forward, so its ranks must generate in step: `generate` gets `synced_gpus=True`, as transformers has it.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, ConfigTypeError
from drivetrain.module.wrapping import is_fully_sharded, unwrap
from drivetrain.train.batches import BatchForm, UnpackForm, WholeForm

if TYPE_CHECKING:
    from drivetrain.train.run import Run

Generate = bool | Mapping[str, Any]
"""Whether to generate, or with which arguments of the model's `generate`."""


def generate_arguments(generate: object, default: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Return the arguments of the model's `generate`, `default` where none are given, or None for no generation."""
    if isinstance(generate, bool):
        return (default or {}) if generate else None
    if isinstance(generate, Mapping) and all(isinstance(name, str) for name in generate):
        return dict(generate)
    raise ConfigTypeError(
        f"generate={generate!r}: expected True, False or a dict of arguments for the model's generate(), such as "
        "{'max_new_tokens': 32}."
    )


def check_generates(model: object, is_overridden: bool) -> None:
    """Reject a model that cannot generate, unless a hook of the user's own does."""
    if is_overridden or not isinstance(model, nn.Module):
        return
    own = unwrap(model)
    if not callable(getattr(own, "generate", None)):
        raise ConfigError(
            f"generate=...: {type(own).__name__} has no method generate(inputs, ...). Define it, or override "
            "calculate_generation_batch(batch) of the Trainer."
        )


@contextmanager
def generating(run: "Run", arguments: Mapping[str, Any] | None) -> Iterator[None]:
    """Generate with these arguments until the end of the block."""
    before, run.generate = run.generate, arguments
    try:
        yield
    finally:
        run.generate = before


def generation_inputs(form: BatchForm, batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for `generate` that a batch holds: its inputs, without targets and what is made of them."""
    if isinstance(batch, Mapping):
        targets = form.targets(batch)
        return (), {name: value for name, value in batch.items() if not _shows_targets(name, value, targets)}
    if isinstance(form, UnpackForm | WholeForm):
        return (batch[0] if isinstance(batch, Sequence) else batch,), {}
    return form.arguments(batch)


def _shows_targets(name: str, value: object, targets: object) -> bool:
    if value is targets and targets is not None:
        return True
    is_decoder_input = name in ("decoder_input_ids", "decoder_attention_mask")  # the labels, shifted
    return is_decoder_input and isinstance(targets, Tensor) and getattr(value, "shape", None) == targets.shape


def call_generate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the `generate` of the model inside its shells; of a result with `sequences`, return those."""
    model = unwrap(model) if isinstance(model, nn.Module) else model
    if isinstance(model, nn.Module) and is_fully_sharded(model):
        with _in_step(model, kwargs):
            generated = model.generate(*args, **kwargs)  # type: ignore[operator]
    else:
        generated = model.generate(*args, **kwargs)
    return getattr(generated, "sequences", generated)


@contextmanager
def _in_step(model: nn.Module, kwargs: dict[str, Any]) -> Iterator[None]:
    """Gather the weights of the root around `generate` too, and let all ranks make as many forwards."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    if "synced_gpus" not in inspect.signature(model.generate).parameters:  # type: ignore[arg-type]
        raise ConfigError(
            f"generate=...: {type(model).__name__}.generate has no argument synced_gpus, and the model is sharded: every forward gathers "
            "weights, so all ranks must call it equally often. Take synced_gpus=False there, and go on until all ranks are done "
            "where it is True; a loop of a fixed length may ignore it."
        )
    kwargs.setdefault("synced_gpus", True)
    own = vars(model).get("generate")
    register_fsdp_forward_method(model, "generate")
    try:
        yield
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own


def padding_token(model: object) -> int | None:
    """Return the token that a model pads what it generates with, where its configuration names one."""
    model = unwrap(model) if isinstance(model, nn.Module) else model
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        token = getattr(config, "pad_token_id", None)
        if isinstance(token, int):
            return token
    return None
