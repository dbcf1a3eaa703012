"""How a batch is passed to the model: which entries are inputs, which are targets, and where the loss comes from.

The choice is made on the first batch and again only when the type of the batch changes, so a step pays for none of it.

| batch | loss function | call | targets |
|---|---|---|---|
| tuple or list, two or more | given | `model(batch[0])` | `batch[1]` |
| the same, and `forward` requires n arguments, n > 1 | given | `model(*batch[:n])` | `batch[n]` |
| tuple or list | none | `model(*batch)`, the output carries the loss | – |
| mapping | given | `model(**rest)` | the first of labels, label, targets, target, y |
| mapping | none | `model(**batch)`, the output carries the loss | – |
| any, and the model has `loss(outputs, batch)` | none | `model(batch)`, then `model.loss(outputs, batch)` | – |
| anything else, such as a tensor | none | `model(batch)`, the output carries the loss | – |
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.core.arguments import accepted_names
from drivetrain.core.containers import (
    field_values,
    is_dataclass,
    is_namedtuple,
    leaves,
    map_items,
    replace_fields,
    same_tuple,
)
from drivetrain.core.errors import BatchOutputError, ConfigError, ConfigTypeError, warn
from drivetrain.module.accumulation import as_factor, share_of
from drivetrain.module.wrapping import is_fully_sharded, num_inputs, own_loss, unwrap

if TYPE_CHECKING:
    from drivetrain.train.hooks import TrainerHooks


BatchOutput = dict[str, Any]
"""What a loss hook returns: `loss`, `model_outputs` and `batch_size`; it may hold `num_items`, `losses` and entries of the user's own."""
CallArguments = tuple[tuple[object, ...], dict[str, object]]
"""The positional and the named arguments of a call."""
TARGET_NAMES = ("labels", "label", "targets", "target", "y")


class PairForm:
    """`(inputs, targets, ...)` with a loss function."""

    def run(self, trainer: "TrainerHooks", batch: Any) -> BatchOutput:
        """Compute what a loss hook returns."""
        targets = batch[1]
        outputs = trainer.forward(batch[0])
        loss = trainer.compute_loss(outputs, targets)
        if type(targets) is Tensor and targets.ndim:
            return {"loss": loss, "model_outputs": outputs, "batch_size": targets.shape[0]}
        return {"loss": loss, "model_outputs": outputs, "batch_size": batch_size_of(targets, batch)}

    def arguments(self, batch: Any) -> CallArguments:
        return (batch[0],), {}

    def targets(self, batch: Any) -> object:
        return batch[1]

    def predictions(self, outputs: object) -> object:
        return outputs


class OtherForm(PairForm):
    """What the other forms share: any arguments, and targets that may be absent."""

    def run(self, trainer: "TrainerHooks", batch: object) -> BatchOutput:
        """Compute what a loss hook returns."""
        args, kwargs = self.arguments(batch)
        outputs, targets = trainer.forward(*args, **kwargs), self.targets(batch)
        loss = trainer.compute_loss(outputs if trainer.loss_func is None else self.predictions(outputs), targets)
        return {"loss": loss, "model_outputs": outputs, "batch_size": batch_size_of(targets, batch)}


class SeveralInputsForm(OtherForm):
    """`(a, b, ..., targets)` for a model whose `forward` requires several arguments, with a loss function."""

    def __init__(self, num_inputs: int):
        self.num_inputs = num_inputs

    def arguments(self, batch: Any) -> CallArguments:
        return tuple(batch[: self.num_inputs]), {}

    def targets(self, batch: Any) -> object:
        return batch[self.num_inputs] if len(batch) > self.num_inputs else None


class UnpackForm(OtherForm):
    """A tuple unpacked into the arguments of a model that returns its own loss."""

    def arguments(self, batch: Any) -> CallArguments:
        return tuple(batch), {}

    def targets(self, batch: Any) -> object:
        return batch[1] if len(batch) > 1 else None


class MappingForm(OtherForm):
    """Named entries. Those that are targets for the loss function are not passed to the model."""

    def __init__(self, target: str | None, keep_target: bool):
        self.target, self.keep_target = target, keep_target

    def arguments(self, batch: Any) -> CallArguments:
        if self.keep_target or self.target is None:
            return (), dict(batch)
        return (), {name: value for name, value in batch.items() if name != self.target}

    def targets(self, batch: Any) -> object:
        return None if self.target is None else batch[self.target]

    def predictions(self, outputs: object) -> object:
        return logits_of(outputs)


class WholeForm(OtherForm):
    """The batch as one argument of a model that computes its own loss."""

    def arguments(self, batch: object) -> CallArguments:
        return (batch,), {}

    def targets(self, batch: object) -> object:
        if isinstance(batch, Mapping):
            name = next((name for name in TARGET_NAMES if name in batch), None)
            return None if name is None else batch[name]
        return batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None


