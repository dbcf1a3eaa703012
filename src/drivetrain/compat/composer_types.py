"""Composer's models, and its small types: loaders with their settings, evaluation sets, precision names, loggers, helpers for collections.

A model of Composer takes a whole batch, and computes its loss and metrics from it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, DistributedSampler

from drivetrain.context.batch import ensure_targets_one_hot, infer_target_type
from drivetrain.core import Callback, ConfigError, ConfigTypeError, Event, MissingExtra
from drivetrain.core.containers import map_items
from drivetrain.core.errors import warn
from drivetrain.core.ordering import refers_to
from drivetrain.core.plugin import Phase, PluginReference, plugin_name
from drivetrain.core.types import JsonValue, StateDict
from drivetrain.module.precision import parse_precision
from drivetrain.runtime.device import choose_device
from drivetrain.runtime.ranks import get_num_processes, get_rank

Batch = Any  # as in Composer: programs index what they annotate with it
JSON = JsonValue


class Precision(StrEnum):
    """The names of precisions; the Trainer takes them as they are."""

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"


class MemoryFormat(StrEnum):
    """The names of torch's memory formats."""

    CONTIGUOUS_FORMAT = "contiguous_format"
    CHANNELS_LAST = "channels_last"
    CHANNELS_LAST_3D = "channels_last_3d"
    PRESERVE_FORMAT = "preserve_format"


class TrainerMode(StrEnum):
    """What a Trainer is doing."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


class Serializable:
    """Something with a state that checkpoints hold."""

    def state_dict(self) -> StateDict:
        """Return what must be saved to continue."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Take back what `state_dict` returned."""


def get_precision_context(
    precision: str | Precision, precision_config: Mapping[str, object] | None = None, fp8_autocast_enabled: bool = True
) -> AbstractContextManager[object]:
    """Return a context in which operations run in a precision, on the device of this process."""
    if precision_config:
        raise ConfigError(
            f"precision_config={dict(precision_config)!r} is not supported: Transformer Engine is not used. For fp8 layers use the "
            "algorithm FP8Linear."
        )
    is_fp8 = precision == Precision.AMP_FP8
    chosen = Precision.AMP_BF16 if is_fp8 and not fp8_autocast_enabled else "fp8" if is_fp8 else precision
    return parse_precision(chosen).autocast(choose_device("auto").type)


class DataSpec:
    """A loader whose batches are transformed on their way; the Trainer takes it like any other loader.

    `split_batch`, `get_num_samples_in_batch` and `get_num_tokens_in_batch` are not needed: the Trainer finds out how a batch is cut and
    what it holds. Giving one is an error that names the argument of the Trainer.
    """

    def __init__(
        self,
        dataloader: Iterable[object],
        num_samples: int | None = None,
        num_tokens: int | None = None,
        device_transforms: Callable[[Any], object] | None = None,
        batch_transforms: Callable[[Any], object] | None = None,
        microbatch_transforms: Callable[[Any], object] | None = None,
        split_batch: Callable[..., object] | None = None,
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int] | None = None,
    ):
        unused = {
            "split_batch": (split_batch, "override Trainer.calculate_train_batch_loss, or do not set microbatch_size"),
            "microbatch_transforms": (microbatch_transforms, "use batch_transforms"),
            "get_num_samples_in_batch": (get_num_samples_in_batch, "Trainer(count_items=...)"),
            "get_num_tokens_in_batch": (get_num_tokens_in_batch, "Trainer(count_items=...)"),
        }
        for name, (given, advice) in unused.items():
            if given is not None:
                raise ConfigError(f"DataSpec({name}=...) is not supported. Use instead: {advice}.")
        if device_transforms is not None and batch_transforms is not None:
            raise ConfigError("DataSpec: device_transforms is the old name of batch_transforms. Give one of them.")
        self.dataloader, self.num_samples, self.num_tokens = dataloader, num_samples, num_tokens
        self.batch_transforms = batch_transforms if batch_transforms is not None else device_transforms

    def __iter__(self) -> Iterator[object]:
        return iter(self.dataloader) if self.batch_transforms is None else map(self.batch_transforms, self.dataloader)

    def __len__(self) -> int:
        return len(self.dataloader)  # type: ignore[arg-type]  # a loader without a length raises, as it does itself

    def loader(self) -> object:
        """Return what the Trainer iterates: the loader itself where nothing changes its batches, so that its place can be restored."""
        return self.dataloader if self.batch_transforms is None else self


def ensure_data_spec(dataloader: Any) -> DataSpec:
    """Return a DataSpec as it is, or one around a loader."""
    if isinstance(dataloader, DataSpec):
        return dataloader
    return DataSpec(**dataloader) if isinstance(dataloader, dict) else DataSpec(dataloader)


