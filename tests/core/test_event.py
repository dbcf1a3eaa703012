"""Tests of the list of events."""

import json
import pickle

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.core.event import LOOP, TRUE_PAIRS, Event

LISTED = """
INIT BEFORE_LOAD AFTER_LOAD FIT_START ITERATION_START EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER BATCH_START
BEFORE_TRAIN_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS STEP_OUTPUT BEFORE_BACKWARD AFTER_BACKWARD
AFTER_TRAIN_BATCH BEFORE_STEP AFTER_STEP BATCH_END BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT ITERATION_END
ITERATION_CHECKPOINT FIT_END STOP
EVAL_STANDALONE_START EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END
EVAL_END EVAL_AFTER_ALL EVAL_STANDALONE_END
PREDICT_START PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END PREDICT_END
"""
NAMES = LISTED.split()


def test_the_44_events_are_listed_in_firing_order():
    assert [event.name for event in Event] == NAMES
    assert len(NAMES) == 44
    assert all(event.value == event.name.lower() for event in Event)


def test_the_docstring_is_the_picture_and_shows_every_event_once():
    assert Event.__doc__ == LOOP
    drawn = [line.split()[0] for line in LOOP.splitlines()[2:] if line.split()[0] in Event.__members__]
    assert sorted(drawn) == sorted(NAMES)
    training = [name for name in NAMES if not name.startswith(("EVAL", "PREDICT"))]
    assert [name for name in drawn if name in training] == training
    assert [name for name in drawn if name not in training] == NAMES[28:]


@pytest.mark.parametrize("text", ["after_loss", "AFTER_LOSS", " After_Loss "])
def test_an_event_is_found_by_its_name_in_any_case(text):
    assert Event(text) is Event.AFTER_LOSS


def test_a_mistyped_event_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown event 'after_los'.*Did you mean 'after_loss'"):
        Event("after_los")
    with pytest.raises(ValueError, match="unknown event 3"):
        Event(3)


def test_an_event_is_its_own_string_for_hashing_printing_and_json():
    assert {Event.BATCH_END: 1}["batch_end"] == 1
    assert f"{Event.BATCH_END}" == str(Event.BATCH_END) == "batch_end"
    assert json.loads(json.dumps([Event.BATCH_END])) == ["batch_end"]
    assert pickle.loads(pickle.dumps(Event.BATCH_END)) is Event.BATCH_END


def test_before_and_after_are_read_from_the_name():
    assert Event.EVAL_BEFORE_FORWARD.is_before_event and Event.EPOCH_START.is_before_event
    assert Event.AFTER_LOAD.is_after_event and Event.FIT_END.is_after_event
    neither = {Event.INIT, Event.STEP_OUTPUT, Event.STOP}
    neither |= {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT}
    assert {event for event in Event if not event.is_before_event and not event.is_after_event} == neither
    assert not any(event.is_before_event and event.is_after_event for event in Event)


def test_both_halves_of_a_pair_share_the_canonical_name():
    assert Event.BEFORE_LOSS.canonical_name == Event.AFTER_LOSS.canonical_name == "loss"
    assert Event.EVAL_BEFORE_FORWARD.canonical_name == "eval_forward"
    assert Event.EPOCH_START.canonical_name == "epoch"
    assert all(first.canonical_name == second.canonical_name for first, second in TRUE_PAIRS)


def test_only_true_pairs_have_partners():
    assert Event.BEFORE_STEP.partner is Event.AFTER_STEP
    assert Event.EVAL_END.partner is Event.EVAL_START
    assert Event.PREDICT_END.partner is Event.PREDICT_START
    moments = "AFTER_DATALOADER AFTER_LOAD AFTER_TRAIN_BATCH BATCH_END EPOCH_END EVAL_BATCH_END FIT_END EVAL_AFTER_ALL"
    assert all(Event[name].partner is None for name in moments.split())
    assert sum(event.partner is not None for event in Event) == 18


def test_evaluation_and_prediction_events_know_it():
    assert sum(event.is_eval for event in Event) == 10
    assert sum(event.is_predict for event in Event) == 6
