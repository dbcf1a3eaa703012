"""Keep the logits of a large vocabulary split over ranks, from the head to the loss (Shoeybi et al., 2019, arXiv 1909.08053).

While the model trains, a column-wise head returns a distributed tensor: each rank holds the logits of its share of the words.
`F.cross_entropy` of it exchanges three numbers a token instead of all logits, whether the loss is computed inside the model or by a loss
function. Shapes may be changed and rows taken on the way; anything else gathers the logits first, so that a loss is right whatever it
does. In evaluation the head returns ordinary logits.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from drivetrain.module.chunked_loss import mean_of_kept
from drivetrain.module.distributed_tensors import is_dtensor
from drivetrain.module.loss_items import active_watch
from drivetrain.module.wrapping import GeneratedClass, add_mixin

_MARK = "_is_split_vocabulary"
_KEEPING = frozenset({"flatten", "view", "reshape", "float", "contiguous", "__getitem__"})
"""Functions that leave words next to one another, so that their result is split the same way."""
_LOOKING = frozenset({"size", "dim", "__get__", "is_floating_point", "numel"})


class SplitLogits(TorchFunctionMode):
    """Computes cross entropies of split logits, and gathers the logits for any other operation."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        values = [*args, *kwargs.values()]
        values += [item for value in values if isinstance(value, list | tuple) for item in value]  # torch.cat([...])
        if not any(getattr(value, _MARK, False) for value in values):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _LOOKING:
            return func(*args, **kwargs)
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        elif name in _KEEPING and (kept := _kept(func, args, kwargs)) is not None:
            return kept
        args, kwargs = tree_map_only(Tensor, gathered, (args, kwargs))
        return func(*args, **kwargs)


class SplitLogitsModel(GeneratedClass):
    """Makes a model's own forward, including its loss if it has one, accept split logits."""

    def forward(self, *args: object, **kwargs: object) -> object:
        if not self.training:  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with SplitLogits():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def enable_split_logits(model: nn.Module, head: nn.Module) -> None:
    """Make a head return a distributed tensor in training only, and its model compute with it."""
    head.register_forward_hook(_leave)
    add_mixin(model, SplitLogitsModel)


def _leave(head: nn.Module, args: object, out: Any) -> object:
    return _marked(out) if head.training else out.full_tensor()


def wrap_loss_for_split_logits(loss_func: Callable[..., object]) -> Callable[..., object]:
    """Return a loss function that accepts split logits."""

    def loss_of_split_logits(*args: object) -> object:
        args = tree_map_only(Tensor, _marked, args)
        with SplitLogits():
            return loss_func(*args)

    return loss_of_split_logits


def gathered(value: Any) -> object:
    """Return split logits gathered, and everything else unchanged."""
    return value.full_tensor() if getattr(value, _MARK, False) else value


def _marked(value: Any) -> Any:
    if is_dtensor(value) and len(value.placements) == 1 and value.placements[0].is_shard(value.ndim - 1):
        setattr(value, _MARK, True)
    return value


def _kept(func: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> object:
    """Return what a function of shapes makes of split logits, or None where it does not leave them split by words."""
    whole = args[0]
    try:
        out = _marked(func(*args, **kwargs))
    except (RuntimeError, NotImplementedError):  # a layout that distributed tensors cannot have
        return None
    is_same = getattr(out, _MARK, False) and out.shape[-1] == whole.shape[-1]
    return out if is_same else None


def _cross_entropy(*args: object, **kwargs: object) -> Tensor | None:
    """Return the loss of split logits of (rows, words) and one word a row, or None for anything more."""
    bound = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    logits, target = given["input"], given["target"]
    is_known = given["reduction"] in ("mean", "sum", "none")
    is_plain = is_known and given["weight"] is None and given["label_smoothing"] == 0
    if logits.ndim != 2 or target.ndim != 1 or target.is_floating_point() or not is_plain:
        return None
    local = logits.to_local()
    group = logits.device_mesh.get_group()
    first = group.rank() * local.shape[1]
    losses: Tensor = _RowLosses.apply(local, target, first, given["ignore_index"], group)
    if given["reduction"] == "none":
        return losses
    loss = losses.sum()
    if given["reduction"] == "mean":
        loss = mean_of_kept(loss, target != given["ignore_index"])
    if (watch := active_watch()) is not None:
        watch.note(loss, target, given["ignore_index"], given["reduction"])
    return loss


class _RowLosses(torch.autograd.Function):
    """The cross entropy of each row, of which every rank holds some words."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, ignored: int, group: dist.ProcessGroup) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        largest = wide.max(1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponents = torch.exp(wide - largest[:, None])
        is_here = (target >= first) & (target < first + wide.shape[1])
        place = torch.where(is_here, target - first, 0)
        own = wide.gather(1, place[:, None])[:, 0] - largest
        sums = torch.stack([exponents.sum(1), torch.where(is_here, own, 0.0)])
        dist.all_reduce(sums, group=group)
        kept = target != ignored
        ctx.save_for_backward(exponents / sums[0][:, None], place, is_here, kept)
        ctx.dtype = logits.dtype
        return torch.where(kept, sums[0].log() - sums[1], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares, place, is_here, kept = ctx.saved_tensors
        words = torch.arange(shares.shape[1], device=shares.device)
        gradient = shares - ((words == place[:, None]) & is_here[:, None]).to(shares.dtype)
        gradient = torch.where(kept[:, None], gradient, 0.0) * grad[:, None]
        return gradient.to(ctx.dtype), None, None, None, None
