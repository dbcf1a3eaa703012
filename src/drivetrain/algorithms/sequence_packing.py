"""Sequence packing (Krell et al., 2021, arXiv 2107.02027): several documents in one row, without padding and without mixing them.

The arithmetic is `drivetrain.data.packing`'s. Here the training data is packed before a saved place is looked up in it, each batch
gets the mask that keeps documents apart, and the loss is weighted by the targets that count.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from drivetrain.algorithms.utils.datasets import rebuild_in_place
from drivetrain.context.batch import batch_get
from drivetrain.context.state import State
from drivetrain.core import Algorithm, ConfigError, ConfigTypeError, Event, Logger
from drivetrain.core.arguments import accepted_names, check_choice, check_counts
from drivetrain.core.errors import NotIntendedUseWarning, warn
from drivetrain.core.types import Batch, Settings
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.packing import STRATEGIES, PackedDataset, PackedStream, PackingStrategy, num_targets
from drivetrain.data.packing import document_mask as allowed_places
from drivetrain.module.wrapping import unwrap


class RealTokens(Dataset[dict[str, Tensor]]):
    """Documents without the padding that their `attention_mask` marks."""

    def __init__(self, documents: Any):
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        document = self.documents[index]
        if not isinstance(document, Mapping) or "attention_mask" not in document:
            return document  # type: ignore[return-value]  # tokens alone
        is_real = torch.as_tensor(document["attention_mask"]) != 0
        parts = {name: torch.as_tensor(document[name]) for name in ("input_ids", "labels") if name in document}
        return {name: part[is_real] if part.shape == is_real.shape else part for name, part in parts.items()}


def additive_mask(document_ids: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return what to add to attention scores, (batch, 1, query, key): 0 within a document, the lowest number elsewhere.

    Added to scores, a mask means the same to every attention; what True means differs from one to the next.
    """
    allowed = allowed_places(document_ids, causal)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


class SequencePacking(Algorithm):
    """Packs the training documents into rows of `max_length` and keeps them apart in attention, positions and loss.

    The dataset gives documents: lists of token ids, or mappings with `input_ids` and, if they differ, `labels`. The model's `forward`
    takes `attention_mask`, to be added to its scores, and should take `position_ids`. It packs at BEFORE_LOAD, because a place
    that a checkpoint holds is a place among packed rows.
    """

    allow_multiple = False
    events = frozenset({Event.BEFORE_LOAD, Event.BEFORE_FORWARD, Event.AFTER_LOSS})
    reads, writes = ("batch", "dataloader"), ("dataloader", "batch", "settings")

    def __init__(
        self,
        max_length: int,
        strategy: PackingStrategy = "best_fit",
        buffer: int = 1000,
        document_mask: bool = True,
        ignore_index: int = -100,
        *,
        causal: bool = True,
        pad_token: int = 0,
    ):
        check_counts("SequencePacking", 1, max_length=max_length, buffer=buffer)
        check_choice("strategy", strategy, STRATEGIES, owner="SequencePacking")
        self.max_length, self.strategy, self.buffer = max_length, strategy, buffer
        self.document_mask, self.ignore_index = document_mask, ignore_index
        self.causal, self.pad_token = causal, pad_token
        self._has_warned = False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BEFORE_LOAD:
            self._pack(state)
        elif event is Event.BEFORE_FORWARD:
            batch = state.batch
            if not isinstance(batch, Mapping) or "document_ids" not in batch:
                given = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
                raise ConfigError(
                    f"SequencePacking found no 'document_ids' in the batch ({given}): the loader's rows are not packed."
                )
            state.batch = self.prepare_batch(state, batch)
        else:
            # Rows hold different numbers of targets: the mean over a window must count targets, not rows.
            labels = batch_get(state.batch, "labels")
            assert isinstance(labels, Tensor)
            state.batch_output.setdefault("num_items", num_targets(labels, self.ignore_index))

    def _pack(self, state: State) -> None:
        loader = state.train_dataloader
        if not isinstance(loader, SmartDataLoader):
            raise ConfigError(
                f"SequencePacking must rebuild the training loader and cannot rebuild a {type(loader).__name__}. "
                f"Give train() the dataset of documents, or a SmartDataLoader."
            )
        documents = loader.dataset
        if isinstance(documents, PackedDataset | PackedStream):
            return
        if isinstance(documents, Mapping | Tensor):
            raise ConfigTypeError(
                f"SequencePacking expects a dataset of documents, each a list of token ids; got a {type(documents).__name__}."
            )
        options: Settings = {"pad_token": self.pad_token, "ignore_index": self.ignore_index}
        arguments = (self.max_length, self.strategy, self.buffer)
        if isinstance(documents, IterableDataset):
            packed: PackedStream | PackedDataset = PackedStream(documents, *arguments, **options)
        else:
            packed = PackedDataset(RealTokens(documents), *arguments, **options)
        rebuild_in_place(loader, dataset=packed, collate_fn=None)
        if state.dataloader is not None:
            state.set_dataloader(state.dataloader, "train")  # it has another length now

    def prepare_batch(self, state: State, given: object) -> Batch:
        """Return a packed batch as the model takes it: with the mask, without what its `forward` does not know."""
        if not isinstance(given, Mapping) or "document_ids" not in given:
            return given
        batch, accepted = dict(given), accepted_names(unwrap(state.model).forward)
        document_ids = batch.pop("document_ids")
        if self.document_mask:
            if accepted is not None and "attention_mask" not in accepted:
                raise ConfigError(
                    f"SequencePacking(document_mask=True): {type(state.model).__name__}.forward takes no attention_mask, "
                    "so documents would see each other. Give it that argument and add it to the attention scores, or accept the mixing "
                    "with document_mask=False."
                )
            dtype = next(p.dtype for p in state.model.parameters() if p.is_floating_point())
            batch["attention_mask"] = additive_mask(document_ids, self.causal, dtype)
        if accepted is not None and "position_ids" not in accepted:
            del batch["position_ids"]
            if not self._has_warned:
                warn(
                    f"SequencePacking: {type(state.model).__name__}.forward takes no position_ids, so positions do not restart with each "
                    "document.",
                    NotIntendedUseWarning,
                )
                self._has_warned = True
        return batch
