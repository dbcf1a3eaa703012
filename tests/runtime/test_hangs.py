"""The watch over ranks: limits, patience, and who is slow."""

import threading
import time

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.runtime import hangs
from drivetrain.runtime.hangs import RankWatch, Straggler, find_straggler, hang_limit


class Run:
    """A run whose counters a test sets."""

    def __init__(self, batch: int = 0):
        self.batch = batch

    def position(self):
        return (self.batch,)

    def describe(self):
        return f"batch {self.batch}"

    def times(self):
        return (0, 0.0, 0.0)


@pytest.fixture
def ended(monkeypatch):
    """Collect what would have ended the process."""
    calls = []

    def end(watch, stuck, reason):
        calls.append((stuck, reason))
        watch._done.set()

    monkeypatch.setattr(RankWatch, "_end", end)
    return calls


def wait_for(is_true, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true()


def test_a_run_without_progress_is_ended_after_the_limit(ended):
    run = Run()
    with RankWatch(run, 0.2):
        run.batch = 1
        assert wait_for(lambda: ended)
    (stuck, reason), *_ = ended
    assert stuck > 0.2 and "hang_timeout is 0.2 s" in reason and "×" not in reason


class Unreachable:
    """A store behind a network that is down: it never answers."""

    def check(self, names):
        threading.Event().wait(60)


class Gone:
    """A store whose process has ended."""

    def check(self, names):
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("store", [Unreachable(), Gone()])
def test_a_rank_is_watched_where_the_store_cannot_be_reached(ended, monkeypatch, store):
    monkeypatch.setattr(hangs, "ANSWER_SECONDS", 0.1)
    run = Run()
    watch = RankWatch(run, 0.2)
    watch._store = store
    with watch:
        run.batch = 1
        assert wait_for(lambda: ended)


class Reporting:
    """A store in which another rank has said that it hangs."""

    def check(self, names):
        return True

    def get(self, name):
        return b"rank 1, batch 3"


def test_what_another_rank_reports_ends_this_one(ended):
    watch = RankWatch(Run(), 1)
    watch._store = Reporting()
    with watch:
        assert wait_for(lambda: ended)
    assert ended[0][1] == "another rank reports: rank 1, batch 3"


def test_a_run_with_progress_goes_on(ended):
    run = Run()
    with RankWatch(run, 0.5):
        for _ in range(40):
            run.batch += 1
            time.sleep(0.02)
    assert not ended


def test_the_first_batch_has_four_times_the_limit(ended):
    with RankWatch(Run(), 0.1):
        assert wait_for(lambda: ended)
    assert ended[0][0] > 0.4 and "× 4" in ended[0][1]


def test_code_that_may_take_long_has_four_times_the_limit(ended, monkeypatch):
    monkeypatch.setattr(hangs, "PATIENT", (__file__,))
    run = Run()
    with RankWatch(run, 0.1):
        run.batch = 1
        assert wait_for(lambda: ended)
    assert ended[0][0] > 0.4


def test_no_thread_is_left_behind():
    before = set(threading.enumerate())
    with RankWatch(Run(), 5):
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(
    ("seconds", "step", "slow"),
    [
        ([0.1, 0.1, 0.4], 0.5, 2),
        ([0.4, 0.1], 0.5, 0),
        ([0.11, 0.1, 0.1], 0.5, None),  # a delay of 2 % of the step
        ([0.1], 0.1, None),
        ([0.0, 0.0], 0.0, None),
    ],
)
def test_a_rank_is_slow_where_it_delays_the_step(seconds, step, slow):
    found = find_straggler(seconds, step)
    assert (None if found is None else found.rank) == slow


def test_a_rank_is_named_when_it_was_slow_twice_and_not_at_every_comparison(caplog):
    watch = RankWatch(Run(), None)
    slow = Straggler(3, 0.4, 0.1, 0.5)
    watch._find_slow_rank(slow)
    assert watch.straggler is None
    watch._find_slow_rank(slow)
    assert watch.straggler == slow and "rank 3 is slow" in caplog.text and "60%" in caplog.text
    watch.straggler = None
    watch._find_slow_rank(slow)
    assert watch.straggler is None


def test_the_environment_sets_the_limit_and_nonsense_is_rejected(monkeypatch):
    assert hang_limit(None) is None and hang_limit(7.0) == 7.0 and hang_limit(0) is None
    monkeypatch.setenv(hangs.HANG_VARIABLE, "90")
    assert hang_limit(None) == 90.0
    monkeypatch.setenv(hangs.HANG_VARIABLE, "0")
    assert hang_limit(None) is None
    for nonsense in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv(hangs.HANG_VARIABLE, nonsense)
        with pytest.raises(ConfigError, match=hangs.HANG_VARIABLE):
            hang_limit(None)
