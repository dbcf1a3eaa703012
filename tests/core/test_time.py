"""Tests of moments and of the clock."""

import copy
import json
from datetime import timedelta
from time import sleep

import pytest

from drivetrain.core.errors import ConfigError, ConfigTypeError, StateError, TimeUnitError
from drivetrain.core.time import FIELDS, Clock, Interval, Time, Timestamp, elapsed_duration


def test_a_batch_counts_everywhere_and_an_epoch_resets_its_own_counters():
    now = (
        Timestamp().to_next_batch(samples=4, tokens=100, duration=2.0).to_next_batch(4, 50, timedelta(seconds=1), False)
    )
    assert (now.batch, now.step, now.sample, now.token) == (2, 1, 8, 150)
    assert (now.batch_in_epoch, now.step_in_epoch, now.sample_in_epoch, now.token_in_epoch) == (2, 1, 8, 150)
    assert (now.total_wct, now.epoch_wct, now.batch_wct) == (3.0, 3.0, 1.0)
    after = now.to_next_epoch(duration=1.0)
    assert (after.epoch, after.batch, after.batch_in_epoch, after.sample_in_epoch) == (1, 2, 0, 0)
    assert (after.batch_in_iteration, after.epoch_in_iteration) == (2, 1)
    assert (after.total_wct, after.epoch_wct, after.batch_wct) == (4.0, 0.0, 0.0)
    later = after.to_next_iteration()
    assert (later.iteration, later.epoch, later.epoch_in_iteration, later.batch_in_iteration, later.token) == (
        1,
        1,
        0,
        0,
        150,
    )
    assert Timestamp() == Timestamp(), "the moments before are unchanged"


def test_a_moment_compares_with_times_and_strings():
    now = Timestamp(epoch=3, batch=30, sample=300, step=15, total_wct=90.0)
    assert now >= "3ep" and now < Time(31, "ba") and now == "300sp" and now != "16st" and now > "1m"
    assert now.get("sec") == Time(90.0, "sec") and now.get("st") == "15st"
    with pytest.raises(RuntimeError, match="fraction of the run"):
        now.get("dur")
    with pytest.raises(TypeError):
        _ = now < 3


def test_a_moment_is_immutable_and_copies_with_changes():
    now = Timestamp(batch=3)
    with pytest.raises(AttributeError):
        now.batch = 4
    assert now.copy(batch=5) == Timestamp(batch=5) and hash(now.copy()) == hash(now)
    with pytest.raises(ConfigTypeError, match="Did you mean 'batch'"):
        now.copy(bacth=5)


def test_saved_moments_are_plain_and_come_back():
    now = Timestamp(epoch=1, batch=7, total_wct=1.5)
    saved = json.loads(json.dumps(now.state_dict()))
    assert Timestamp.load_state_dict(saved) == now
    with pytest.raises(StateError, match="lacks step"):
        Timestamp.load_state_dict({name: 0 for name in FIELDS if name != "step"})
    with pytest.raises(StateError, match="unknown timestamp field 'bacth'"):
        Timestamp.load_state_dict({**saved, "bacth": 0})


def test_the_clock_agrees_with_the_chain_of_moments():
    clock, moment = Clock(), Timestamp()
    for epoch in range(3):
        for batch in range(5):
            clock.next_batch(samples=8, tokens=batch, stepped=batch % 2 == 1)
            moment = moment.to_next_batch(8, batch, stepped=batch % 2 == 1)
            assert clock.snapshot() == moment
        clock.next_epoch()
        moment = moment.to_next_epoch()
        if epoch == 1:
            clock.next_iteration()
            moment = moment.to_next_iteration()
        assert clock.snapshot() == moment
    assert {name: type(value) for name, value in clock.state_dict().items()} == {
        name: float if name.endswith("wct") else int for name in FIELDS
    }


def test_a_snapshot_stays_when_the_clock_moves():
    clock = Clock()
    before = clock.snapshot()
    clock.next_batch()
    assert before.batch == 0 and clock.snapshot().batch == 1
    with pytest.raises(AttributeError):
        before.batch = 1


def test_the_clock_continues_from_a_saved_moment():
    clock = Clock()
    clock.next_batch(samples=3)
    clock.next_epoch()
    other = Clock()
    other.load_state_dict(json.loads(json.dumps(clock.state_dict())))
    assert other.snapshot() == clock.snapshot() == copy.deepcopy(clock).snapshot()
    other.reset()
    assert other.snapshot() == Timestamp()
    with pytest.raises(StateError):
        other.load_state_dict({"batch": 1})


