"""Reading and writing parts of a batch whose form is the user's own.

A batch may be a tensor, a tuple, a namedtuple, a list, a mapping or an object with attributes, and an algorithm must
find its inputs and targets in any of them. A key says where: an index, a name, a list of keys, a function, or a pair
of functions `(getter, setter)`. The second half of the file is about targets: class indices, or one weight per class.
"""

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from drivetrain.core.containers import same_tuple
from drivetrain.core.errors import ConfigError, did_you_mean
from drivetrain.core.types import Batch

Getter = Callable[..., Batch]
BatchKey = int | str | Getter | Sequence["BatchKey"]
"""Where a part of a batch is: index, name, list of those, function, or `(getter, setter)`."""


def batch_get(batch: Any, key: BatchKey) -> Batch:
    """Return the part of `batch` that `key` names; a list of keys gives a list of parts.

    >>> batch_get({"x": 1, "y": 2}, ["y", "x"])
    [2, 1]
    """
    if callable(key):
        return key(batch)
    pair = _as_pair(key)
    if pair is not None:
        return pair[0](batch)
    if _is_many(key):
        return [batch_get(batch, one) for one in key]
    try:
        if isinstance(batch, Mapping) or not isinstance(key, str):
            return batch[key]
        return getattr(batch, key)  # namedtuples and objects alike
    except (KeyError, IndexError, AttributeError) as error:
        raise type(error)(f"the batch has no part {key!r}. {_parts_of(batch, key)}") from error


def batch_set(batch: Any, key: BatchKey, value: object) -> Any:
    """Return `batch` with the part at `key` replaced: in place where the batch allows it, else in a rebuilt one.

    >>> batch_set((1, 2), 0, 5)
    (5, 2)
    """
    if callable(key):
        raise RuntimeError(
            f"a batch cannot be set through one function ({_name(key)}): give a pair (getter, setter), where setter(batch, value) "
            "returns the changed batch or changes it in place."
        )
    pair = _as_pair(key)
    if pair is not None:
        result = pair[1](batch, value)
        return batch if result is None else result
    if _is_many(key):
        if not isinstance(value, Sequence | Tensor) or isinstance(value, str) or len(value) != len(key):
            found = f"{len(value)} values" if hasattr(value, "__len__") else f"a {type(value).__name__}"
            raise ValueError(f"batch keys {list(key)!r} need one value each, {len(key)} in all; got {found}.")
        for one, part in zip(key, value):
            batch = batch_set(batch, one, part)
        return batch
    if isinstance(batch, tuple):
        return _set_in_tuple(batch, key, value)
    try:
        if isinstance(batch, MutableMapping | MutableSequence) or not isinstance(key, str):
            batch[key] = value
        else:
            setattr(batch, key, value)
    except (AttributeError, TypeError, IndexError, KeyError) as error:
        raise _cannot_set(batch, key) from error
    return batch


def _set_in_tuple(batch: tuple[Any, ...], key: Any, value: Any) -> tuple[Any, ...]:
    fields: tuple[str, ...] | None = getattr(batch, "_fields", None)
    index = fields.index(key) if fields is not None and key in fields else key
    if not isinstance(index, int) or not -len(batch) <= index < len(batch):
        raise _cannot_set(batch, key)
    parts = list(batch)
    parts[index] = value
    return same_tuple(batch, parts)


def _cannot_set(batch: object, key: object) -> RuntimeError:
    return RuntimeError(f"the key {key!r} cannot be set in a batch. {_parts_of(batch, key)}")


def _parts_of(batch: object, key: object) -> str:
    """Return what there is instead of a key that is not there."""
    names = [str(name) for name in getattr(batch, "_fields", None) or (batch if isinstance(batch, Mapping) else ())]
    hint = did_you_mean(key, names)
    parts = f"with {', '.join(names)}" if names else f"of {len(batch)} parts" if isinstance(batch, Sequence) else ""
    shown = f"It is a {type(batch).__name__} {parts}".rstrip()
    return f"{shown}.{hint} Give an existing key, or a pair (getter, setter)."


def _as_pair(key: object) -> tuple[Getter, Getter] | None:
    """Return `(getter, setter)` when the key is one; a sequence of functions of another length is an error."""
    if not _is_many(key) or not any(callable(one) for one in key):
        return None
    if len(key) != 2 or not all(callable(one) for one in key):
        raise ValueError(
            f"a batch key made of functions is a pair (getter, setter); got {[_name(one) for one in key]}."
        )
    getter, setter = (one for one in key if callable(one))
    return getter, setter


def _is_many(key: object) -> TypeGuard[Sequence[BatchKey]]:
    return isinstance(key, Sequence) and not isinstance(key, str)


def _name(function: object) -> str:
    return getattr(function, "__name__", repr(function))


def infer_target_type(logits: Tensor, targets: Tensor) -> Literal["indices", "one_hot"]:
    """Return whether targets are class indices or one weight per class, from the shapes; the class dimension is 1."""
    if targets.shape == logits.shape:
        return "one_hot"
    if targets.shape == logits.shape[:1] + logits.shape[2:]:
        return "indices"
    is_last = targets.ndim == logits.ndim - 1 > 1 and targets.shape == logits.shape[:-1]
    hint = " The outputs have their classes last: transpose(1, -1) puts them in dimension 1." if is_last else ""
    raise RuntimeError(
        f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(logits.shape)}: expected the same shape (one "
        f"weight per class) or the shape without dimension 1 (class indices; the class dimension is 1).{hint}"
    )


def check_for_index_targets(targets: Tensor) -> bool:
    """Return whether the targets are whole numbers, as class indices are."""
    return not (targets.is_floating_point() or targets.is_complex()) and targets.dtype is not torch.bool


def ensure_targets_one_hot(logits: Tensor, targets: Tensor, num_classes: int | None = None) -> Tensor:
    """Return targets with one weight per class in dimension 1; ignored rows (negative index) are all zero.

    The comparison below never waits for the device, which `torch.nn.functional.one_hot` does. The range of the indices is
    therefore only checked under torch's anomaly mode.

    >>> ensure_targets_one_hot(torch.zeros(2, 3), torch.tensor([2, -100]))
    tensor([[0., 0., 1.],
            [0., 0., 0.]])
    """
    dtype = torch.promote_types(logits.dtype, torch.float32) if logits.is_floating_point() else torch.float32
    if infer_target_type(logits, targets) == "one_hot":
        return targets if targets.is_floating_point() else targets.to(dtype)
    if targets.is_floating_point():
        raise RuntimeError(
            f"targets of shape {tuple(targets.shape)} are {str(targets.dtype).removeprefix('torch.')} numbers, not class indices; "
            f"for outputs of shape {tuple(logits.shape)} expected whole numbers, or one weight per class in the shape of the outputs."
        )
    count = logits.shape[1] if num_classes is None else num_classes
    if torch.is_anomaly_enabled() and targets.numel() and int(targets.max()) >= count:
        raise ConfigError(
            f"targets hold the class {int(targets.max())}, but there are only {count} classes (0 to {count - 1})."
        )
    classes = torch.arange(count, device=targets.device).view(1, count, *([1] * (targets.ndim - 1)))
    return (targets.unsqueeze(1) == classes).to(dtype)