def get_sampler(
    dataset: Dataset[object],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> DistributedSampler[object]:
    """Return a sampler for the share of this process, also where there is only one."""
    world = get_num_processes() if num_replicas is None else num_replicas
    return DistributedSampler(dataset, world, get_rank() if rank is None else rank, shuffle, drop_last=drop_last)


class Evaluator:
    """An evaluation set with a name."""

    def __init__(
        self,
        *,
        label: str,
        dataloader: object,
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: object = None,
        device_eval_microbatch_size: int | str | float | None = None,
    ):
        given = {
            "metric_names": metric_names,
            "subset_num_batches": None if subset_num_batches == -1 else subset_num_batches,
            "eval_interval": eval_interval,
            "device_eval_microbatch_size": device_eval_microbatch_size,
        }
        unused = [name for name, value in given.items() if value is not None]
        if unused:
            raise ConfigError(
                f"Evaluator({label!r}, {unused[0]}=...) is not supported: all evaluation sets share metrics, interval and limits. "
                "Give them to the Trainer, as metrics=, eval_interval= and eval_subset_num_batches=."
            )
        if not isinstance(label, str) or not label:
            raise ConfigTypeError(f"Evaluator(label={label!r}): expected a name, such as 'validation'.")
        self.label, self.dataloader = label, ensure_data_spec(dataloader)


def ensure_evaluator(evaluator: object, default_metric_names: Sequence[str] = ()) -> Evaluator:
    """Return an Evaluator as it is, or one called 'eval' around a loader."""
    return evaluator if isinstance(evaluator, Evaluator) else Evaluator(label="eval", dataloader=evaluator)


def ensure_tuple(x: object) -> tuple[object, ...]:
    """Return the items of a collection, or one value as a tuple; None has no items."""
    if x is None:
        return ()
    if isinstance(x, str | bytes | bytearray | torch.Tensor) or not isinstance(x, Iterable):
        return (x,)
    return tuple(x.values()) if isinstance(x, Mapping) else tuple(x)


def map_collection(collection: object, map_fn: Callable[[Any], object]) -> Any:
    """Apply a function to every leaf of nested lists, tuples and dicts, and keep their types."""
    if isinstance(collection, list | tuple | dict):
        return map_items(collection, lambda item: map_collection(item, map_fn))
    return map_fn(collection)


class LoggerDestination(Callback):
    """Receives what a run logs; define the methods you need, and give it to `Trainer(loggers=[...])`."""

    phase: Phase = "sink"

    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        """Receive named values."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        """Receive the settings of the run."""

    def log_images(self, images: object, name: str = "images", step: int | None = None) -> None:
        """Receive images."""


class InMemoryLogger(LoggerDestination):
    """Keeps every value with its step: `data["loss/train/total"]` is a list of `(step, value)`."""

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[int | None, object]]] = {}
        self.most_recent_values: dict[str, object] = {}
        self.hyperparameters: dict[str, object] = {}

    def log_metrics(self, metrics: Mapping[str, object], step: int | None = None) -> None:
        # Tensors stay where they are until they are read.
        for name, value in metrics.items():
            self.data.setdefault(name, []).append((step, value))
        self.most_recent_values.update(metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        self.hyperparameters.update(hyperparameters)


# Passes: an event's algorithms, arranged by name. The engine needs none of them: it sorts by what plugins declare. A pass takes
# `(algorithms, event)` and returns the algorithms in the order in which they run, from the list that the engine has sorted.

T = TypeVar("T")


def sort_to_front(list_to_sort: Sequence[T], cls: PluginReference) -> list[T]:
    """Return the list with instances of `cls` first, otherwise in the same order."""
    return sorted(list_to_sort, key=lambda item: not refers_to(cls, item))


def sort_to_back(list_to_sort: Sequence[T], cls: PluginReference) -> list[T]:
    """Return the list with instances of `cls` last, otherwise in the same order."""
    return sorted(list_to_sort, key=lambda item: refers_to(cls, item))


def sort_selective_backprop_first(algorithms: Sequence[T], event: Event) -> list[T]:
    """Let selective backprop choose samples before others change them."""
    return sort_to_front(algorithms, "SelectiveBackprop")


def sort_low_precision_layernorm_last(algorithms: Sequence[T], event: Event) -> list[T]:
    """Let low-precision norms replace layers after other surgery."""
    return sort_to_back(algorithms, "LowPrecisionLayerNorm")


def set_filo_order(algorithms: Sequence[T], event: Event) -> list[T]:
    """Reverse the list at every `after_*` and `*_end` event: first in, last out."""
    return list(reversed(algorithms)) if event.is_after_event else list(algorithms)


def warn_if_multiple_loss_interpolation(algorithms: Sequence[T], event: Event) -> list[T]:
    """Warn when more than one algorithm interpolates the loss."""
    several = [plugin_name(plugin) for plugin in algorithms if refers_to("#interpolates_loss", plugin)]
    if len(several) > 1:
        warn(f"{' and '.join(several)} all interpolate the loss at {event.name}; use one of them.")
    return list(algorithms)


# ALiBi for GPT-2 layers with attention in a method of their own.


def _attn(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the past with the penalty of `self.attention_bias`; in place of `GPT2Attention._attn`."""
    scores = query @ key.transpose(-1, -2) * value.shape[-1] ** -0.5
    queries, keys = scores.shape[-2:]
    past = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
    scores = scores + self.attention_bias(queries, keys, scores.dtype)
    scores = scores.masked_fill(~past, torch.finfo(scores.dtype).min)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = self.attn_dropout(scores.softmax(dim=-1).to(value.dtype))
    if head_mask is not None:
        weights = weights * head_mask
    return weights @ value, weights


def enlarge_mask(module: nn.Module, max_sequence_length: int) -> nn.Module:
    """Let the causal mask that a layer keeps as its buffer `bias`, if it does, cover longer sequences."""
    old = module._buffers.get("bias")
    if old is not None:
        mask = torch.ones(max_sequence_length, max_sequence_length, dtype=torch.bool, device=old.device).tril()
        module._buffers["bias"] = mask.to(old.dtype)[None, None]
    return module


def soft_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy for class indices or for one weight per class.

    The mean is over the weights of all targets, so that rows without any are ignored.
    """
    if infer_target_type(input, target) == "indices":
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction)
    if reduction not in ("sum", "mean", "none"):
        raise ConfigError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'.")
    target = ensure_targets_one_hot(input, target)
    losses = F.cross_entropy(input, target, weight, reduction="none")
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / target.sum()


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "sum",
    pos_weight: Tensor | None = None,
    scale_by_batch_size: bool = True,
) -> Tensor:
    """Return the binary cross entropy per class, also for class indices, divided by the number of samples."""
    target = ensure_targets_one_hot(input, target)
    loss = F.binary_cross_entropy_with_logits(input, target, weight, size_average, reduce, reduction, pos_weight)
    return loss / input.shape[0] if scale_by_batch_size else loss


loss_registry: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}


class ComposerModel(nn.Module):
    """A model that takes whole batches; give it to a Trainer without a loss function."""

    def forward(self, batch: Batch) -> Any:
        """Return the outputs for a batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward(self, batch).")

    def loss(self, outputs: Batch, batch: Batch, *args: object, **kwargs: object) -> Any:
        """Return the loss of outputs for their batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define loss(self, outputs, batch).")

    def eval_forward(self, batch: Batch, outputs: Batch = None) -> Any:
        """Return the outputs that metrics see."""
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, object]:
        """Return metrics by name, for training or for evaluation."""
        return {}

    def update_metric(self, batch: Batch, outputs: Batch, metric: Any) -> None:
        """Take a batch into one metric."""
        raise NotImplementedError(
            f"{type(self).__name__} has metrics but does not define update_metric(self, batch, outputs, metric)."
        )


class ComposerClassifier(ComposerModel):
    """A classifier around any module: batches are (inputs, targets), the metrics of torchmetrics are named after their classes."""

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        train_metrics: object = None,
        val_metrics: object = None,
        loss_fn: Callable[..., Tensor] = soft_cross_entropy,
    ):
        super().__init__()
        num_classes = num_classes if num_classes is not None else getattr(module, "num_classes", None)
        self.module, self.num_classes, self._loss_fn = module, num_classes, loss_fn
        self.train_metrics, self.val_metrics = self._named(train_metrics), self._named(val_metrics)

    def _named(self, metrics: object) -> dict[str, object]:
        if metrics is None:
            if self.num_classes is None:
                return {}
            try:
                from torchmetrics.classification import MulticlassAccuracy
            except ImportError as error:
                raise MissingExtra(
                    "ComposerClassifier(num_classes=...) measures the accuracy with torchmetrics, which is not installed: "
                    "pip install torchmetrics, or remove num_classes."
                ) from error
            metrics = MulticlassAccuracy(num_classes=self.num_classes, average="micro")
        if isinstance(metrics, Mapping):
            return dict(metrics)
        # A collection is a mapping of torch's kind, not of Python's.
        return dict(metrics.items()) if hasattr(metrics, "items") else {type(metrics).__name__: metrics}

    def forward(self, batch: Any) -> Batch:
        return self.module(batch[0])

    def loss(self, outputs: object, batch: Any, *args: object, **kwargs: object) -> Batch:
        return self._loss_fn(outputs, batch[1], *args, **kwargs)

    def get_metrics(self, is_train: bool = False) -> dict[str, object]:
        return self.train_metrics if is_train else self.val_metrics

    def update_metric(self, batch: Any, outputs: object, metric: Any) -> None:
        metric.update(outputs, batch[1])
