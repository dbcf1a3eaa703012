"""Tests of the ready-made passes."""

import pytest

from drivetrain.compat import composer_passes as passes
from drivetrain.core.engine import Engine
from drivetrain.core.event import Event
from tests.core.helpers import Notes, NoteState, fired


class SelectiveBackprop(Notes):
    """Found by its name."""


class LowPrecisionLayerNorm(Notes):
    """Found by its name."""


def test_sorting_is_stable_to_front_and_back():
    items = [1, "a", 2, "b"]
    assert passes.sort_to_front(items, str) == ["a", "b", 1, 2]
    assert passes.sort_to_back(items, str) == [1, 2, "a", "b"]
    assert items == [1, "a", 2, "b"]


def test_the_named_sorts_move_their_algorithm():
    plugins = [LowPrecisionLayerNorm("norm", *Event), Notes("x", *Event), SelectiveBackprop("select", *Event)]
    both = [passes.sort_selective_backprop_first, passes.sort_low_precision_layernorm_last]
    engine = Engine(NoteState(), plugins=plugins, algorithm_passes=both)
    assert fired(engine, Event.AFTER_DATALOADER) == ["select", "x", "norm"]


def test_first_in_last_out_reverses_every_after_event():
    plugins = [Notes("a", Event.EPOCH_START, Event.EPOCH_END), Notes("b", Event.EPOCH_START, Event.EPOCH_END)]
    engine = Engine(NoteState(), plugins=plugins, algorithm_passes=passes.set_filo_order)
    assert fired(engine, Event.EPOCH_START) == ["a", "b"] and fired(engine, Event.EPOCH_END) == ["b", "a"]


def test_several_loss_interpolations_warn():
    tagged = [Notes(name, Event.INIT, tags=frozenset({"interpolates_loss"})) for name in ("mixup", "cutmix")]
    with pytest.warns(UserWarning, match="mixup and cutmix"):
        assert passes.warn_if_multiple_loss_interpolation(tagged, Event.INIT) == tagged
    assert passes.warn_if_multiple_loss_interpolation(tagged[:1], Event.INIT) == tagged[:1]