BatchForm = PairForm


@dataclass(frozen=True)
class CallByForm:
    """Calls a model with a batch as the Trainer does."""

    form: BatchForm

    def __call__(self, model: nn.Module, batch: object) -> object:
        args, kwargs = self.form.arguments(batch)
        return model(*args, **kwargs)


@dataclass(frozen=True)
class LossByForm:
    """The Trainer's loss as a function of batch and output; without a loss function, the loss in the output."""

    form: BatchForm
    loss_func: Callable[..., Any] | None = None

    def __call__(self, batch: object, outputs: object) -> Any:
        return one_loss(self.named(batch, outputs))

    def named(self, batch: object, outputs: object) -> object:
        """Return the loss, or several of them by name."""
        if self.loss_func is None:
            return carried_loss(outputs)
        return self.loss_func(self.form.predictions(outputs), self.form.targets(batch))


def one_loss(loss: object) -> Any:
    """Return the loss that is trained on, of several by name."""
    if not isinstance(loss, Mapping):
        return loss
    return loss["loss"] if "loss" in loss else sum(loss.values())


def find_form(batch: object, model: object, has_loss_func: bool) -> BatchForm:
    """Choose how batches of this type are passed to the model, or raise an error that explains why none fits."""
    if not has_loss_func and (own_loss(model) is not None or not isinstance(batch, Mapping | tuple | list)):
        return WholeForm()
    if isinstance(batch, Mapping):
        target = next((name for name in TARGET_NAMES if name in batch), None)
        if has_loss_func and target is None:
            raise ConfigError(
                f"the batch has the entries {sorted(map(str, batch))}, but no target "
                f"({', '.join(TARGET_NAMES)}). Rename one, or override calculate_train_batch_loss; with metrics= also get_metric_inputs."
            )
        form = MappingForm(target, keep_target=not has_loss_func)
        _check_entries(form.arguments(batch)[1], model)
        return form
    if isinstance(batch, (tuple, list)) and not has_loss_func:
        return UnpackForm()
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        inputs = min(num_inputs(model), len(batch) - 1)
        if len(batch) > inputs + 1:
            given = "first" if inputs == 1 else f"first {inputs}"
            warn(
                f"the batch has {len(batch)} entries; the model gets the {given}, the loss function the next one, and the rest is unused. "
                "Override calculate_train_batch_loss to use them."
            )
        return PairForm() if inputs == 1 else SeveralInputsForm(inputs)
    what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__
    raise ConfigError(
        f"a batch that is a {what} has no inputs and targets. Give batches as (inputs, targets), for example with "
        "TensorDataset(inputs, targets), or as a mapping, or override calculate_train_batch_loss(batch)."
    )


def find_inputs(batch: object, model: object, has_loss_func: bool) -> BatchForm:
    """Choose how batches are passed to the model for a prediction: as for a loss, but targets may be absent."""
    if isinstance(batch, Tensor):
        return WholeForm()
    if isinstance(batch, (tuple, list)) and (len(batch) <= num_inputs(model) or not _takes(model, len(batch))):
        inputs = min(len(batch), num_inputs(model))  # without targets, or without a loss function that takes them
        return PairForm() if inputs == 1 else SeveralInputsForm(inputs)
    if isinstance(batch, Mapping) and own_loss(model) is None and not any(name in batch for name in TARGET_NAMES):
        _check_entries(batch, model)
        return MappingForm(None, keep_target=True)
    return find_form(batch, model, has_loss_func)


def _takes(model: object, count: int) -> bool:
    """Whether a model's `forward` can be called with so many positional arguments."""
    if not isinstance(model, nn.Module):
        return True
    try:
        inspect.signature(unwrap(model).forward).bind_partial(*[None] * count)
    except TypeError:
        return False
    return True


def _check_entries(entries: Mapping[str, object], model: object) -> None:
    if not isinstance(model, nn.Module):
        return
    names = accepted_names(unwrap(model).forward)
    unknown = [] if names is None else [entry for entry in entries if entry not in names]
    if names is not None and unknown:
        raise TypeError(
            f"the batch has entries that {type(unwrap(model)).__name__}.forward does not take: {', '.join(unknown)}. "
            f"It takes: {', '.join(names)}. Remove them in a collate_fn, or override calculate_train_batch_loss."
        )


def logits_of(outputs: object) -> object:
    """Return the logits in the outputs, or the outputs themselves."""
    logits = getattr(outputs, "logits", None)
    if logits is None and isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    return outputs if logits is None else logits


