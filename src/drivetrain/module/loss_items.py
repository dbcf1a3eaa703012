"""What a loss is a mean over: samples, labels that are not ignored, weights of classes, elements; or whether it is a sum.

Gradients of parts of a batch can be joined to those of the whole batch only when it is known how much each part counts. `LossWatch`
follows one call of model and loss: it sees which function reduced the loss, and which entry of the batch the labels came from, shifted or
not. The result is a `LossItems`, which counts every later batch from its labels alone, on their device. What the watch cannot follow
(a custom kernel, labels changed on the way, a sum of losses that count differently) is unknown, never guessed.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.module.accumulation import Count
from drivetrain.module.probing import tensors_in, use_copied_buffers
from drivetrain.runtime.device import wide_dtype
from drivetrain.runtime.seeds import capture_rng, restore_rng

Kind = Literal["samples", "labels", "elements", "sum", "unknown"]
Path = tuple[Any, ...]
Cut = tuple[int | None, int | None]
ALL: Cut = (None, None)

_RESHAPES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "swapaxes"})
_COPIES = frozenset({"contiguous", "to", "long", "int", "clone", "detach", "cuda", "cpu", "view_as", "type"})
_SCALINGS = frozenset({"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide", "true_divide"})
_SUMS = frozenset({"add", "__add__", "__radd__"})
_VALUES = frozenset({"float", "double", "half", "bfloat16", "squeeze", "reshape", "view", "neg", "__neg__", *_COPIES})
"""What may be done to a loss without changing what it is a mean over."""
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_ELEMENTWISE = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div,
    F.soft_margin_loss, F.poisson_nll_loss, F.gaussian_nll_loss, F.hinge_embedding_loss,
)  # fmt: skip
_PER_SAMPLE = (
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.cosine_embedding_loss, F.margin_ranking_loss,
    F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
)  # fmt: skip
_SUMMED_WEIGHTS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)  # with weights, these divide by their sum
_TARGETS = ("labels", "label", "targets", "target", "y", 1)  # where a batch may hold its targets


@dataclass(frozen=True, kw_only=True, eq=False)
class LossItems:
    """How much one loss counts, found on one batch and applied to all.

    >>> labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    >>> LossItems(kind="labels", path=("labels",), cut=(1, None)).count({"labels": labels})
    1
    """

    kind: Kind
    path: Path = ()
    """Where the labels are in a batch."""
    cut: Cut = ALL
    """From where to where the last dimension's labels are used: `(1, None)` where they are shifted."""
    ignore_index: int = -100
    weight: Tensor | None = None
    """A weight for each class, over whose sum the mean is taken."""
    is_one_per_row: bool = False
    """Whether each sample has one label, so that without ignored ones this is a mean over samples."""

    @property
    def needs_count(self) -> bool:
        """Whether the number of samples is not enough."""
        return self.kind in ("labels", "elements")

    def same_as(self, other: "LossItems") -> bool:
        """Return whether two losses count in the same way."""
        weights = [None if w is None else (_storage(w), w.shape) for w in (self.weight, other.weight)]
        return weights[0] == weights[1] and vars(self) | {"weight": None} == vars(other) | {"weight": None}

    def count(self, batch: object) -> Count:
        """Return how many items a batch has: a number for labels on the host, else a tensor on their device, which is not read."""
        labels = entry_of(batch, self.path)
        if self.cut is not ALL:
            labels = labels[..., slice(*self.cut)]
        if self.kind == "elements":
            return int(labels.numel())
        if self.weight is not None:
            weight = self.weight if self.weight.device == labels.device else self.weight.to(labels.device)
            kept = labels != self.ignore_index
            total = (weight.to(wide_dtype(labels.device))[torch.where(kept, labels, 0)] * kept).sum()
            return total.item() if total.is_cpu else total
        if not labels.is_cpu:
            return torch.count_nonzero(labels != self.ignore_index)
        if self.ignore_index < 0 and labels.numel() and labels.min().item() >= 0:  # the common case, at half the cost
            return int(labels.numel())
        return int(torch.count_nonzero(labels != self.ignore_index).item())


