from types import SimpleNamespace

import pytest

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.progress import Progress, Schedule
from drivetrain.context.context import Context
from drivetrain.context.state import State
from drivetrain.core.errors import ConfigError
from drivetrain.core.time import Clock, Time, TimeUnit


def test_a_clock_is_read_and_without_one_calls_are_counted():
    clock = Clock()
    progress = Progress(Context(clock=clock))
    clock.next_batch(samples=8, tokens=100, stepped=False)
    clock.next_batch(samples=8, tokens=100)
    assert progress.snapshot() | {"sec": 0} == {"ep": 0, "ba": 2, "st": 1, "sp": 16, "tok": 200, "iter": 0, "sec": 0}
    assert progress.checkpoint_id() == "ep0-ba2"
    progress = Progress(Context(x=1))
    progress.num_calls = 7
    assert progress.snapshot() | {"sec": 0} == {"ba": 7, "st": 7, "sec": 0} and progress.checkpoint_id() == "ba7"


def test_a_later_progress_of_a_restored_source_goes_on():
    ctx = Context(x=1)
    Progress(ctx).resume({"ba": 12, "sec": 50.0})
    later = Progress(ctx)
    assert later.num_calls == 12 and 50 <= later.snapshot()["sec"] < 60
    assert Progress(Context(x=1)).num_calls == 0


def test_a_source_that_cannot_be_a_key_still_works():
    progress = Progress(SimpleNamespace(epoch=3))  # compares by value, so it has no hash
    progress.resume({"ba": 2})
    assert progress.num_calls == 2 and progress.checkpoint_id() == "ep3-ba2"


def test_a_schedule_is_due_once_per_interval_however_large_the_steps():
    progress = Progress(Context(x=1))
    schedule = Schedule(Time(10, "ba"), progress)
    due = []
    for progress.num_calls in (3, 9, 10, 11, 19, 35, 36, 40):
        due.append(schedule.is_due())
    assert due == [False, False, True, False, False, True, False, True]
    assert not Schedule(None, progress).is_due()


def test_fractions_of_a_run_are_counted_without_rounding_errors():
    state = Context(x=1)
    state.get_elapsed_duration = lambda: Time(state.x / 10, "dur")
    state.x = 0
    progress = Progress(state)
    schedule = Schedule(Time(0.1, "dur"), progress)
    due = []
    for state.x in range(1, 11):
        due.append(schedule.is_due())
    assert due == [True] * 10


def test_a_unit_nobody_counts_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="'3tok' cannot be counted.* counts ba, st, sec"):
        Progress(Context(x=1)).check_unit(Time(3, "tok"), "every")


def test_every_unit_that_is_counted_is_in_the_manifest(tmp_path):
    """Retention by `keep_every` reads them there: shares of a run and iterations were missing, and all checkpoints removed."""
    state = State(max_duration="8ba")
    with Checkpointer(state, every="1ba", keep=1, keep_every="0.25dur", dir=tmp_path, signals=False) as keeper:
        for _ in range(8):
            state.clock.next_batch(samples=3)
            keeper.step()
        assert [entry.manifest.progress["ba"] for entry in keeper.list()] == [2, 4, 6, 8]
        assert keeper.list()[0].manifest.progress.keys() == set(TimeUnit)
