"""The weight of each batch's loss in the mean over a window, an epoch or an evaluation.

The first batch of a phase is watched (`drivetrain.module.loss_items`), which shows what its loss is a mean over. Later batches
are counted from their labels on the device, and only if the number of samples is not enough.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from drivetrain.core.arguments import check_callable
from drivetrain.core.containers import with_attributes
from drivetrain.core.errors import ConfigError
from drivetrain.core.types import StateDict
from drivetrain.data.order import BatchInfo
from drivetrain.module.accumulation import Count
from drivetrain.module.loss_items import SAMPLES, UNKNOWN, LossItems, LossWatch, entry_of, follow_loss
from drivetrain.module.wrapping import is_compiled_shell, unwrap
from drivetrain.runtime.collectives import all_gather_values
from drivetrain.train.batches import BatchOutput, batch_size_of, carried_loss, slice_rows

if TYPE_CHECKING:
    from drivetrain.train.hooks import TrainerHooks


CountItems = Callable[..., Count] | str
"""A function of the batch that returns a count, or "labels"."""


def check_count_items(count_items: object) -> CountItems | None:
    """Return the argument if it is a valid way to count."""
    if count_items is None or (isinstance(count_items, str) and count_items == "labels"):
        return count_items
    if callable(count_items):
        check_callable("count_items", count_items, "a function of the batch that returns a count, or 'labels'")
        return count_items
    raise ConfigError(f"count_items={count_items!r}: expected a function of the batch, or 'labels'.")


class LossCounting:
    """Counts what the losses of one phase, training or evaluation, are means over."""

    def __init__(self, count_items: CountItems | None = None):
        self.items = UNKNOWN
        self.is_decided = callable(count_items)  # whether no batch needs to be inspected
        self.is_needed = count_items is not None  # whether batches have to be counted
        self._given = count_items
        self._count = count_items if callable(count_items) else None

    @property
    def is_known(self) -> bool:
        """Whether losses are weighted by what they are means over."""
        return self._given is not None or self.items.kind != "unknown"

    @property
    def is_sum(self) -> bool:
        """Whether losses are sums, so that those of parts add up to the total."""
        return self.items.kind == "sum" and self._given is None

    def agree(self) -> None:
        """Make all ranks weigh by samples if they found different results."""
        found = self.items
        everywhere = all_gather_values((found.kind, found.path, found.cut, found.ignore_index))
        if any(other != everywhere[0] for other in everywhere):
            self._decide(UNKNOWN, None, None)

    def prefer_samples(self, batch: object) -> None:
        """Count samples if rows have one label each and none of this batch is ignored. Here only reported means depend on the count."""
        items = self.items
        is_alike = self._given is None and items.kind == "labels" and items.is_one_per_row
        if is_alike and items.count(batch) == batch_size_of(None, batch):  # once per run; this synchronizes the host
            self._count, self.is_needed = None, False

    def count(self, batch: object) -> Count:
        """Return how many items the loss of a batch is a mean over."""
        try:
            return 1 if self._count is None else self._count(batch)
        except Exception as error:
            if self._count is self._given:
                error.add_note(f"count_items={self._given!r} raised this for a batch of type {type(batch).__name__}.")
            raise

    def watched(
        self, trainer: "TrainerHooks", hook: Callable[..., BatchOutput], batch: object, loader: object
    ) -> BatchOutput:
        """Return the result of a loss hook for a batch, and decide from it how batches are counted."""
        watch = LossWatch(batch, batch_size_of(None, batch))
        is_compiled = _is_compiled(trainer.model) or _is_compiled(trainer.loss_func)
        random = trainer.state.capture_random() if is_compiled else {}
        if is_compiled:  # only a loss function outside what is compiled can be followed
            with with_attributes(trainer.run.loss, watch=None if _is_compiled(trainer.loss_func) else watch):
                output = hook(batch)
        else:
            with uncompiled(), watch:
                output = hook(batch)
        if isinstance(output, Mapping) and "loss" in output:
            items = watch.items_of(output["loss"])
            if items is UNKNOWN and is_compiled and "num_items" not in output:
                own = any(trainer.overrides(name) for name in (hook.__name__, "forward", "compute_loss"))
                items = items if own else _probe(trainer, batch, random)  # code of the user's must not be called twice
            self._decide(items, loader, unwrap(trainer.model))
        return output

    def _decide(self, items: LossItems, loader: object, model: object) -> None:
        self.is_decided = True
        inner = getattr(loader, "dl", loader)  # of a slice
        has_equal_rows = counts_rows_alike(items, getattr(inner, "dataset", None), getattr(inner, "collate_fn", None))
        self.items = SAMPLES if has_equal_rows else items
        self._count = None
        if self._given == "labels":
            has_shift = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            cut = (1, None) if has_shift else (None, None)
            if items.kind != "labels":
                items = LossItems(kind="labels", path=("labels",), cut=cut)
            self._count = items.count
        elif self.items.needs_count:
            self._count = self.items.count
        self.is_needed = self._count is not None or self.is_sum


class KnownBatch(NamedTuple):
    """Takes the place of the loader for a batch that is passed again: its samples on this rank and on all ranks."""

    size: int
    global_size: int
    sample_index: None = None

    @property
    def batch_info(self) -> "KnownBatch":
        """The numbers of samples."""
        return self


class Part(NamedTuple):
    """Which part of its batch a loss belongs to, if batches are split into micro-batches."""

    parts: int = 1
    is_last: bool = True
    rows: int | None = None  # the samples of the whole batch


WHOLE = Part()


def items_of(
    output: BatchOutput, info: BatchInfo | KnownBatch | None, world: int, is_split: bool
) -> tuple[Count, Count | None]:
    """Return how many items a loss is a mean over, on this rank and on all ranks; None if only a reduction can tell."""
    items, is_alone = output.get("num_items"), world == 1
    is_empty = info is not None and info.size == 0  # a stand-in for a rank that has no samples left
    if items is not None:
        items = 0 if is_empty else items
        return items, items if is_alone else None
    size = output["batch_size"]
    if info is None:
        return size, size if is_alone else None
    if not is_split:
        return info.size, info.global_size
    return (0 if is_empty else size), size if is_alone else None


def counts_rows_alike(items: LossItems, dataset: object, collate: object = None) -> bool:
    """Return whether every row of the data has the same weight, so that samples can be counted instead, which costs nothing."""
    if type(dataset) is not TensorDataset or collate not in (None, default_collate):
        return False
    if items.kind == "elements":
        return True
    if items.kind != "labels" or items.weight is not None or len(items.path) != 1 or not isinstance(items.path[0], int):
        return False
    labels = entry_of(dataset.tensors, items.path)
    return not bool((labels == items.ignore_index).any())  # once per run; this synchronizes the host


def _probe(trainer: "TrainerHooks", batch: object, random: StateDict) -> LossItems:
    """Follow two rows of a batch, passed with these random states, through the uncompiled model; nothing is left behind."""
    rows = batch_size_of(None, batch)
    part = slice_rows(batch, 0, min(2, rows), rows)
    model, loss_func = unwrap(trainer.model), trainer.loss_func
    form = trainer.run.loss.form_of(batch, trainer.model, loss_func)
    args, kwargs = form.arguments(part)

    def loss() -> object:
        with trainer.runtime.autocast(), uncompiled():
            outputs = model(*args, **kwargs)
            if loss_func is not None:
                return loss_func(form.predictions(outputs), form.targets(part))
            own = trainer.run.loss.own_loss
            return carried_loss(outputs) if own is None else own(outputs, part)

    with trainer.state.preserve_random():
        trainer.state.restore_random(**random)  # the choices of the pass before, such as skipped blocks
        return follow_loss(model, part, min(2, rows), loss)[0]


def _is_compiled(function: object) -> bool:
    """Whether a model, one of its modules or a loss function is compiled."""
    if not isinstance(function, nn.Module):
        inner = getattr(function, "function", getattr(function, "loss_func", None))
        return hasattr(function, "_torchdynamo_orig_callable") or (inner is not None and _is_compiled(inner))
    return any(is_compiled_shell(module) or module._compiled_call_impl is not None for module in function.modules())


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions uncompiled. If nothing can be compiled, the compiler is not imported."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