SAMPLES = LossItems(kind="samples")
SUM = LossItems(kind="sum")
UNKNOWN = LossItems(kind="unknown")
DIVIDED_SUM = LossItems(kind="unknown")
"""A sum over a number that is neither that of its samples nor that of its elements: a sum, if the number is the same for all batches."""


@dataclass(frozen=True)
class _Labels:
    """A tensor with the entries of a batch's entry, perhaps cut, padded at the end or reshaped."""

    path: Path
    ndim: int
    cut: Cut = ALL
    padding: float | None = None
    is_reshaped: bool = False


_active: "LossWatch | None" = None


def active_watch() -> "LossWatch | None":
    """Return the active watch, for losses that are computed without torch's own functions."""
    return _active


class LossWatch(TorchFunctionMode):
    """Follows the labels of a batch to the loss while it is active.

    >>> batch = {"x": torch.randn(2, 3, 5), "labels": torch.tensor([[1, 2, -100], [3, 0, 4]])}
    >>> watch = LossWatch(batch, rows=2)
    >>> with watch:
    ...     loss = F.cross_entropy(batch["x"][:, :-1].reshape(-1, 5), batch["labels"][:, 1:].reshape(-1))
    >>> watch.items_of(loss).count(batch)
    3
    """

    def __init__(self, batch: object, rows: int):
        super().__init__()
        self.rows = rows
        leaves = list(_leaves(batch))
        self._entries = [(path, value) for path, value in leaves if isinstance(value, Tensor) and value.ndim]
        self._numbers = {id(value) for path, value in leaves if path and path[-1] == "num_items_in_batch"}
        # Weak, by identity: the watch keeps no activation alive.
        self._labels: MutableMapping[Tensor, _Labels] = WeakIdKeyDictionary(
            {tensor: _Labels(path, tensor.ndim) for path, tensor in self._entries}
        )
        self._losses: MutableMapping[Tensor, LossItems] = WeakIdKeyDictionary()
        self._sizes: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # of sums, how many elements they have
        self._picked: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # their sizes depend on values
        self.factors: list[object] = []
        """The numbers that losses were multiplied with or divided by."""

    def items_of(self, loss: object) -> LossItems:
        """Return what a loss, computed while the watch was active, is a mean over."""
        if not isinstance(loss, Tensor):
            return UNKNOWN
        return self._losses.get(loss, UNKNOWN)

    def note(self, loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> None:
        """Record a cross entropy that was computed without torch's own function."""
        self._keep(loss, self._classes(target, None, ignore_index, reduction))

    def _keep(self, loss: Tensor, items: LossItems | None) -> None:
        if items is not None:
            self._losses[loss] = items

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        try:
            self._follow(func, args, kwargs or {}, result)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            if isinstance(result, Tensor):  # a kind of tensor or of call that cannot be followed
                self._losses[result] = UNKNOWN
        return result

    def __enter__(self) -> "LossWatch":
        global _active
        _active = self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        _active = None
        super().__exit__(*error)

    def _follow(self, func: object, args: tuple[object, ...], kwargs: dict[str, Any], result: object) -> None:
        """Note where a function's result comes from, where that matters."""
        name = getattr(func, "__name__", "")
        tensors = tensors_in((args, kwargs))
        if name == "__setitem__" or any(tensor is result for tensor in tensors):
            if name not in _RESHAPES and name not in _VALUES:
                self._forget(tensors[0])  # written to in place
            return
        if not isinstance(result, Tensor):
            return
        if func in _OF_CLASSES or func in _ELEMENTWISE or func in _PER_SAMPLE or func is F.ctc_loss:
            self._keep(result, self._of_loss(func, args, kwargs))
        elif any(tensor in self._losses for tensor in tensors):
            self._keep(result, self._combined(name, args, tensors))
        elif tensors and tensors[0] in self._labels:
            moved = self._moved(name, self._labels[tensors[0]], args, kwargs)
            if moved is not None:
                self._labels[result] = moved
        if result.ndim == 0 and name in ("mean", "sum") and tensors and result not in self._losses:
            self._keep(result, self._reduced(name, tensors[0], result))
        is_picking = name in ("masked_select", "nonzero") or (name == "__getitem__" and _is_masked(args[1]))
        if is_picking or any(tensor in self._picked for tensor in tensors):
            self._picked[result] = True

    def _forget(self, changed: Tensor) -> None:
        """Drop what is known of a tensor that was written to, and of all that share its memory."""
        if changed in self._losses:
            self._losses[changed] = UNKNOWN
        place = _storage(changed)
        for tensor in [tensor for tensor in self._labels if _storage(tensor) == place]:
            del self._labels[tensor]

    def _moved(self, name: str, labels: _Labels, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Labels | None:
        """Return where the entries of a function's result come from, or None where that is not plain."""
        if name in _COPIES:
            return labels
        if name in _RESHAPES:
            return replace(labels, is_reshaped=True)
        if name == "pad":
            given = _arguments(F.pad, args, kwargs) or {}
            sizes, value = tuple(given["pad"]), given["value"]
            is_plain = len(sizes) == 2 and sizes[0] == 0 and given["mode"] == "constant"
            if is_plain and not labels.is_reshaped and labels.cut[1] is None and labels.padding is None:
                return replace(labels, padding=0.0 if value is None else float(value))
        if name == "__getitem__" and not labels.is_reshaped and labels.cut is ALL:
            cut = _last_cut(args[1], args[0].ndim)
            if cut is not None and (labels.padding is None or (cut[1] is None and (cut[0] or 0) >= 0)):
                return replace(labels, cut=cut)
        return None

    def _of_loss(self, func: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> LossItems | None:
        """Return what the result of one of torch's loss functions counts."""
        given = _arguments(func, args, kwargs)
        if given is None or (func in _SUMMED_WEIGHTS and given.get("weight") is not None):
            return UNKNOWN
        first = next(value for value in given.values() if isinstance(value, Tensor))
        target, reduction = given.get("target", first), given["reduction"]
        if func in _OF_CLASSES and not target.is_floating_point():
            return self._classes(target, given["weight"], given["ignore_index"], reduction)
        if reduction not in ("mean", "batchmean"):
            return SUM if reduction == "sum" else None
        if func in _OF_CLASSES:  # probabilities of classes: a mean over everything but those
            return self._of_size(target.numel() // target.shape[1 if target.ndim > 1 else 0])
        if func is F.ctc_loss:
            return self._of_size(first.shape[1] if first.ndim == 3 else 1)
        if func in _PER_SAMPLE or reduction == "batchmean":
            return self._of_size(first.shape[0] if first.ndim else 1)
        return self._of_size(torch.broadcast_shapes(first.shape, target.shape).numel())

    def _classes(self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> LossItems | None:
        if reduction != "mean":
            return SUM if reduction == "sum" else None
        labels = self._labels.get(target)
        if labels is None or (labels.padding is not None and labels.padding != ignore_index):
            return UNKNOWN
        return LossItems(
            kind="labels", path=labels.path, cut=labels.cut, ignore_index=ignore_index,
            weight=None if weight is None else weight.detach(), is_one_per_row=labels.ndim == 1 and weight is None,
        )  # fmt: skip

    def _reduced(self, name: str, whole: Tensor, result: Tensor) -> LossItems:
        """Return what the mean or the sum of a whole tensor counts."""
        if whole in self._picked:
            return UNKNOWN
        if name == "mean":
            return self._of_size(whole.numel())
        self._sizes[result] = whole.numel()
        return SUM if self.rows and whole.numel() % self.rows == 0 else UNKNOWN

    def _of_size(self, size: int) -> LossItems:
        """Return what a mean over so many elements is a mean over, in terms of the batch."""
        if size == self.rows:
            return SAMPLES
        for path, tensor in sorted(self._entries, key=lambda entry: not entry[0] or entry[0][0] not in _TARGETS):
            if tensor.numel() == size:
                return LossItems(kind="elements", path=path)
        # So many for each row: as long as rows keep their shape, that is a mean over samples.
        return SAMPLES if size % max(1, self.rows) == 0 else UNKNOWN

    def _combined(self, name: str, args: tuple[object, ...], tensors: list[Tensor]) -> LossItems:
        """Return what a function of losses counts."""
        found = [self._losses.get(tensor, UNKNOWN) for tensor in tensors]
        first = found[0]
        if len(found) == 1:
            is_itself = name in ("mean", "sum", "__pos__") and tensors[0].ndim == 0
            if is_itself or name in _VALUES or (name in _SUMS and first.kind != "sum"):
                return first
            if name in _SCALINGS:
                return self._scaled(name, args, tensors[0], first)
            return UNKNOWN
        if name in _SCALINGS and len(found) == 2 and first is SUM and id(tensors[1]) in self._numbers:
            return SUM
        if name in _SUMS and len(found) == 2:
            return _added(first, found[1])
        return UNKNOWN

    def _scaled(self, name: str, args: tuple[Any, ...], tensor: Tensor, items: LossItems) -> LossItems:
        """Return what a loss times or over a number counts: a sum over the number of its elements is a mean."""
        is_division = "div" in name
        number = next((value for value in args if not isinstance(value, Tensor)), None)
        if items.kind != "sum" or not is_division:
            self.factors.append(number)
            return items
        if id(number) in self._numbers:
            return SUM
        if number is None:  # given by keyword
            return UNKNOWN
        if number == self.rows:
            return SAMPLES
        if number == self._sizes.get(tensor):
            return self._of_size(self._sizes[tensor])
        self.factors.append(number)
        return DIVIDED_SUM


FollowedLoss = tuple[LossItems, list[object]]
"""What a loss is a mean over, and the numbers it was multiplied with or divided by."""


def follow_loss(model: nn.Module, batch: object, rows: int, compute: Callable[[], object]) -> FollowedLoss:
    """Follow the loss that `compute` returns for a batch, without lasting changes; code that fails gives nothing to follow."""
    watch, generators = LossWatch(batch, rows), capture_rng()
    try:
        with torch.no_grad(), use_copied_buffers(model), watch:
            loss = compute()
        return watch.items_of(loss), watch.factors
    except Exception:  # whatever a model raises here, it raises again in the first step, where it can be seen
        return UNKNOWN, []
    finally:
        restore_rng(generators)


def agreed_items(first: FollowedLoss, second: FollowedLoss) -> LossItems:
    """Return what `follow_loss` found in two batches of different size, or `UNKNOWN` if a factor depends on the batch."""
    (items, factors), (others, other_factors) = first, second
    if factors != other_factors:
        return UNKNOWN
    if items is DIVIDED_SUM and others is DIVIDED_SUM:
        return SUM
    return items if items.same_as(others) else UNKNOWN


def without_empty(loss: Tensor, items: Count) -> Tensor:
    """Return a loss that is zero where it is a mean over nothing (NaN), because it has no weight in the whole."""
    if isinstance(items, Tensor):
        return torch.where(items > 0, loss, torch.zeros_like(loss))
    return loss if items else torch.nan_to_num(loss, nan=0.0)


def _added(first: LossItems, second: LossItems) -> LossItems:
    """Return what the sum of two losses counts."""
    if "unknown" in (first.kind, second.kind):
        return first if first is second else UNKNOWN
    if first.same_as(second):
        return first
    is_by_row = [items.kind in ("samples", "elements") or items.is_one_per_row for items in (first, second)]
    return SAMPLES if all(is_by_row) else UNKNOWN


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return a loss function's arguments by name, or None for forms that torch has given up."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    is_old = any(given.arguments.get(name) is not None for name in ("size_average", "reduce"))
    return None if is_old else dict(given.arguments)


def _last_cut(index: object, ndim: int) -> Cut | None:
    """Return which part of the last dimension an index takes, all others whole; None for any other index."""
    parts = index if isinstance(index, tuple) else (index,)
    *others, last = parts
    if not isinstance(last, slice) or last.step is not None:
        return None
    if not all(end is None or isinstance(end, int) for end in (last.start, last.stop)):
        return None
    reaches_last = len(parts) == ndim or (others and others[0] is Ellipsis)
    is_whole = all(part is Ellipsis or part == slice(None) for part in others)
    return (last.start, last.stop) if reaches_last and is_whole else None


def _is_masked(index: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # tensors without memory of their own
        return id(tensor)


def _leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    if isinstance(value, tuple | list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, (*path, key))


def entry_of(batch: Any, path: Path) -> Tensor:
    """Return the entry of a nested batch at a path."""
    for key in path:
        batch = batch[key]
    return batch
