"""Sequence length warm-up: the course of the length, and what happens to a batch."""

import pytest
import torch
from torch import nn

from drivetrain.algorithms.seq_length_warmup import SeqLengthWarmup, set_batch_sequence_length
from drivetrain.algorithms.stochastic_depth import StochasticDepth
from drivetrain.core.engine import Engine
from drivetrain.core.errors import NoEffectWarning
from drivetrain.core.event import Event
from tests.algorithms.surgery_models import TextNet, texts
from tests.algorithms.tasks import (
    Log,
    TinyTransformer,
    TokenData,
    Watch,
    make_state,
    run,
    same,
    text_trainer,
    train,
    weights,
)


def tokens(rows=2, length=12):
    return torch.arange(rows * length).view(rows, length)


def test_every_tensor_is_cut_and_the_callers_batch_is_not():
    batch = {"input_ids": tokens(), "labels": tokens() + 1, "hidden": torch.randn(2, 12, 3), "name": "x"}
    short = set_batch_sequence_length(batch, 5)
    assert short["input_ids"].tolist() == tokens()[:, :5].tolist() and short["hidden"].shape == (2, 5, 3)
    assert short["name"] == "x" and batch["input_ids"].shape == (2, 12)


def test_a_length_that_is_long_enough_changes_nothing():
    batch = {"input_ids": tokens()}
    assert set_batch_sequence_length(batch, 12) is batch
    assert set_batch_sequence_length(batch, 99, truncate=False) is batch


