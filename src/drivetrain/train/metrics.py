"""Metrics of an evaluation or a training epoch: kept on the device per batch, reduced over all ranks once at the end.

Two kinds are understood. A `torchmetrics` metric keeps its own state and knows how to join ranks. A plain function
`f(outputs, targets)` returns the mean over a batch; batches are weighted by their size, so a smaller last batch
counts for what it is. `torchmetrics` is never imported here: a metric of its kind can only exist where the user has
imported it.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError
from drivetrain.train.batches import slice_rows
from drivetrain.train.tracking import LossTracker, reduce_means

PlainMetric = Callable[[Any, Any], Tensor | float]


class MetricSet:
    """The metrics of one phase, by name; an empty one costs nothing.

    >>> metrics = MetricSet({"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()})
    >>> metrics.update(torch.eye(3), torch.tensor([0, 1, 1]), batch_size=3)
    >>> round(metrics.compute()["accuracy"], 4)
    0.6667
    """

    def __init__(self, metrics: object = None, *, argument: str = "metrics"):
        self._stateful: dict[str, Any] = {}  # torchmetrics metrics; a collection has the name ""
        self._plain: dict[str, PlainMetric] = {}
        self._means: dict[str, LossTracker] = {}
        if metrics is None:
            return
        if _is_torchmetrics(metrics, "MetricCollection"):
            self._stateful[""] = metrics
            return
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{argument}={metrics!r}: expected {{name: metric}} or a torchmetrics.MetricCollection. For one "
                f"metric write {argument}={{'accuracy': ...}}."
            )
        for name, metric in metrics.items():
            if _is_torchmetrics(metric, "Metric") or _is_torchmetrics(metric, "MetricCollection"):
                self._stateful[str(name)] = metric
            elif callable(metric) and not isinstance(metric, type):
                self._plain[str(name)] = metric
                self._means[str(name)] = LossTracker()
            else:
                made = " Give an instance, not the class." if isinstance(metric, type) else ""
                raise ConfigError(
                    f"{argument}[{name!r}]={metric!r}: expected a torchmetrics.Metric or a function of (outputs, "
                    f"targets).{made}"
                )

    def __bool__(self) -> bool:
        return bool(self._stateful or self._plain)

    def to(self, device: torch.device | str) -> "MetricSet":
        """Move the state of stateful metrics."""
        for metric in self._stateful.values():
            metric.to(device)
        return self

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self._stateful.values():
            metric.reset()
        for mean in self._means.values():
            mean.reset()

    @torch.no_grad()
    def update(self, outputs: object, targets: object, batch_size: int, num_real: int | None = None) -> None:
        """Take in a batch; only its first `num_real` rows count where the rest is padding."""
        if num_real is not None and num_real < batch_size:
            if num_real == 0:
                return
            outputs, targets = (slice_rows(value, 0, num_real, batch_size) for value in (outputs, targets))
            batch_size = num_real
        for metric in self._stateful.values():
            metric.update(outputs, targets)
        for name, function in self._plain.items():
            self._means[name].update(function(outputs, targets), batch_size)

    def join(self, group: object) -> None:
        """Combine metrics of torchmetrics over the ranks of a process group only."""
        for metric in self._stateful.values():
            for single in metric.values() if _is_torchmetrics(metric, "MetricCollection") else [metric]:
                single.process_group = group

    def compute(self) -> dict[str, float]:
        """Return every metric over all batches of all ranks; each rank must call this."""
        values: dict[str, float] = {}
        for name, metric in self._stateful.items():
            _flatten(name, metric.compute(), values)
        values.update(reduce_means(self._means))
        return values


def _is_torchmetrics(value: object, kind: str) -> bool:
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, getattr(library, kind))


def _flatten(name: str, value: Any, into: dict[str, float]) -> None:
    """Store a result under its name; a mapping or a vector becomes one entry for each of its values."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(f"{name}_{key}" if name else str(key), item, into)
    elif isinstance(value, Tensor) and value.numel() != 1:
        for index, item in enumerate(value.flatten().tolist()):
            into[f"{name}_{index}"] = item
    else:
        into[name] = float(value)  # the host waits for the device here
