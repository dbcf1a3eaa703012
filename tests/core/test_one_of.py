"""Tests of algorithms that take turns."""

import json
from collections import Counter
from math import sqrt

import pytest
import torch

from drivetrain.core.engine import Engine
from drivetrain.core.errors import ConfigError, PluginConflictError, StateError
from drivetrain.core.event import Event
from drivetrain.core.one_of import OneOf
from drivetrain.core.plugin import Algorithm, Callback
from tests.core.helpers import Notes, NoteState, fired

BATCH = (Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BATCH_END)


class MixUp(Notes):
    writes, tags, conflicts = ("batch", "loss"), frozenset({"interpolates_loss"}), ("CutMix",)


class CutMix(Notes):
    writes, tags = ("batch", "loss"), frozenset({"interpolates_loss"})


def mixers(*events):
    return MixUp("mixup", *events), CutMix("cutmix", *events)


def batches(engine, count):
    """Run `count` batches and return who acted in each."""
    acted = []
    for _ in range(count):
        engine.state.notes.clear()
        for event in BATCH:
            engine.fire(event)
        engine.state.clock.next_batch()
        acted.append(list(engine.state.notes))
    return acted


def test_exactly_one_member_acts_throughout_a_batch():
    engine = Engine(NoteState(), plugins=[OneOf(*mixers(*BATCH))])
    acted = batches(engine, 50)
    assert all(len(notes) == len(BATCH) and len(set(notes)) == 1 for notes in acted)
    assert {notes[0] for notes in acted} == {"mixup", "cutmix"}


def test_a_choice_is_made_even_where_the_members_do_not_attend_its_event():
    engine = Engine(NoteState(), plugins=[OneOf(*mixers(Event.BEFORE_LOSS))])
    assert all(len(notes) == 1 for notes in batches(engine, 20))


@pytest.mark.parametrize("weights", [None, (3, 1), (0.0, 2.0)])
def test_weights_are_met_within_three_sigma_over_1000_batches(weights):
    engine = Engine(NoteState(), plugins=[OneOf(*mixers(Event.BEFORE_LOSS), weights=weights)])
    counts = Counter(notes[0] for notes in batches(engine, 1000))
    share = 0.5 if weights is None else weights[0] / sum(weights)
    assert abs(counts["mixup"] - 1000 * share) <= 3 * sqrt(1000 * share * (1 - share))


def test_the_same_seed_gives_the_same_turns_and_no_global_generator_is_touched():
    def turns(seed):
        return [notes[0] for notes in batches(Engine(NoteState(seed), plugins=[OneOf(*mixers(Event.BEFORE_LOSS))]), 40)]

    before = torch.get_rng_state()
    assert turns(1) == turns(1) != turns(2)
    assert torch.equal(before, torch.get_rng_state())


def test_outside_of_a_batch_every_member_acts():
    engine = Engine(NoteState(), plugins=[OneOf(*mixers(Event.INIT, Event.BEFORE_LOSS, Event.EVAL_START))])
    assert fired(engine, Event.INIT) == ["mixup", "cutmix"]
    batches(engine, 1)
    assert fired(engine, Event.EVAL_START) == ["mixup", "cutmix"]


def test_turns_can_last_an_epoch_and_survive_a_resumed_epoch():
    one = OneOf(*mixers(Event.EPOCH_START, Event.BEFORE_LOSS, Event.EPOCH_END), per="epoch")
    state = NoteState()
    engine = Engine(state, plugins=[one])
    turns = []
    for _ in range(20):
        acted = fired(engine, Event.EPOCH_START) + [notes[0] for notes in batches(engine, 3)]
        acted += fired(engine, Event.EPOCH_END)
        assert len(set(acted)) == 1 and len(acted) == 5
        turns.append(acted[0])
        assert fired(engine, Event.EPOCH_START) == acted[:1], "beginning the same epoch again keeps its choice"
        state.clock.next_epoch()
    assert set(turns) == {"mixup", "cutmix"}


def test_conflicting_members_are_no_conflict_inside_and_still_one_outside():
    Engine(NoteState(), plugins=[OneOf(*mixers(Event.BEFORE_LOSS))])
    with pytest.raises(PluginConflictError, match=r"mixup and cutmix.*OneOf\(MixUp\(...\), CutMix\(...\)\)"):
        Engine(NoteState(), plugins=mixers(Event.BEFORE_LOSS))
    with pytest.raises(
        PluginConflictError, match=r"OneOf\(mixup, cutmix\) and third cannot run together: both interpolate"
    ):
        Engine(NoteState(), plugins=[OneOf(*mixers(Event.BEFORE_LOSS)), CutMix("third", Event.BEFORE_LOSS)])


