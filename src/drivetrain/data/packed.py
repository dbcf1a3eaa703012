"""Datasets of packed rows: over data with an index, and over a stream.

The rows of a `PackedDataset` are fixed when it is built, and are shuffled, split over ranks and resumed like any samples. A
`PackedStream` packs a buffer of documents at a time and can be saved between any two rows.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from drivetrain.core.errors import ParameterError, StateError
from drivetrain.core.types import StateDict
from drivetrain.data.packing import (
    PackingStrategy,
    Piece,
    check_packing,
    cut_pieces,
    fill_row,
    pack_documents,
    pack_lengths,
    part_of,
    read_document,
)

BEGINNING: dict[str, Any] = {"documents": 0, "rows": 0, "source": None}
"""The place of a packed stream that has given out nothing."""


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of packed documents of a dataset with an index; the bins are fixed when it is built.

    `buffer` documents are packed together, in the order of the dataset. `lengths` saves reading every document once.
    """

    def __init__(
        self,
        documents: Any,
        max_length: int,
        strategy: PackingStrategy = "best_fit",
        buffer: int = 1000,
        *,
        lengths: Sequence[int] | None = None,
        pad_token: int = 0,
        ignore_index: int = -100,
    ):
        check_packing(max_length, strategy, buffer)
        self.documents, self.max_length = documents, max_length
        self.pad_token, self.ignore_index = pad_token, ignore_index
        if lengths is None:
            lengths = [len(read_document(documents[index])[0]) for index in range(len(documents))]
        elif len(lengths) != len(documents):
            raise ParameterError(
                f"lengths has {len(lengths)} entries for {len(documents)} documents; expected one for each."
            )
        self.rows: list[list[Piece]] = []
        for first in range(0, len(lengths), buffer):
            pieces = cut_pieces(lengths[first : first + buffer], max_length)
            pieces = [piece._replace(document=piece.document + first) for piece in pieces]
            bins = pack_lengths([piece.length for piece in pieces], max_length, strategy)
            self.rows += [[pieces[member] for member in members] for members in bins]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts = [part_of(read_document(self.documents[piece.document]), piece) for piece in self.rows[index]]
        return fill_row(parts, self.max_length, self.pad_token, self.ignore_index)


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """Rows of packed documents of an iterable: `buffer` documents are read, packed, and given out row by row.

    The place is the number of documents before the buffer and of rows given out of it. If the source itself has `state_dict`, its
    place at the start of the buffer is kept too; if not, documents are read again up to the place.
    """

    def __init__(
        self,
        documents: Iterable[object],
        max_length: int,
        strategy: PackingStrategy = "best_fit",
        buffer: int = 1000,
        *,
        pad_token: int = 0,
        ignore_index: int = -100,
    ):
        check_packing(max_length, strategy, buffer)
        self.documents, self.max_length, self.strategy, self.buffer = documents, max_length, strategy, buffer
        self.pad_token, self.ignore_index = pad_token, ignore_index
        self._place = dict(BEGINNING)
        self._restored = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        place = self._place if self._restored else dict(BEGINNING)
        self._restored = False
        with_state = callable(getattr(self.documents, "state_dict", None))
        if place["source"] is not None:
            self.documents.load_state_dict(place["source"])  # type: ignore[attr-defined]
        documents = iter(self.documents)
        if place["source"] is None:
            next(itertools.islice(documents, place["documents"], place["documents"]), None)
        read, given = place["documents"], place["rows"]
        while True:
            source = self.documents.state_dict() if with_state and read else None  # type: ignore[attr-defined]
            held = list(itertools.islice(documents, self.buffer))
            if not held:
                return
            rows = pack_documents(
                held, self.max_length, self.strategy, pad_token=self.pad_token, ignore_index=self.ignore_index
            )
            for number in range(given, len(rows["input_ids"])):
                self._place = {"documents": read, "rows": number + 1, "source": source}
                yield {name: values[number] for name, values in rows.items()}
            read, given = read + len(held), 0

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a source that shuffles by it."""
        if callable(getattr(self.documents, "set_epoch", None)):
            self.documents.set_epoch(epoch)  # type: ignore[attr-defined]

    def state_dict(self) -> StateDict:
        """Return the position after the last row."""
        return dict(self._place)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Make the next iteration start at a saved position."""
        if set(state) != set(BEGINNING):
            raise StateError(
                f"packed stream: the state has {sorted(map(str, state))}, expected documents, rows and source."
            )
        self._place, self._restored = dict(state), True
