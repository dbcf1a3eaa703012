"""Sequence packing: several documents in one row of fixed length, without padding most of it and without mixing them.

Documents are put into bins of `max_length` by best fit, after Krell et al., "Efficient Sequence Packing without Cross-contamination" (arXiv
2107.02027); longer ones are cut first, as in Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830). Position ids
restart with each document, document ids distinguish them (-1 is padding), and the first label of each is ignored, because it would be
predicted from the end of another one. Attention is allowed between two places only if they are real and of one document.

The rows of a `PackedDataset` are fixed when it is built; a `PackedStream` packs a buffer of documents at a time.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from drivetrain.core.arguments import check_count
from drivetrain.core.errors import ParameterError, StateError, unknown_name
from drivetrain.core.types import StateDict

PackingStrategy = Literal["best_fit", "first_fit"]
STRATEGIES = ("best_fit", "first_fit")

PADDING = -1
"""The document id of padding positions."""


class Piece(NamedTuple):
    """A document, or a part of one that is longer than a bin."""

    document: int
    start: int
    length: int


def pack_lengths(lengths: Sequence[int], max_length: int, strategy: PackingStrategy = "best_fit") -> list[list[int]]:
    """Return bins of indices whose lengths add up to at most `max_length`; longest first, each bin in order of index.

    >>> pack_lengths([5, 3, 2, 6, 4], max_length=8)
    [[2, 3], [0, 1], [4]]
    """
    check_packing(max_length, strategy)
    too_long = next((length for length in lengths if length > max_length), None)
    if too_long is not None:
        raise ParameterError(f"a document of length {too_long} does not fit into bins of {max_length}; cut it first.")
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room left, bin): sorted for best fit, in order of age for first fit
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if strategy == "best_fit":
            at = bisect.bisect_left(open_bins, (length, -1))
        else:
            at = next((at for at, (room, _) in enumerate(open_bins) if room >= length), len(open_bins))
        if at == len(open_bins):
            bins.append([])
            open_bins.append((max_length, len(bins) - 1))
        room, number = open_bins.pop(at)
        bins[number].append(index)
        if strategy == "first_fit":
            open_bins.insert(at, (room - length, number))
        elif room > length:
            bisect.insort(open_bins, (room - length, number))
    return [sorted(members) for members in bins]


def cut_pieces(lengths: Sequence[int], max_length: int) -> list[Piece]:
    """Return the documents as pieces of at most `max_length`; empty documents have none.

    >>> cut_pieces([5], max_length=3)
    [Piece(document=0, start=0, length=3), Piece(document=0, start=3, length=2)]
    """
    return [
        Piece(document, start, min(max_length, length - start))
        for document, length in enumerate(lengths)
        for start in range(0, length, max_length)
    ]


def _packed_pieces(lengths: Sequence[int], max_length: int, strategy: PackingStrategy) -> list[list[Piece]]:
    pieces = cut_pieces(lengths, max_length)
    bins = pack_lengths([piece.length for piece in pieces], max_length, strategy)
    return [[pieces[member] for member in members] for members in bins]


def pack_documents(
    documents: Sequence[object],
    max_length: int,
    strategy: PackingStrategy = "best_fit",
    *,
    pad_token: int = 0,
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """Return documents packed into rows: `input_ids`, `labels`, `position_ids` and `document_ids`, each (rows, max_length).

    A document is a sequence of token ids, or a mapping with `input_ids` and, if they differ, `labels`.

    >>> pack_documents([[1, 2, 3], [4, 5]], max_length=6)["position_ids"]
    tensor([[0, 1, 2, 0, 1, 0]])
    """
    check_packing(max_length, strategy)
    read = [read_document(document) for document in documents]
    rows = []
    for pieces in _packed_pieces([len(tokens) for tokens, _ in read], max_length, strategy):
        parts = [part_of(read[piece.document], piece) for piece in pieces]
        rows.append(fill_row(parts, max_length, pad_token, ignore_index))
    names = ("input_ids", "labels", "position_ids", "document_ids")
    empty = torch.empty(0, max_length, dtype=torch.int64)
    return {name: torch.stack([row[name] for row in rows]) if rows else empty for name in names}


def fill_row(
    parts: Sequence[tuple[Tensor, Tensor]], max_length: int, pad_token: int, ignore_index: int
) -> dict[str, Tensor]:
    """Return one packed row of documents given as (tokens, labels)."""
    row = {
        "input_ids": torch.full((max_length,), pad_token),
        "labels": torch.full((max_length,), ignore_index),
        "position_ids": torch.zeros(max_length, dtype=torch.int64),
        "document_ids": torch.full((max_length,), PADDING),
    }
    at = 0
    for number, (tokens, labels) in enumerate(parts):
        end = at + len(tokens)
        row["input_ids"][at:end] = tokens
        row["labels"][at + 1 : end] = labels[1:]  # the first label would be predicted from another document
        row["position_ids"][at:end] = torch.arange(len(tokens))
        row["document_ids"][at:end] = number
        at = end
    return row


def read_document(document: object) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of a document in any of the forms it may have."""
    if isinstance(document, Mapping):
        if "input_ids" not in document:
            raise ParameterError(
                f"packing: a document has the entries {sorted(map(str, document))}, expected 'input_ids' (and 'labels' if they differ)."
            )
        tokens = torch.as_tensor(document["input_ids"], dtype=torch.int64)
        labels = torch.as_tensor(document.get("labels", tokens), dtype=torch.int64)
    else:
        tokens = labels = torch.as_tensor(document, dtype=torch.int64)
    if tokens.ndim != 1 or labels.shape != tokens.shape:
        raise ParameterError(
            f"packing: a document has tokens of shape {list(tokens.shape)} and labels of shape {list(labels.shape)}; expected two "
            "lists of the same length."
        )
    return tokens, labels


