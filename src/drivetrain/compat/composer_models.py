"""Composer's models: modules that take a whole batch, and compute their loss and metrics from it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.context.batch import check_for_index_targets, ensure_targets_one_hot, infer_target_type
from drivetrain.core.errors import ConfigError, MissingExtra
from drivetrain.core.types import Batch


def soft_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy for class indices or for one weight per class."""
    if infer_target_type(input, target) == "indices":
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction)
    if reduction not in ("sum", "mean", "none"):
        raise ConfigError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'.")
    losses = F.cross_entropy(input, target, weight, reduction="none")
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / input.shape[0]


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
    scale_by_batch_size: bool = True,
) -> Tensor:
    """Return the binary cross entropy per class, also for class indices; the mean is over samples, not over classes."""
    if check_for_index_targets(target):
        target = ensure_targets_one_hot(input, target)
    scaled = scale_by_batch_size and reduction == "mean"
    loss = F.binary_cross_entropy_with_logits(
        input, target, weight, size_average, reduce, "sum" if scaled else reduction, pos_weight
    )
    return loss / input.shape[0] if scaled else loss


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
        """Return the outputs of the module for the inputs of a batch."""
        return self.module(batch[0])

    def loss(self, outputs: object, batch: Any, *args: object, **kwargs: object) -> Batch:
        """Return the loss of outputs for the targets of a batch."""
        return self._loss_fn(outputs, batch[1], *args, **kwargs)

    def get_metrics(self, is_train: bool = False) -> dict[str, object]:
        """Return the metrics of training or of evaluation."""
        return self.train_metrics if is_train else self.val_metrics

    def update_metric(self, batch: Any, outputs: object, metric: Any) -> None:
        """Compare the outputs with the targets of a batch."""
        metric.update(outputs, batch[1])