def carried_loss(outputs: object) -> Tensor:
    """Return the loss in a model's output: `.loss`, `["loss"]`, a scalar, or of a tuple the only scalar, else a scalar first element."""
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None:
        parts = outputs if isinstance(outputs, tuple | list) else [outputs]
        scalars = [part for part in parts if isinstance(part, Tensor) and part.dim() == 0]
        if scalars and (len(scalars) == 1 or scalars[0] is parts[0]):
            loss = scalars[0]
    if loss is None:
        raise BatchOutputError(
            f"no loss: the Trainer has no loss_func and the model's output ({type(outputs).__name__}) does not contain one. Expected "
            "outputs.loss, outputs['loss'], a scalar tensor, or a tuple with one. Pass loss_func=..., or give the model its labels."
        )
    return loss


def batch_size_of(targets: object, batch: object) -> int:
    """Return the first dimension of the targets, else of the first tensor found in the batch."""
    if isinstance(targets, Tensor) and targets.dim():
        return targets.shape[0]
    tensor = first_tensor(batch) if targets is None else first_tensor((targets, batch))
    return 1 if tensor is None else tensor.shape[0]


def map_tensors(function: Callable[[Tensor], object], value: object) -> Any:
    """Apply a function to every tensor in nested containers and return the result."""
    if isinstance(value, Tensor):
        return function(value)
    return map_items(value, partial(map_tensors, function))


def first_tensor(value: object) -> Tensor | None:
    """Return the first tensor with a first dimension in nested containers."""
    return next((tensor for tensor in leaves(value, Tensor) if tensor.dim()), None)


def split_batch(batch: object, size: int, rows: int | None = None) -> list[object]:
    """Cut a batch into micro-batches of at most `size` of its rows; entries without that first dimension go to each."""
    rows = batch_size_of(None, batch) if rows is None else rows
    return [batch] if rows <= size else _all_parts(batch, range(0, rows, size), size, rows)


def _all_parts(value: Any, starts: range, size: int, rows: int) -> list[object]:
    """Return `slice_rows` of every part; the usual containers are walked only once for all of them."""
    kind = type(value)
    if kind is Tensor and value.dim() and value.shape[0] == rows:
        return [value[start : start + size] for start in starts]
    if (kind is dict and value) or (kind in (tuple, list) and 0 < len(value) != rows):
        columns = zip(*[_all_parts(item, starts, size, rows) for item in (value.values() if kind is dict else value)])
        return [dict(zip(value, column)) if kind is dict else kind(column) for column in columns]
    return [slice_rows(value, start, min(start + size, rows), rows) for start in starts]


def slice_rows(value: Any, start: int, stop: int, rows: int) -> object:
    """Return some rows of every tensor in nested containers that has that many, and some items of other lists that have."""
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == rows else value
    has_rows = isinstance(value, list | tuple) and len(value) == rows and not is_namedtuple(value)
    if has_rows and not any(isinstance(item, Tensor) for item in value):
        return value[start:stop]
    return map_items(value, partial(slice_rows, start=start, stop=stop, rows=rows))


class RaggedRows(list[Tensor]):
    """Rows of different shapes, one tensor each."""


def join_parts(parts: list[Any], join: Callable[[list[object], str], object], place: str = "the output") -> object:
    """Join nested containers of several batches into one. `join` gets the parts of each other value, and where it is."""
    first = parts[0]
    if isinstance(first, Mapping):
        joined = {name: join_parts([part[name] for part in parts], join, f"{place}[{name!r}]") for name in first}
        return joined if type(first) is dict else _like(first, joined)
    if isinstance(first, list | tuple) and not isinstance(first, RaggedRows):
        items = [join_parts(list(column), join, f"{place}[{k}]") for k, column in enumerate(zip(*parts))]
        return same_tuple(first, items) if isinstance(first, tuple) else type(first)(items)
    if is_dataclass(first):
        columns = {name: [getattr(part, name) for part in parts] for name in field_values(first)}
        return replace_fields(first, {name: join_parts(columns[name], join, f"{place}.{name}") for name in columns})
    return join(parts, place)


def join_outputs(parts: list[object]) -> object:
    """Concatenate the outputs of micro-batches along their first dimension, detached."""
    return join_parts(parts, _concatenated)


def _concatenated(parts: list[object], place: str) -> object:
    tensors = [part.detach() for part in parts if isinstance(part, Tensor)]
    if not tensors:
        return parts[0]
    return torch.cat(tensors) if tensors[0].dim() else tensors[0]


