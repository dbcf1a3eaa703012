"""The promises about the cost of an event, and the ruler they are measured with."""

import json

from benchmarks.event_cost import STEP, Act, Watch, calling, calling_hook, firing, five_algorithms, skipping
from benchmarks.timing import alternate, compare, environment, low, write_result
from drivetrain.core.event import Event

MICRO = 1e-6


def test_events_cost_what_is_promised():
    one = (Event.AFTER_LOSS,)
    times = compare(
        {
            "loop": skipping(one),
            "no guest": firing(events=one),
            "itself": calling(Act()),
            "one guest": firing(Act(), events=one),
            "hook itself": calling_hook(Watch()),
            "one hook": firing(Watch(), events=(Event.STEP_OUTPUT,)),
            "five": firing(*five_algorithms(), events=STEP),
        },
        blocks=40,
    )
    assert times["no guest"] - times["loop"] < 1 * MICRO
    assert times["one guest"] - times["itself"] < 3 * MICRO
    assert times["one hook"] - times["hook itself"] < 3 * MICRO
    assert times["five"] < 100 * MICRO


def test_loops_take_turns_and_may_bring_their_own_time():
    ran = []
    seconds = alternate(
        {"a": lambda steps: ran.append("a"), "b": lambda steps: ran.append("b") or 2.0}, blocks=2, steps=4
    )
    assert ran == ["a", "b", "a", "b", "b", "a"], "one block each to warm up, then in turns, forwards and backwards"
    assert seconds["b"] == [0.5, 0.5] and all(0 <= value < 1 for value in seconds["a"])


def test_a_low_percentile_is_not_the_mean_of_a_burst():
    assert low([5.0, 1.0, 100.0, 2.0, 3.0], 0.25) == 2.0 and low([7.0]) == 7.0


def test_a_result_carries_its_circumstances(tmp_path):
    path = write_result("x", {"ratio": 2.0} | environment(runs=3), tmp_path / "results")
    written = json.loads(path.read_text())
    assert written["ratio"] == 2.0 and written["runs"] == 3 and written["cpus"] >= 1
    assert {"date", "cpu", "python", "torch", "drivetrain", "load_average"} <= set(written)
