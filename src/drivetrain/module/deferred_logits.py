"""Compute a loss from logits that are never stored: a head that returns its input, and an object that represents its output.

In training, the final linear layer of the model returns its input. The loss function receives a `DeferredLogits`. It can be
flattened, shifted, cast and transposed, which only changes the hidden states, and passed to `cross_entropy`, which computes the
loss chunk by chunk. Any other operation computes the logits, so every loss is correct. This warns once, because no memory is
saved then.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from drivetrain.core.errors import UnsupportedMethodError, warn
from drivetrain.module.chunked_loss import SoftmaxStep, linear_cross_entropy, loss_and_logit_gradients
from drivetrain.module.probing import call_on_fake_tensors
from drivetrain.module.wrapping import GeneratedClass, add_mixin

_LOOKS = ("ndim", "dim", "size", "numel", "is_floating_point")
_CASTS = ("float", "double", "to", "type_as", "contiguous", "clone")
_RESHAPES = ("flatten", "view", "reshape", "unflatten", "squeeze", "unsqueeze")


class DeferredHead(GeneratedClass):
    """A final linear layer that leaves its product to the loss in training."""

    _deferred: "DeferredSource | None"

    def forward(self, input: Tensor) -> object:
        """Return the input in training, or an object for the logits if the model computes the loss; otherwise the logits."""
        if not self.training:  # type: ignore[attr-defined]
            return super().forward(input)  # type: ignore[misc]
        return input if self._deferred is None else DeferredLogits(input, self._deferred)


def defer_head(head: nn.Linear, source: "DeferredSource | None" = None) -> None:
    """Make a linear layer return its input in training, in place; with a `source`, an object that represents its output."""
    add_mixin(head, DeferredHead, _deferred=source)


class DeferredLogits:
    """Represents `F.linear(hidden, head.weight, head.bias)` in a loss function."""

    def __init__(
        self, hidden: Tensor, source: "DeferredSource", dtype: torch.dtype | None = None, is_swapped: bool = False
    ):
        self._hidden, self._source, self._dtype = hidden, source, dtype
        self._is_swapped = is_swapped  # whether classes are in dimension 1, as cross_entropy has them

    # What is known without computing.

    @property
    def shape(self) -> torch.Size:
        rows, classes = self._hidden.shape[:-1], self._source.head.out_features
        return torch.Size((rows[0], classes, *rows[1:]) if self._is_swapped else (*rows, classes))

    @property
    def dtype(self) -> torch.dtype:
        return self._hidden.dtype if self._dtype is None else self._dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def __len__(self) -> int:
        return self.shape[0]

    # What changes rows, not classes.

    ndim: int  # answered by `__getattr__`

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _LOOKS:
            return getattr(torch.empty(self.shape, dtype=self.dtype, device="meta"), name)
        if name in _CASTS or name in _RESHAPES:
            return lambda *args, **kwargs: self._moved(name, args, kwargs)
        return getattr(self._computed(name), name)

    def __getitem__(self, index: Any) -> object:
        """Return some of the rows; an index that reaches the classes computes them."""
        parts = index if isinstance(index, tuple) else (index,)
        masks = [part for part in parts if isinstance(part, Tensor) and part.dtype == torch.bool]
        used = sum(part is not Ellipsis for part in parts) + sum(mask.ndim - 1 for mask in masks)
        has_dots = any(part is Ellipsis for part in parts)
        reaches = used >= self.ndim or (has_dots and parts[-1] is not Ellipsis)
        takes_all = bool(parts) and isinstance(parts[-1], slice) and parts[-1] == slice(None)
        if self._is_swapped or any(part is None for part in parts) or (reaches and not takes_all):
            return self._computed("[]")[index]
        return self._like(self._hidden[index])

    def transpose(self, first: int, second: int) -> object:
        """Move the classes to dimension 1 or back without computing the logits. Other transpositions compute them."""
        if self.ndim == 3 and {first % 3, second % 3} == {1, 2}:
            return DeferredLogits(self._hidden, self._source, self._dtype, not self._is_swapped)
        return self._computed("transpose").transpose(first, second)

    def permute(self, *order: Any) -> object:
        """Move the classes to dimension 1 or back without computing the logits. Other permutations compute them."""
        wanted = tuple(order[0]) if len(order) == 1 and not isinstance(order[0], int) else order
        if self.ndim == 3 and tuple(step % 3 for step in wanted) == (0, 2, 1):
            return self.transpose(1, 2)
        return self._computed("permute").permute(*order)

    def _moved(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Do to the hidden states what would be done to the logits, where the classes stay as they are."""
        if name in _CASTS:
            like = getattr(torch.empty(0, dtype=self.dtype, device=self.device), name)(*args, **kwargs)
            if like.device != self.device:
                return getattr(self._computed(name), name)(*args, **kwargs)
            return self._like(self._hidden, dtype=like.dtype)
        shape = getattr(torch.empty(self.shape, device="meta"), name)(*args, **kwargs).shape
        # Rows may be arranged again as long as the last dimension is that of the classes, whole and by itself.
        keeps_classes = shape[-1:] == self.shape[-1:] and shape[:-1].numel() == self.shape[:-1].numel()
        if self._is_swapped or not keeps_classes:
            return getattr(self._computed(name), name)(*args, **kwargs)
        return self._like(self._hidden.reshape(*shape[:-1], self._hidden.shape[-1]))

    def _like(self, hidden: Tensor, dtype: torch.dtype | None = None) -> "DeferredLogits":
        return DeferredLogits(hidden, self._source, self._dtype if dtype is None else dtype, self._is_swapped)

    # What is computed.

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Compute a cross entropy in chunks, and everything else from real logits."""
        kwargs = {} if kwargs is None else kwargs
        name = getattr(function, "__name__", str(function))
        if function is F.cross_entropy:
            bound = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
            bound.apply_defaults()
            if (loss := _chunked(**bound.arguments)) is not None:
                return loss
        elif args and isinstance(args[0], DeferredLogits) and name in (*_RESHAPES, "transpose", "permute", "clone"):
            return getattr(args[0], name)(*args[1:], **kwargs)
        args, kwargs = tree_map_only(DeferredLogits, lambda value: value._computed(name), (args, kwargs))
        return function(*args, **kwargs)

    def _computed(self, name: str) -> Tensor:
        """Return real logits, and warn once why they are needed."""
        self._source.warn_computed(name)
        head = self._source.head
        logits = super(DeferredHead, head).forward(self._hidden)  # type: ignore[misc]
        logits = logits if self._dtype is None else logits.to(self._dtype)
        return logits.transpose(1, 2) if self._is_swapped else logits


for _name in "add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs eq ne gt lt ge le".split():
    # Operators are looked up on the class, where `__getattr__` does not help.
    def _operate(self: DeferredLogits, *others: object, _name: str = f"__{_name}__") -> object:
        return getattr(self._computed(_name), _name)(*others)

    setattr(DeferredLogits, f"__{_name}__", _operate)


def _chunked(input: object, target: object, **settings: Any) -> Tensor | None:
    """Return the loss in chunks, or None where cross entropy means more than that here."""
    if not isinstance(input, DeferredLogits) or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    is_unusual = any(settings.pop(name) is not None for name in ("weight", "size_average", "reduce"))
    if is_unusual or settings["reduction"] not in ("mean", "sum") or not (input.ndim == 2 or input._is_swapped):
        return None
    head, source = input._source.head, input._source
    hidden = input._hidden.reshape(-1, head.in_features)
    loss = linear_cross_entropy(
        hidden, head.weight, target.reshape(-1), head.bias, chunk=source.chunk, step=source.step, **settings
    )
    source.is_chunked = True
    # As cross_entropy does under autocast, the result is float32; without it, the type of the logits.
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(input.dtype)


class DeferredSource:
    """The head of deferred logits, and how the loss is split into chunks."""

    def __init__(self, head: nn.Linear, chunk: int | None = None, step: SoftmaxStep = loss_and_logit_gradients):
        self.head, self.chunk, self.step = head, chunk, step
        self.is_chunked = self._has_warned = False

    def warn_computed(self, name: str) -> None:
        """Warn once that the logits had to be computed."""
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"chunked_cross_entropy: the loss uses the logits for more than a cross entropy of class indices ({name}), so all logits "
                f"are computed and no memory is saved."
            )


class DeferredLoss(DeferredSource):
    """A loss function of hidden states: the user's own, called with deferred logits."""

    def __init__(
        self,
        loss_func: Callable[..., object],
        head: nn.Linear,
        *,
        position: int,
        leaf: int = 0,
        chunk: int | None = None,
        step: SoftmaxStep = loss_and_logit_gradients,
    ):
        super().__init__(head, chunk, step)
        self.loss_func, self.position, self.leaf = loss_func, position, leaf
        """`position`: which argument is the model's output; `leaf`: which of its tensors the head made."""

    def __call__(self, *args: object) -> object:
        """Compute the loss; while the model trains, its output holds hidden states."""
        if not self.head.training:
            return self.loss_func(*args)
        leaves, structure = tree_flatten(args[self.position])
        if isinstance(leaves[self.leaf], DeferredLogits):
            return self.loss_func(*args)
        leaves[self.leaf] = DeferredLogits(leaves[self.leaf], self)
        outputs = tree_unflatten(leaves, structure)
        return self.loss_func(*args[: self.position], outputs, *args[self.position + 1 :])


def find_final_linear(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[str, int, bool]:
    """Return the name of the linear layer whose output a model returns unchanged, which of the model's output tensors that is, and whether
    the model also computes a loss. It runs once on fake tensors.
    """
    made: list[tuple[str, Tensor]] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                note = partial(lambda module, inputs, output, name: made.append((name, output)), name=name)
                hooks.enter_context(module.register_forward_hook(note))
        try:
            outputs = call_on_fake_tensors(model, args, kwargs)
        except Exception as error:  # shapes that depend on data, or code that fake tensors cannot follow
            raise UnsupportedMethodError(
                f"chunked_cross_entropy: {type(model).__name__} could not be traced with fake tensors ({type(error).__name__}: {error}), "
                f"so its final linear layer is unknown. Remove the method."
            ) from error
    for index, leaf in enumerate(tree_leaves(outputs)):
        for name, output in made:
            if leaf is output:
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
                return name, index, isinstance(loss, Tensor) and loss.ndim == 0
    raise UnsupportedMethodError(
        f"chunked_cross_entropy: {type(model).__name__} does not return the unchanged output of a linear layer; the last one it ran was "
        f"{made[-1][0] if made else 'none'}. Remove the method, or return the logits themselves."
    )
