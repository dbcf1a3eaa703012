"""Packed rows hold every token once, and no document sees another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import IterableDataset

from drivetrain.core.errors import ParameterError, StateError
from drivetrain.data.loader import SmartDataLoader
from drivetrain.data.packing import (
    PADDING,
    PackedDataset,
    PackedStream,
    cut_pieces,
    document_mask,
    document_mask_mod,
    num_targets,
    pack_documents,
    pack_lengths,
)

documents = st.lists(st.lists(st.integers(1, 99), max_size=20), max_size=12)


@given(lengths=st.lists(st.integers(1, 16), max_size=60), strategy=st.sampled_from(["best_fit", "first_fit"]))
def test_every_document_is_in_one_bin_and_no_bin_overflows(lengths, strategy):
    bins = pack_lengths(lengths, 16, strategy)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= 16 for members in bins)
    sizes = sorted(sum(lengths[index] for index in members) for members in bins)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 16, "two bins would fit into one"


def best_fit_by_hand(lengths, room):
    bins = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [members for members in bins if members[0] >= lengths[index]]
        if not fitting:
            bins.append([room])
            fitting = bins[-1:]
        chosen = min(fitting, key=lambda members: members[0])
        chosen[0] -= lengths[index]
        chosen.append(index)
    return [members[1:] for members in bins]


@given(lengths=st.lists(st.integers(1, 12), max_size=40))
def test_best_fit_leaves_the_rooms_that_the_definition_leaves(lengths):
    def rooms(bins):
        return sorted(12 - sum(lengths[index] for index in members) for members in bins)

    assert rooms(pack_lengths(lengths, 12)) == rooms(best_fit_by_hand(lengths, 12))


@given(documents=documents, max_length=st.integers(1, 9))
def test_packing_loses_and_mixes_nothing(documents, max_length):
    rows = pack_documents(documents, max_length, pad_token=7, ignore_index=-5)
    pieces = []
    for tokens, labels, positions, ids in zip(
        *(rows[name] for name in ("input_ids", "labels", "position_ids", "document_ids"))
    ):
        assert len(tokens) == max_length
        assert (tokens[ids == PADDING] == 7).all() and (labels[ids == PADDING] == -5).all()
        for document in range(int(ids.max()) + 1):
            own = ids == document
            assert positions[own].tolist() == list(range(int(own.sum())))
            assert labels[own][0] == -5 and torch.equal(labels[own][1:], tokens[own][1:])
            pieces.append(tokens[own].tolist())
    expected = [piece[at : at + max_length] for piece in documents for at in range(0, len(piece), max_length)]
    assert sorted(pieces) == sorted(expected)
    assert num_targets(rows["labels"], -5) == sum(len(piece) - 1 for piece in expected)


def test_given_labels_are_packed_beside_their_tokens():
    rows = pack_documents([{"input_ids": [1, 2, 3], "labels": [1, -100, 9]}, {"input_ids": [4, 5]}], 5)
    assert rows["labels"].tolist() == [[-100, -100, 9, -100, 5]]
    assert rows["document_ids"].tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.parametrize("causal", [True, False])
def test_both_masks_are_the_rule(causal):
    ids = torch.tensor([[0, 0, 1, 1, PADDING], [0, 1, 1, 2, 2]])
    dense, rule = document_mask(ids, causal), document_mask_mod(ids, causal)
    assert dense.shape == (2, 1, 5, 5)
    for batch in range(2):
        for query in range(5):
            for key in range(5):
                same = ids[batch, query] == ids[batch, key] and ids[batch, query] != PADDING
                allowed = (same and (key <= query or not causal)) or query == key
                assert dense[batch, 0, query, key] == allowed
                place = [torch.tensor(value) for value in (batch, 0, query, key)]
                assert bool(rule(*place)) == allowed


class TinyAttention(torch.nn.Module):
    """One attention layer with positions: enough to notice if a document sees another."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(50, 8), torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 50)

    def forward(self, input_ids, position_ids, mask):
        x = self.tokens(input_ids) + self.positions(position_ids)
        x = x.unsqueeze(1)
        return self.head(scaled_dot_product_attention(x, x, x, attn_mask=mask).squeeze(1))


def test_the_packed_loss_equals_the_loss_of_separate_documents():
    torch.manual_seed(0)
    model = TinyAttention().double()
    documents = [torch.randint(1, 50, (length,)).tolist() for length in (5, 9, 3, 7, 2, 12)]
    rows = pack_documents(documents, 16)
    logits = model(rows["input_ids"], rows["position_ids"], document_mask(rows["document_ids"]))
    total = cross_entropy(logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten(), reduction="sum")
    separate = torch.zeros((), dtype=torch.float64)
    for document in documents:
        ids = torch.tensor([document])
        alone = model(ids, torch.arange(len(document))[None], document_mask(torch.zeros_like(ids)))
        separate += cross_entropy(alone[0, :-1], ids[0, 1:], reduction="sum")
    torch.testing.assert_close(total, separate)
    total.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert num_targets(rows["labels"]) == sum(len(document) - 1 for document in documents)


