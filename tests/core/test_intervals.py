"""Intervals that are due: exact for counts, forgiving for fractions."""

import pytest

from drivetrain.core.intervals import Interval
from drivetrain.core.time import Clock, Time


def test_an_interval_is_due_once_for_each_multiple_and_never_when_it_is_zero():
    every = Interval(Time(3, "ba"))
    assert [now for now in range(10) if every.passes(now)] == [3, 6, 9]
    assert not any(Interval(Time(0, "ba")).passes(now) for now in range(5))


def test_a_large_count_is_due_at_its_multiple_and_not_just_before():
    every = Interval(Time(10**12, "tok"))
    assert not every.passes(10**12 - 1) and every.passes(10**12)


def test_fractions_count_as_they_are_written():
    every = Interval(Time(0.1, "dur"))
    assert [every.passes(now) for now in (0.1, 0.2, 0.3, 0.35)] == [True, True, True, False]


@pytest.mark.parametrize("unit", ["ep", "ba", "st", "sp", "tok", "iter", "sec"])
def test_every_unit_is_read_from_the_clock(unit):
    every, clock = Interval(Time(2, unit)), Clock()
    assert not every.due(clock)
    name = {
        "ep": "epoch",
        "ba": "batch",
        "st": "step",
        "sp": "sample",
        "tok": "token",
        "iter": "iteration",
        "sec": "total_wct",
    }[unit]
    setattr(clock, name, 2)
    assert every.due(clock) and not every.due(clock)


def test_a_share_of_a_run_in_epochs_is_counted_in_batches():
    assert Interval(Time(0.5, "dur"), Time(3, "ep"), 10).every == Time(15, "ba")