def test_the_last_real_token_is_kept():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 0, 0, 0]])
    mask = (ids > 0).long()
    short = set_batch_sequence_length({"input_ids": ids, "attention_mask": mask}, 4, preserve_end_of_sequence=True)
    assert short["input_ids"].tolist() == [[10, 11, 12, 15], [20, 21, 22, 0]]
    assert short["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert ids[0, 3] == 13
    with pytest.raises(ValueError, match="attention_mask"):
        set_batch_sequence_length({"input_ids": ids}, 4, preserve_end_of_sequence=True)


def test_reshaping_makes_more_rows_and_drops_the_rest():
    batch = {"input_ids": tokens(2, 12), "labels": tokens(2, 12) * 2}
    short = set_batch_sequence_length(batch, 5, truncate=False)
    assert short["input_ids"].tolist() == torch.arange(20).view(4, 5).tolist()
    assert torch.equal(short["labels"], short["input_ids"] * 2)
    with pytest.raises(ValueError, match="'hidden'"):
        set_batch_sequence_length({"input_ids": tokens(), "hidden": torch.randn(2, 12, 3)}, 5, truncate=False)


def test_one_dimensional_entries_are_refused_unless_ignored():
    batch = {"input_ids": tokens(), "weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"'weight'.*ignore_keys"):
        set_batch_sequence_length(batch, 4)
    assert set_batch_sequence_length(batch, 4, ignore_keys=["weight"])["weight"] is batch["weight"]


def test_tuples_work_too():
    short = set_batch_sequence_length((tokens(), tokens()), 4)
    assert isinstance(short, tuple) and [part.shape for part in short] == [(2, 4), (2, 4)]


def course(algorithm, batches, **state):
    """Return the length of every batch of a run."""
    state = make_state(**{"max_duration": f"{batches}ba", **state})
    lengths = []
    for _ in range(batches):
        lengths.append(algorithm.length_at(state))
        state.clock.next_batch(samples=4)
    return lengths


def test_the_course_of_the_length_is_the_formula():
    lengths = course(SeqLengthWarmup(0.5, 8, 64, 8), 70)
    every = int(70 * 0.5) // 7
    assert lengths == [min(64, 8 * (batch // every) + 8) for batch in range(70)]


def test_a_short_run_with_default_settings_does_not_divide_by_zero():
    lengths = course(SeqLengthWarmup(), 100)
    assert lengths[0] == 8 and lengths == sorted(lengths) and len(set(lengths)) == 100


def test_epochs_steps_and_samples_count_the_same_course():
    algorithm = SeqLengthWarmup(0.5, 8, 64, 8)
    expected = course(algorithm, 70)
    assert course(algorithm, 70, max_duration="7ep", length=10) == expected
    assert course(algorithm, 70, max_duration="35st", accumulation_steps=2) == expected
    by_samples = course(algorithm, 70, max_duration="280sp")
    assert by_samples[0] == 8 and by_samples[-1] == 64 and by_samples == sorted(by_samples)


def test_a_loader_without_a_length_is_refused_where_epochs_end_the_run():
    state = make_state(max_duration="2ep")
    state.dataloader_len = None
    with pytest.raises(ValueError, match="max_duration in batches"):
        SeqLengthWarmup().length_at(state)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"duration": 1.2}, "duration"),
        ({"min_seq_length": 0}, "min_seq_length"),
        ({"max_seq_length": 4}, "less than"),
        ({"step_size": 0}, "step_size"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        SeqLengthWarmup(**arguments)


def test_a_run_grows_and_logs_each_length_once():
    lengths = Watch(Event.BATCH_START, lambda state: state.batch["input_ids"].shape[1])
    log = Log()
    trainer = text_trainer(SeqLengthWarmup(0.5, 4, 16, 4), callbacks=[lengths], loggers=[log])
    train(trainer, TokenData(), num_epochs=4)
    assert lengths.values == [4] * 2 + [8] * 2 + [12] * 2 + [16] * 10
    logged = [
        entry["seq_length_warmup/curr_seq_len"] for entry in log.metrics if "seq_length_warmup/curr_seq_len" in entry
    ]
    assert logged == [4, 8, 12, 16]


class Noisy(TinyTransformer):
    """Has running statistics, draws random numbers, and remembers the lengths it has seen."""

    def __init__(self):
        super().__init__()
        self.statistics, self.dropout, self.lengths = nn.BatchNorm1d(12), nn.Dropout(0.3), []

    def logits(self, input_ids, attention_mask=None, position_ids=None):
        self.lengths.append(input_ids.shape[1])
        x = self.dropout(self.statistics(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2))
        return self.head(self.norm(x))


def test_the_first_batch_runs_once_at_full_length_and_leaves_no_trace():
    model = Noisy()
    batch = {"input_ids": torch.randint(0, 17, (3, 16)), "labels": torch.randint(0, 17, (3, 16))}
    state = make_state(batch, model=model, max_duration="100ba")
    model.head.bias.grad = kept = torch.ones(17)  # a window in progress
    before, generator = weights(model), torch.get_rng_state()
    algorithm = SeqLengthWarmup(0.5, 4, 12, 4)
    short = run(algorithm, state, Event.INIT, Event.AFTER_DATALOADER)
    assert model.lengths == [12] and short["input_ids"].shape == (3, 4)
    assert same(weights(model), before) and torch.equal(torch.get_rng_state(), generator)
    assert model.head.bias.grad is kept and torch.equal(kept, torch.ones(17)) and model.head.weight.grad is None
    run(algorithm, state, Event.AFTER_DATALOADER)
    assert model.lengths == [12]


def test_sequences_that_are_never_cut_are_reported():
    data = TokenData(length=8)
    with pytest.warns(NoEffectWarning, match="min_seq_length=8"):
        train(text_trainer(SeqLengthWarmup(min_seq_length=8)), data, num_epochs=1)


def test_a_part_of_the_batch_can_be_named():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(17, 4), nn.Linear(4, 2)

        def forward(self, ids):
            return self.head(self.embedding(ids).mean(1))

    batch = (torch.randint(0, 17, (4, 16)), torch.tensor([0, 1, 0, 1]))
    state = make_state(batch, model=Classifier(), loss_fn=nn.CrossEntropyLoss(), max_duration="100ba")
    short = run(SeqLengthWarmup(0.5, 4, 16, 4, input_key=0), state, Event.AFTER_DATALOADER)
    assert short[0].shape == (4, 4) and short[1] is batch[1]


def test_the_longest_entry_decides_whether_anything_is_cut():
    batch = {"features": torch.zeros(2, 3), "input_ids": tokens(), "labels": tokens()}
    short = set_batch_sequence_length(batch, 5)
    assert [value.shape[1] for value in short.values()] == [3, 5, 5]


def test_the_reserving_pass_draws_nothing_for_the_blocks_that_the_run_skips():
    algorithm = SeqLengthWarmup(0.8, 4, 8, 2)
    torch.manual_seed(0)
    model = TextNet()
    plugins = [StochasticDepth(drop_rate=0.5), algorithm]
    state = make_state(tuple(texts(2).tensors), model=model, loss_fn=nn.CrossEntropyLoss(), algorithms=plugins)
    engine = Engine(state, plugins=plugins)
    engine.fire(Event.INIT)
    before = state.generators["StochasticDepth"].get_state()
    engine.fire(Event.AFTER_DATALOADER)
    assert torch.equal(state.generators["StochasticDepth"].get_state(), before)