def part_of(document: tuple[Tensor, Tensor], piece: Piece) -> tuple[Tensor, Tensor]:
    """Return one piece of a document that was read."""
    tokens, labels = document
    end = piece.start + piece.length
    return tokens[piece.start : end], labels[piece.start : end]


def document_mask(document_ids: Tensor, causal: bool = True) -> Tensor:
    """Return which positions may attend to which, (batch, 1, query, key), for `scaled_dot_product_attention`.

    A padding position may attend to itself, so that no row of the attention is empty and becomes NaN.
    """
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    allowed = same & (document_ids != PADDING).unsqueeze(-1)
    if causal:
        allowed = allowed.tril()
    itself = torch.eye(document_ids.shape[-1], dtype=torch.bool, device=document_ids.device)
    return (allowed | itself).unsqueeze(-3)


def document_mask_mod(document_ids: Tensor, causal: bool = True) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the same rule as `document_mask` as a `mask_mod` for flex_attention."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = document_ids[batch, query]
        rule = (own == document_ids[batch, key]) & (own != PADDING)
        if causal:
            rule = rule & (key <= query)
        return rule | (query == key)

    return allowed


def num_targets(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return how many labels count in a loss that predicts each position from those before it."""
    return (labels[..., 1:] != ignore_index).sum()


def check_packing(max_length: int, strategy: str, buffer: int = 1) -> None:
    """Reject sizes and names that cannot work."""
    for name, value in (("max_length", max_length), ("buffer", buffer)):
        check_count(name, value, owner="packing", error=ParameterError)
    if strategy not in STRATEGIES:
        raise ParameterError(unknown_name("strategy", strategy, STRATEGIES, where="packing"))


BEGINNING: StateDict = {"documents": 0, "rows": 0, "source": None}
"""The initial position of a packed stream."""


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
        given = lengths.tolist() if hasattr(lengths, "tolist") else lengths  # of an array or a tensor
        named = ((f"lengths[{index}]", length) for index, length in enumerate(given))
        lengths = self.lengths = [
            check_count(*one, at_least=0, owner="PackedDataset", error=ParameterError) for one in named
        ]
        for index in (index for index, length in enumerate(lengths) if length == 0):
            self._read(index)  # it is in no row, so a wrong 0 would lose it
        self.rows: list[list[Piece]] = []
        for first in range(0, len(lengths), buffer):
            for pieces in _packed_pieces(lengths[first : first + buffer], max_length, strategy):
                self.rows.append([piece._replace(document=piece.document + first) for piece in pieces])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts = [part_of(self._read(piece.document), piece) for piece in self.rows[index]]
        return fill_row(parts, self.max_length, self.pad_token, self.ignore_index)

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        document, packed = read_document(self.documents[index]), self.lengths[index]
        if len(document[0]) != packed:
            raise ParameterError(
                f"PackedDataset: document {index} has {len(document[0])} tokens, but was packed as {packed}. Correct `lengths` or leave "
                "it out. Documents must not change afterwards."
            )
        return document


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
