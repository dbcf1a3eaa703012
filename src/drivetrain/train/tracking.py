"""What a run tracks: its history (`run_history`), the running mean of the loss, and the best value of a metric.

A loss is a tensor on the device. Reading it synchronizes the host, so `LossTracker.update` only stores it: a few tensors are kept
in a ring, a full ring is added to one running sum on the device, and a number leaves the device when it is read. Memory is
constant over any number of steps, and an update costs about a microsecond.
"""

import copy
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from drivetrain.core.arguments import check_callable
from drivetrain.core.errors import BatchOutputError, ConfigError, warn
from drivetrain.core.types import StateDict
from drivetrain.module.accumulation import Count
from drivetrain.runtime.collectives import all_gather_values, broadcast_from_master
from drivetrain.runtime.device import wide_dtype
from drivetrain.runtime.ranks import data_group, data_rank, get_num_processes, num_data_ranks
from drivetrain.train.run_history import InMemoryRunHistory as InMemoryRunHistory
from drivetrain.train.run_history import RunHistory as RunHistory

if TYPE_CHECKING:
    from drivetrain.train.evaluation import EvaluationLoop


T = TypeVar("T")
_RING_SIZE = 64


class LossTracker:
    """The mean of a loss weighted by sample counts. It takes floats and device tensors; only reading synchronizes.

    >>> tracker = LossTracker()
    >>> tracker.update(torch.tensor(1.0), batch_size=3)
    >>> tracker.update(5.0)
    >>> tracker.average, tracker.total_loss, tracker.running_count, tracker.loss_value
    (2.0, 8.0, 4, 5.0)
    """

    def __init__(self) -> None:
        self.is_sum = False  # whether losses are sums, which add up to the loss of the whole
        self.leaves_out_nonfinite = False
        """Whether to ignore losses that are not finite, because their updates are skipped too."""
        self.reset()

    def reset(self) -> None:
        """Remove all losses."""
        self._ring: list[Tensor] = []
        self._weights: list[Count] = []
        self._sum = 0.0  # weighted losses that are already on the host
        self._device_sum: Tensor | None = None  # weighted losses that are not
        self._count: int | float = 0
        self._device_count: Tensor | None = None  # only where weights are tensors
        self._last: float | Tensor = 0.0
        self._known: float | None = None

    def update(self, loss_batch_value: float | Tensor, batch_size: int | float | Tensor = 1) -> None:
        """Add the mean loss of `batch_size` samples or other items. Nothing is read from a device.

        A loss that counts for nothing is ignored: the mean over no items is not a number.
        """
        loss = loss_batch_value
        if type(loss) is Tensor and loss.is_cpu and not loss.ndim:
            loss = loss.item()  # on the host already: nothing waits
        # Types first: `isinstance` of a tensor is slow.
        has_tensor = type(loss) is not float and isinstance(loss, Tensor)
        if not has_tensor and (type(batch_size) is int or not isinstance(batch_size, Tensor)):
            self._last = self._known = loss = float(loss)
            if batch_size and (not self.leaves_out_nonfinite or math.isfinite(loss)):
                self._sum += loss * batch_size
                self._count += batch_size
            return
        if not isinstance(loss, Tensor):
            assert isinstance(batch_size, Tensor)
            loss = batch_size.new_full((), loss, dtype=wide_dtype(batch_size.device))
        loss = loss.detach()
        if loss.ndim:
            loss = loss.mean() if loss.is_floating_point() else loss.to(wide_dtype(loss.device)).mean()
        self._last = loss
        if type(batch_size) is int and batch_size == 0:
            return
        self._ring.append(loss)
        self._weights.append(batch_size)
        if len(self._ring) >= _RING_SIZE:
            self._fold()

    @property
    def average(self) -> float:
        """The weighted mean of all losses, or their sum; NaN without any sample."""
        return _mean(self.total_loss, self.running_count, self.is_sum)

    def average_over_ranks(self) -> float:
        """Return the weighted mean over all ranks. Each rank must call this."""
        return reduce_means({"loss": self})["loss"]

    @property
    def total_loss(self) -> float:
        """The sum of all losses, each times its weight."""
        self._fold()
        if self._device_sum is not None:
            self._sum += float(self._device_sum)  # the host waits for the device here
            self._device_sum = None
        return self._sum

    @property
    def running_count(self) -> int | float:
        """The sum of all weights."""
        self._fold()
        if self._device_count is not None:
            count = float(self._device_count)  # the host waits for the device here
            self._count += int(count) if count.is_integer() else count
            self._device_count = None
        return self._count

    def unread_sums(self) -> tuple[Count, Count]:
        """Return the sums of losses and of weights. Those on a device are tensors, and nothing is read."""
        self._fold()
        total = self._sum if self._device_sum is None else self._device_sum + self._sum
        return total, self._count if self._device_count is None else self._device_count + self._count

    @property
    def loss_value(self) -> float:
        """The last loss."""
        self._known = float(self._last)  # the host waits for the device here
        return self._known

    @property
    def latest_known(self) -> float | None:
        """The last loss that the host knows without waiting, or None. A callback that reads a loss back may store it here."""
        if isinstance(self._last, Tensor) and self._last.device.type == "cpu":
            return float(self._last)
        return self._known

    @latest_known.setter
    def latest_known(self, value: float) -> None:
        self._known = value

    @property
    def unread(self) -> Tensor | None:
        """The last loss, if it is still on a device."""
        return self._last if isinstance(self._last, Tensor) and self._last.device.type != "cpu" else None

    def state_dict(self) -> dict[str, int | float]:
        """Return the sums, so that an interrupted epoch has the mean of all its batches."""
        return {"total_loss": self.total_loss, "running_count": self.running_count, "loss_value": self.loss_value}

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Continue from saved sums."""
        self.reset()
        self._sum, self._count, self._last = float(state["total_loss"]), state["running_count"], state["loss_value"]

    def _fold(self) -> None:
        """Add the waiting losses to the running sum with a few kernels, and without reading any of them."""
        if not self._ring:
            return
        ring, weights = self._ring, self._weights
        self._ring, self._weights = [], []
        device = ring[0].device
        if any(loss.device != device for loss in ring):
            ring = [loss.to(device) for loss in ring]
        dtype = wide_dtype(device)
        losses = torch.stack([loss.to(ring[0].dtype) for loss in ring]).to(dtype)
        if self.leaves_out_nonfinite:
            finite = torch.isfinite(losses)
            losses = torch.where(finite, losses, 0.0)
            weights = [_weight_tensor(weight, device, dtype) * kept for weight, kept in zip(weights, finite.unbind())]
        numbers = [weight for weight in weights if not isinstance(weight, Tensor)]
        if len(numbers) < len(weights):
            # A fill is a kernel with the number in it; a tensor made from a list would be copied, and the host would wait.
            counts = torch.stack([_weight_tensor(weight, device, dtype) for weight in weights])
            folded, counted = torch.where(counts > 0, losses * counts, 0.0).sum(), counts.sum()
            self._device_count = counted if self._device_count is None else self._device_count + counted
        else:
            self._count += sum(numbers)
            if all(number == numbers[0] for number in numbers):
                folded = losses.sum() * numbers[0]
            else:
                folded = torch.stack(torch._foreach_mul(losses.unbind(), list(map(float, numbers)))).sum()
        self._device_sum = folded if self._device_sum is None else self._device_sum.to(device) + folded


def reduce_means(trackers: Mapping[str, LossTracker]) -> dict[str, float]:
    """Return the means of several trackers over all ranks, with one exchange. Each rank must call this.

    A name that only some ranks know is averaged over those; without a sample anywhere the mean is nan.
    """
    sums = {name: (tracker.total_loss, tracker.running_count, tracker.is_sum) for name, tracker in trackers.items()}
    everywhere = of_data_ranks(sums)
    means = {}
    for name in dict.fromkeys(name for of_rank in everywhere for name in of_rank):
        total, count, is_sum = (
            sum(column) for column in zip(*(of_rank[name] for of_rank in everywhere if name in of_rank))
        )
        means[name] = _mean(total, count, bool(is_sum))
    return means


def _mean(total: float, count: int | float, is_sum: bool) -> float:
    if not count:
        return float("nan")
    return total if is_sum else total / count


def of_data_ranks(value: T) -> list[T]:
    """Return a plain value of each data rank, in order. Every rank must call this.

    Of ranks that share samples the first speaks, so that all ranks see the very same numbers and decide alike.
    """
    if get_num_processes() == 1:
        return [value]
    values: dict[int, T] = {}
    for rank, item in all_gather_values((data_rank(), value)):
        values.setdefault(rank, item)
    return [values[rank] for rank in range(num_data_ranks())]


def sum_over_ranks(values: list[Count], device: torch.device | str) -> list[Count]:
    """Sum numbers over the data ranks at once. Sums on a device are tensors that are not read."""
    place = torch.device(device)
    total = torch.stack([_weight_tensor(value, place, wide_dtype(place)) for value in values])
    torch.distributed.all_reduce(total, group=data_group())  # on an accelerator the host does not wait
    return total.tolist() if total.is_cpu else list(total.unbind())


def load_sums(tracker: LossTracker, ranks: Sequence[dict[str, int | float]]) -> None:
    """Give a tracker this data rank's saved sums. On another number of data ranks, the first takes them all."""
    tracker.reset()
    if len(ranks) == num_data_ranks():
        tracker.load_state_dict(ranks[data_rank()])
    elif data_rank() == 0:
        total, count = (sum(rank[name] for rank in ranks) for name in ("total_loss", "running_count"))
        tracker.load_state_dict({**ranks[0], "total_loss": total, "running_count": count})