def documents_of(count):
    return [list(range(1, 2 + (7 * number) % 13)) for number in range(count)]


def test_a_packed_dataset_is_loaded_like_any_other():
    data = PackedDataset(documents_of(40), 16, buffer=10)
    tokens = [token for row in data for token in row["input_ids"][row["document_ids"] != PADDING].tolist()]
    assert sorted(tokens) == sorted(token for document in documents_of(40) for token in document)
    loader = SmartDataLoader(data, True, 1, batch_size=3)
    batch = next(iter(loader))
    assert set(batch) == {"input_ids", "labels", "position_ids", "document_ids"} and batch["input_ids"].shape == (3, 16)
    known = PackedDataset(documents_of(40), 16, buffer=10, lengths=[len(document) for document in documents_of(40)])
    assert known.rows == data.rows


class Source(IterableDataset):
    def __init__(self, count):
        self.count, self.at = count, 0

    def __iter__(self):
        return iter(documents_of(self.count))


class StatefulSource(Source):
    def __iter__(self):
        start, self.at = self.at, 0
        for number in range(start, self.count):
            self.at = number + 1
            yield documents_of(self.count)[number]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("source", [Source, StatefulSource])
def test_a_packed_stream_resumes_at_every_row(source):
    def make():
        return SmartDataLoader(PackedStream(source(30), 16, buffer=8), batch_size=2)

    loader = make()
    batches, states = [], []
    for batch in loader:
        batches.append(batch["input_ids"].tolist())
        states.append(loader.state_dict())
    assert len(batches) > 5
    for count, state in enumerate(states, start=1):
        resumed = make()
        resumed.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in resumed] == batches[count:]


def test_a_packed_stream_begins_anew_each_epoch_and_passes_the_epoch_on():
    class ByEpoch(Source):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([[self.epoch + 1] * 4] * 3)

    loader = SmartDataLoader(PackedStream(ByEpoch(3), 12), batch_size=1)
    assert [next(iter(loader))["input_ids"].unique().tolist() for _ in range(2)] == [[1], [2]]


def test_documents_longer_than_a_row_are_cut_and_empty_ones_have_no_piece():
    assert [piece.length for piece in cut_pieces([0, 10, 4], 4)] == [4, 4, 2, 4]
    assert pack_documents([], 4)["input_ids"].shape == (0, 4)


def test_wrong_input_is_named():
    with pytest.raises(ParameterError, match="Did you mean 'best_fit'"):
        pack_lengths([1], 4, "bestfit")
    with pytest.raises(ParameterError, match="max_length=0"):
        pack_documents([[1]], 0)
    with pytest.raises(ParameterError, match="length 5 does not fit into bins of 4"):
        pack_lengths([5], 4)
    with pytest.raises(ParameterError, match=r"\['tokens'\], expected 'input_ids'"):
        pack_documents([{"tokens": [1]}], 4)
    with pytest.raises(ParameterError, match=r"shape \[2\] and labels of shape \[1\]"):
        pack_documents([{"input_ids": [1, 2], "labels": [1]}], 4)
    with pytest.raises(ParameterError, match="2 entries for 1 documents"):
        PackedDataset([[1]], 4, lengths=[1, 2])
    with pytest.raises(StateError, match="expected documents, rows and source"):
        PackedStream([], 4).load_state_dict({"x": 1})


@pytest.mark.parametrize("wrong", [1, 3, 9])
def test_a_wrong_length_raises_where_its_document_is_read(wrong):
    packed = PackedDataset([[1, 2], [3, 4], [5]], 4, lengths=torch.tensor([2, wrong, 1]))
    with pytest.raises(ParameterError, match=f"document 1 has 2 tokens, but was packed as {wrong}"):
        [packed[row] for row in range(len(packed))]


def test_a_document_that_is_said_to_be_empty_is_not_lost():
    with pytest.raises(ParameterError, match="document 1 has 2 tokens, but was packed as 0"):
        PackedDataset([[1], [2, 3]], 4, lengths=[1, 0])
    assert len(PackedDataset([[1], []], 4, lengths=[1, 0])) == 1
    with pytest.raises(ParameterError, match=r"lengths\[1\]=2.5"):
        PackedDataset([[1], [2, 3]], 4, lengths=[1, 2.5])