def join_batch_outputs(outputs: list[BatchOutput], is_sum: bool, joins: bool) -> BatchOutput:
    """Combine the results of a loss hook for micro-batches into one for the whole batch. Outputs are joined only if `joins`."""
    sizes = [output["batch_size"] for output in outputs]
    whole: BatchOutput = {"model_outputs": None, "batch_size": sum(sizes)}
    weights = sizes
    if "num_items" in outputs[0]:
        weights = [output["num_items"] for output in outputs]
        whole["num_items"] = sum(weights)
    losses, share = [output["loss"].detach() for output in outputs], 1 if is_sum else share_of(1, sum(weights))
    if losses[0].is_cpu and not isinstance(share, Tensor):  # on the host already: nothing waits
        total = sum(loss.item() * weight for loss, weight in zip(losses, weights))
        whole["loss"] = torch.full_like(losses[0], total * share)
    else:
        loss = sum(loss * weight for loss, weight in zip(losses, weights))
        whole["loss"] = loss * as_factor(share, loss)
    if joins:
        names = [name for name in outputs[0] if name not in ("loss", "batch_size", "num_items")]
        whole.update((name, join_outputs([output[name] for output in outputs])) for name in names)
    return whole


def _like(example: Mapping[str, object], values: dict[str, object]) -> Mapping[str, object]:
    try:
        return type(example)(**values)
    except TypeError:
        return values


# ---------------------------------------------------------------------- generated sequences
# For metrics of an evaluation and for predictions. The model is the user's own, inside DDP and compiled shells, whose forward is not that
# of `generate`. A model sharded by `fully_shard` gathers weights in every forward, so its ranks must generate in step: `generate` gets
# `synced_gpus=True`, as transformers has it.

Generate = bool | Mapping[str, object]
"""Whether to generate, or with which arguments of the model's `generate`."""


def generate_arguments(generate: object, default: Mapping[str, object] | None = None) -> Mapping[str, object] | None:
    """Return the arguments of the model's `generate`, `default` if none are given, or None for no generation."""
    if isinstance(generate, bool):
        return (default or {}) if generate else None
    if isinstance(generate, Mapping) and all(isinstance(name, str) for name in generate):
        return dict(generate)
    raise ConfigTypeError(
        f"generate={generate!r}: expected True, False or a dict of arguments for the model's generate(), such as "
        "{'max_new_tokens': 32}."
    )


def check_generates(trainer: "TrainerHooks", arguments: Mapping[str, object] | None) -> None:
    """Raise if generation is requested of a model that cannot generate, unless the user overrides the hook."""
    own = unwrap(trainer.model) if isinstance(trainer.model, nn.Module) else None
    if arguments is None or own is None or trainer.overrides("calculate_generation_batch"):
        return
    if not callable(getattr(own, "generate", None)):
        raise ConfigError(
            f"generate=...: {type(own).__name__} has no method generate(inputs, ...). Define it, or override "
            "calculate_generation_batch(batch) of the Trainer."
        )


def generation_inputs(form: BatchForm, batch: object) -> CallArguments:
    """Return the arguments for `generate` from a batch: its inputs, without targets and what is derived from them."""
    if isinstance(batch, Mapping):
        targets, shown = form.targets(batch), set()
        if targets is not None:
            shown = {name for name, value in batch.items() if value is targets}
        if isinstance(targets, Tensor):  # the inputs of a decoder are the labels, shifted
            decoder = ("decoder_input_ids", "decoder_attention_mask")
            shown |= {name for name in decoder if getattr(batch.get(name), "shape", None) == targets.shape}
        return (), {name: value for name, value in batch.items() if name not in shown}
    if isinstance(form, UnpackForm | WholeForm):
        return (batch[0] if isinstance(batch, Sequence) else batch,), {}
    return form.arguments(batch)


def call_generate(model: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call the `generate` of the model inside its wrappers. From a result with `sequences`, return those."""
    model = unwrap(model) if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module) or not is_fully_sharded(model):
        generated = model.generate(*args, **kwargs)
        return getattr(generated, "sequences", generated)
    from torch.distributed.fsdp import register_fsdp_forward_method

    if "synced_gpus" not in inspect.signature(model.generate).parameters:  # type: ignore[arg-type]
        raise ConfigError(
            f"generate=...: {type(model).__name__}.generate has no argument synced_gpus, and the model is sharded: every forward gathers "
            "weights, so all ranks must call it equally often. Add the argument synced_gpus=False, and continue until all ranks are done "
            "if it is True; a loop of fixed length may ignore it."
        )
    own = vars(model).get("generate")
    register_fsdp_forward_method(model, "generate")  # gathers the weights of the root around it, too
    try:
        generated = model.generate(*args, **{"synced_gpus": True, **kwargs})  # type: ignore[operator]
    finally:
        del model.generate
        if own is not None:
            model.generate = own
    return getattr(generated, "sequences", generated)


def padding_token(model: object) -> int | None:
    """Return the model's padding token for generated sequences, if its configuration names one."""
    model = unwrap(model) if isinstance(model, nn.Module) else model
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        token = getattr(config, "pad_token_id", None)
        if isinstance(token, int):
            return token
    return None