def test_members_that_change_more_than_the_batch_still_conflict():
    averages = [
        Notes(name, Event.EVAL_START, tags=frozenset({"average"}), writes=("model",)) for name in ("ema", "swa")
    ]
    with pytest.raises(PluginConflictError, match="ema and swa"):
        Engine(NoteState(), plugins=[OneOf(*averages)])


def test_the_composite_declares_what_its_members_declare():
    one = OneOf(
        Notes("a", Event.BEFORE_LOSS, reads=("x",), writes=("batch",), before=("#late",)), MixUp("m", Event.INIT)
    )
    assert one.events == {Event.AFTER_DATALOADER, Event.BEFORE_LOSS, Event.INIT}
    assert (one.reads, one.writes, one.tags) == (("x",), ("batch", "loss"), {"interpolates_loss"})
    assert str(one) == "OneOf(a, m)"


def test_declarations_of_members_order_the_composite():
    one = OneOf(Notes("a", Event.BEFORE_LOSS, before=("#late",)), Notes("b", Event.BEFORE_LOSS))
    late = Notes("late", Event.BEFORE_LOSS, tags=frozenset({"late"}))
    assert fired(Engine(NoteState(), plugins=[late, one]), Event.BEFORE_LOSS)[-1] == "late"


def test_state_continues_where_it_was():
    class Counting(Notes):
        count = 0

        def apply(self, event, state, logger):
            self.count += 1
            super().apply(event, state, logger)

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    def make():
        return OneOf(Counting("a", *BATCH), Counting("b", *BATCH))

    first, state = make(), NoteState()
    engine = Engine(state, plugins=[first])
    batches(engine, 7)
    saved, generator = json.loads(json.dumps(first.state_dict())), state.rng(str(first)).get_state()
    straight = batches(engine, 20)
    second, other = make(), NoteState()
    second.load_state_dict(saved)
    other.rng(str(second)).set_state(generator)
    assert batches(Engine(other, plugins=[second]), 20) == straight
    assert [member.count for member in second.members] == [member.count for member in first.members]
    with pytest.raises(StateError, match="has 2 members, the saved one had 1"):
        second.load_state_dict({**saved, "members": [{}]})


def test_members_are_closed_and_asked_for_weights():
    class Heavy(Notes):
        def inference_weights(self, state):
            return {"w": 1}

        def close(self, state, logger):
            state.notes.append("close")

        def post_close(self):
            self.released = True

    one = OneOf(Notes("a", Event.INIT), Heavy("b", Event.INIT))
    state = NoteState()
    assert one.inference_weights(state) == {"w": 1}
    Engine(state, plugins=[one]).close()
    assert state.notes == ["close"] and one.members[1].released


def test_composites_nest():
    inner = OneOf(Notes("a", *BATCH), Notes("b", *BATCH))
    acted = batches(Engine(NoteState(), plugins=[OneOf(inner, Notes("c", *BATCH))]), 100)
    assert all(len(set(notes)) == 1 and len(notes) == len(BATCH) for notes in acted)
    assert {notes[0] for notes in acted} == {"a", "b", "c"}


def test_the_configuration_describes_the_members():
    class Rate(Algorithm):
        events = frozenset({Event.BEFORE_LOSS})

        def __init__(self, rate=0.1):
            self.rate = rate

        def apply(self, event, state, logger):
            """Act."""

    assert OneOf(Rate(), Rate(0.5), weights=(1, 2)).config() == {
        "algorithms": [{"name": "Rate", "config": {"rate": 0.1}}, {"name": "Rate", "config": {"rate": 0.5}}],
        "weights": [1, 2],
        "per": "batch",
    }


def test_bad_arguments_are_refused_at_once():
    a, b = mixers(Event.BEFORE_LOSS)
    watcher = type("Watcher", (Callback,), {"batch_end": lambda self, state, logger: None})()
    for make, message in (
        (lambda: OneOf(a), "at least two"),
        (lambda: OneOf(a, b, weights=(1,)), "2 algorithms and 1 weights"),
        (lambda: OneOf(a, b, weights=(1, -1)), "not negative"),
        (lambda: OneOf(a, b, weights=(0, 0)), "not all zero"),
        (lambda: OneOf(a, b, weights=(float("nan"), 1)), "not negative"),
        (lambda: OneOf(a, b, per="bach"), "Did you mean 'batch'"),
        (lambda: OneOf(a, watcher), "define apply"),
        (lambda: OneOf(a, MixUp), "define apply"),
        (lambda: OneOf(a, Notes("early", Event.BEFORE_DATALOADER)), "BEFORE_DATALOADER"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