def test_wall_clock_time_counts_only_between_start_and_stop():
    clock = Clock()
    sleep(0.01)
    clock.next_batch()
    assert clock.total_wct == 0.0
    clock.load_state_dict({**clock.state_dict(), "total_wct": 100.0})
    clock.start()
    sleep(0.02)
    clock.next_batch()
    assert 100.02 <= clock.total_wct < 101 and 0.02 <= clock.batch_wct < 1 and clock.epoch_wct == clock.batch_wct
    sleep(0.01)
    assert clock.total_seconds() >= clock.total_wct + 0.01
    clock.stop()
    assert clock.total_seconds() == clock.total_wct
    stopped = clock.total_wct
    assert stopped >= 100.03
    sleep(0.01)
    clock.next_epoch()
    assert clock.total_wct == stopped and clock.epoch_wct == 0.0
    assert clock.reached(Time(100, "sec")) and not clock.reached(Time(200, "sec"))


def test_a_shared_clock_goes_forward_only():
    clock = Clock()
    clock.next_epoch()
    for seconds, total, passed in ((3.0, 3.0, 3.0), (2.0, 3.0, 0.0), (4.5, 4.5, 1.5)):
        clock.advance_to(seconds)
        assert (clock.total_wct, clock.epoch_wct, clock.iteration_wct, clock.batch_wct) == (total, total, total, passed)


@pytest.mark.parametrize("unit", ["iter", "ep", "ba", "st", "sp", "tok", "sec"])
def test_reached_is_true_from_the_given_count_on(unit):
    clock = Clock()
    clock.load_state_dict(dict.fromkeys(FIELDS, 5))
    assert clock.reached(Time(5, unit)) and clock.reached(Time(4, unit)) and not clock.reached(Time(6, unit))
    assert clock.get(unit) == Time(5, unit)


def test_a_fraction_of_the_run_is_reached_in_batches_of_an_epoch_too():
    clock = Clock()
    ten, seven_epochs = Time(10, "ba"), Time(7, "ep")
    reached = []
    for batch in range(1, 11):
        clock.next_batch()
        if clock.reached(Time(0.3, "dur"), ten):
            reached.append(batch)
    assert reached[0] == 3
    clock.reset()
    for _ in range(10):
        clock.next_batch()
    clock.next_epoch()
    for batch in range(1, 6):
        clock.next_batch()
        assert clock.reached(Time(0.2, "dur"), seven_epochs, 10) is (batch >= 4), "0.2dur of 7ep is 1.4 epochs"
    with pytest.raises(TimeUnitError, match="set max_duration"):
        clock.reached(Time(0.2, "dur"))


def test_elapsed_duration_follows_the_unit_of_the_limit():
    now = Timestamp(epoch=2, batch=25, batch_in_epoch=5, step=12, sample=100, token=1000, total_wct=30.0)
    assert elapsed_duration(now, Time(4, "ep"), 10) == 2.5 / 4
    assert elapsed_duration(now, Time(4, "ep")) == 0.5
    assert elapsed_duration(now, Time(100, "ba")) == 0.25
    assert elapsed_duration(now, Time(60, "sec")) == 0.5
    assert elapsed_duration(now, Time(48, "st")) == 0.25
    assert elapsed_duration(now, None) is None
    assert elapsed_duration(now, Time(0, "ep")) == 1.0


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
    assert Interval(Time(0.1, "dur"), Time(3, "ba")).every == Time(1, "ba")
    assert Interval(Time(0.1, "dur"), Time(5, "sec")).every == Time(0.5, "sec")


def test_share_of_zero_is_never_due_and_a_share_needs_the_length_of_the_run():
    never = Interval(Time(0, "dur"), Time(10, "ep"), 5)
    assert never.every.value == 0 and not any(never.passes(now) for now in range(60))
    for count in ("reset", "due"):
        with pytest.raises(TimeUnitError, match="fraction of the run"):
            getattr(Interval(Time(0.1, "dur")), count)(Clock())  # it was counted in seconds


@pytest.mark.parametrize("digits", [400, 5000])
def test_number_beyond_any_float_is_an_error_that_says_so(digits):
    for unit in ("h", "s", "ep", "sec"):
        with pytest.raises(ConfigError, match="larger than 1e18"):
            Time.from_timestring("9" * digits + unit)