def load_means(ranks: Sequence[Mapping[str, dict[str, int | float]]]) -> dict[str, LossTracker]:
    """Return trackers by name with the sums that data ranks have saved. A rank may not know all names."""
    means = {name: LossTracker() for name in sorted({name for of_rank in ranks for name in of_rank})}
    for name, mean in means.items():
        nothing = mean.state_dict()
        load_sums(mean, [of_rank.get(name, nothing) for of_rank in ranks])
    return means


def _weight_tensor(weight: int | float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.detach().to(device=device, dtype=dtype).reshape(())
    return torch.full((), weight, device=device, dtype=dtype)


class MetricWatch:
    """Reads a metric once per recorded value and keeps the best. NaN is never the best."""

    def __init__(self, metric: str, greater_is_better: bool):
        self.metric, self.greater_is_better = metric, greater_is_better
        self.best: float | None = None
        inside_epoch = re.sub("eval_(.+)_epoch$", r"intermediate_eval_\1", metric)
        self._names = tuple(dict.fromkeys((metric, inside_epoch)))
        self._num_seen: dict[str, int] = {}
        self._restored: dict[str, int] = {}  # the same of the checkpoint, until the resumed run starts

    def start(self, history: RunHistory, forget: bool) -> None:
        """Start a run: values recorded before it are not new, but for those that a restored history has and nobody has read."""
        counts = {name: history._num_values(name) for name in self._names}
        restored, self._restored = self._restored if hasattr(history, "load_state_dict") else {}, {}
        self._num_seen = {name: min(count, restored.get(name, count)) for name, count in counts.items()}
        if forget:
            self.best = None

    def new_value(self, trainer: "EvaluationLoop", inside_epoch: bool = False) -> float | None:
        """Return the value recorded since the last call, or None. A metric that will never be recorded is a ValueError.

        Where `eval_interval` evaluates inside epochs, a metric such as `eval_loss_epoch` has those values too.
        """
        history, value = trainer.run_history, None
        names = self._names if trainer.evaluates_inside_epochs else self._names[:1]
        recorded = [name for name in names if name in history.get_metric_names()]
        if not recorded and not inside_epoch and not _awaits_first_evaluation(trainer, self.metric):
            history.get_latest_metric(self.metric)  # raises, with the recorded names
        for name in recorded:
            count = history._num_values(name)
            if count != self._num_seen.get(name, 0):
                self._num_seen[name], value = count, float(history.get_latest_metric(name))
        return value

    def agreed_value(self, trainer: "EvaluationLoop", inside_epoch: bool = False) -> float | None:
        """Return rank 0's `new_value` on every rank, for actions that all ranks take together. Every rank must call this."""
        value = failure = None
        try:
            value = self.new_value(trainer, inside_epoch)
        except ValueError as error:
            failure = error
        value, problem = broadcast_from_master((value, None if failure is None else str(failure)))
        if problem is not None:
            raise failure or ValueError(problem)
        return value

    def improvement(self, value: float) -> float:
        """Return by how much a value beats the best: inf if there is none yet, NaN for a NaN."""
        if math.isnan(value):
            return math.nan
        if self.best is None:
            return math.inf
        return value - self.best if self.greater_is_better else self.best - value

    def state_dict(self) -> StateDict:
        """Return the best value, and how many were read."""
        return {"best": self.best, "seen": dict(self._num_seen)}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore them."""
        self.best, self._restored = state["best"], state.get("seen", {})


def _awaits_first_evaluation(trainer: "EvaluationLoop", metric: str) -> bool:
    """Whether a metric may be missing only because the first evaluation has not been due yet."""
    if trainer.run.data.evaluation is None or metric.startswith("train"):
        return False
    names = trainer.run_history.get_metric_names()
    if "intermediate_eval_" in metric:
        may_come = trainer.evaluates_inside_epochs or any(
            hasattr(callback, "eval_every_n_steps") for callback in trainer.callback_handler
        )
        return may_come and not any(name.startswith("intermediate_eval_") for name in names)
    return not any(name.startswith("eval_") for name in names)


# ---------------------------------------------------------------------- metrics
# Kept on the device per batch, reduced over all ranks once at the end. A `torchmetrics` metric keeps its own state and knows how to join
# ranks; it can only exist where the user has imported torchmetrics, so that is not imported here. A plain function `f(outputs, targets)`
# returns the mean over a batch, and batches are weighted by their size.

PlainMetric = Callable[..., Tensor | float]


class MetricSet:
    """The metrics of one phase, by name. An empty set costs nothing.

    >>> metrics = MetricSet({"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()})
    >>> metrics.update(torch.eye(3), torch.tensor([0, 1, 1]), batch_size=3)
    >>> round(metrics.compute()["accuracy"], 4)
    0.6667
    """

    def __init__(self, metrics: object = None, *, argument: str = "metrics", other: "MetricSet | None" = None):
        self._stateful: dict[str, Any] = {}  # torchmetrics metrics; a collection has the name ""
        self._plain: dict[str, PlainMetric] = {}
        self._means: dict[str, LossTracker] = {}
        if metrics is None:
            return
        shared = {id(part) for metric in (other._stateful.values() if other else ()) for part in metric.modules()}
        if _is_torchmetrics(metrics, "MetricCollection"):
            self._stateful[""] = _apart(metrics, shared)
            return
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{argument}={metrics!r}: expected {{name: metric}} or a torchmetrics.MetricCollection. For one "
                f"metric write {argument}={{'accuracy': ...}}."
            )
        for name, metric in metrics.items():
            if _is_torchmetrics(metric, "Metric") or _is_torchmetrics(metric, "MetricCollection"):
                self._stateful[str(name)] = _apart(metric, shared)
            else:
                check_callable(
                    f"{argument}[{name!r}]", metric, "a function of (outputs, targets), or a torchmetrics.Metric", 2
                )
                self._plain[str(name)] = metric
                self._means[str(name)] = LossTracker()

    def __bool__(self) -> bool:
        return bool(self._stateful or self._plain)

    def to(self, device: torch.device | str) -> "MetricSet":
        """Move the state of stateful metrics."""
        for metric in self._stateful.values():
            metric.to(device)
        return self

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self._stateful.values():
            metric.reset()
        for mean in self._means.values():
            mean.reset()

    @torch.no_grad()
    def update(self, outputs: object, targets: object, batch_size: int) -> None:
        """Add a batch."""
        for name, metric in self._stateful.items():  # noqa: B007 -- the note of an error names it
            metric.update(outputs, targets)
        for name, function in self._plain.items():
            value = function(outputs, targets)
            if not isinstance(value, Tensor | Real) and getattr(value, "ndim", None) != 0:
                raise BatchOutputError(
                    f"the metric {name!r} returned a {type(value).__name__}, expected a number: the mean over the batch, as a tensor or "
                    "a float. For several numbers write several metrics, or use torchmetrics."
                )
            self._means[name].update(value, batch_size)

    def join(self, group: object) -> None:
        """Combine torchmetrics only over the ranks of a process group."""
        for metric in self._single_metrics():
            metric.process_group = group

    def _single_metrics(self) -> Iterator[Any]:
        """Yield every metric of torchmetrics, also those in collections and wrappers."""
        for metric in self._stateful.values():
            if isinstance(metric, nn.ModuleDict):  # a collection
                metric.values()  # gives metrics that share a state each their own
            yield from (part for part in metric.modules() if _is_torchmetrics(part, "Metric"))

    def state_dict(self) -> StateDict:
        """Return what this rank has collected."""
        states = [{**metric.metric_state, "_update_count": metric._update_count} for metric in self._single_metrics()]
        return {"means": {name: mean.state_dict() for name, mean in self._means.items()}, "states": states}

    def load_state_dict(self, ranks: Sequence[StateDict]) -> None:
        """Continue with what each data rank had collected."""
        self.reset()
        means = load_means([of_rank["means"] for of_rank in ranks])
        self._means.update({name: mean for name, mean in means.items() if name in self._means})
        if self._stateful and len(ranks) != num_data_ranks():
            warn(
                "the run continues on another number of processes: torchmetrics of this epoch count only the rest of it."
            )
            return
        for metric, saved in zip(self._single_metrics(), ranks[data_rank()]["states"] if self._stateful else ()):
            for name, value in saved.items():
                setattr(metric, name, value)

    def compute(self) -> dict[str, float]:
        """Return every metric over all batches of all ranks. Each rank must call this."""
        values: dict[str, float] = {}
        for name, metric in self._stateful.items():
            _flatten(name, metric.compute(), values)
        values.update(reduce_means(self._means))
        return values


def _apart(metric: nn.Module, shared: set[int]) -> nn.Module:
    """Return a copy of a metric that another set uses too: each phase needs a state of its own."""
    return metric if shared.isdisjoint(map(id, metric.modules())) else copy.deepcopy(metric)


def _is_torchmetrics(value: object, kind: str) -> TypeGuard[nn.Module]:
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
