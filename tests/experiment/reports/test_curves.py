"""Curves of few points: exact where they are short, with every spike and the right mean where they are long."""

import itertools
import json
import math
import random
import struct
import tracemalloc
from base64 import b64decode

import pytest

from drivetrain.experiment.reports.curves import MOST_POINTS, Curve, DownsampledSequence, MetricsCurves, encode
from drivetrain.experiment.summaries import TagSummary, read_added
from tests.experiment.test_summaries import scalar, write_rows


def decoded(text):
    """Read back what `encode` wrote."""
    code, size = {"u": ("I", 4), "f": ("f", 4), "d": ("d", 8)}[text[0]]
    data = b64decode(text[1:])
    return list(struct.unpack(f"<{len(data) // size}{code}", data))


def curve_of(values, *, pieces=1, steps=None):
    curve, steps = Curve(), list(range(len(values))) if steps is None else steps
    size = -(-len(values) // pieces)
    for first in range(0, len(values), size):
        curve.extend(steps[first : first + size], values[first : first + size])
    return curve


def points_of(data):
    return list(zip(decoded(data["x"]), decoded(data["y"])))


def test_a_short_curve_is_exact():
    values = [math.sin(step) for step in range(MOST_POINTS)]
    data = curve_of(values).as_data()
    assert decoded(data["x"]) == list(range(MOST_POINTS)) and decoded(data["y"]) == pytest.approx(values, rel=1e-6)
    assert data["n"] == MOST_POINTS and "m" not in data and "gaps" not in data


@pytest.mark.parametrize("length", [2001, 10_000, 123_457])
def test_a_long_curve_keeps_every_spike_and_the_mean_of_its_values(length):
    values = [0.25] * length
    spikes = {777: -9.0, length // 2: 9.0, length - 1: 5.0}
    for step, value in spikes.items():
        values[step] = value
    curve = curve_of(values, pieces=13)
    data = curve.as_data()
    points = points_of(data)
    assert len(points) <= MOST_POINTS and set(spikes.items()) <= set(points)
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    counts = [stretch.num_finite for stretch in curve.stretches]
    assert sum(counts) == length and set(counts[:-1]) == {curve.size}
    means = decoded(data["m"])
    assert len(means) == len(points) / 2
    assert math.fsum(m * n for m, n in zip(means, counts)) == pytest.approx(math.fsum(values), rel=1e-6)


def test_a_curve_can_be_made_shorter_when_it_is_written():
    values = [0.0] * 50_000
    values[33_333] = 7.0
    data = curve_of(values).as_data(100)
    assert len(points_of(data)) <= 100 and (33_333, 7.0) in points_of(data)


def test_the_pieces_in_which_values_arrive_make_no_difference():
    draw = random.Random(1)
    values = [draw.choice([draw.gauss(0, 1), math.nan, math.inf, 3.0]) for _ in range(9_001)]
    whole = curve_of(values)
    for pieces in (2, 7, 100, 9_001):
        other = curve_of(values, pieces=pieces)
        assert [tuple(stretch[:4]) for stretch in other.stretches] == [
            tuple(stretch[:4]) for stretch in whole.stretches
        ]
        assert other.bad_step == whole.bad_step
        assert other.as_data()["gaps"] == whole.as_data()["gaps"]


def test_a_summary_of_many_values_at_once_is_that_of_one_after_the_other():
    draw = random.Random(2)
    for _ in range(50):
        values = [draw.choice([1.0, -1.0, 1e308, draw.gauss(0, 1), math.nan, -math.inf]) for _ in range(20)]
        if draw.random() < 0.5:
            values = [value for value in values if math.isfinite(value)] or [0.0]
        one, many = TagSummary(), TagSummary()
        for step, value in enumerate(values):
            one.extend([step], [value])
        many.extend(list(range(len(values))), values)
        assert repr(one) == repr(many)
        finite = [value for value in values if math.isfinite(value)]
        assert (many.low, many.high) == (min(finite, default=math.inf), max(finite, default=-math.inf))


def test_values_that_are_not_finite_are_gaps():
    data = curve_of([1.0, math.nan, 2.0, math.inf]).as_data()
    assert points_of(data) == [(0, 1.0), (2, 2.0)] and data["gaps"] == [1, 3]
    data = curve_of([math.nan] * 3).as_data()
    assert points_of(data) == [] and data["gaps"] == [0, 1, 2]


def test_values_whose_sum_is_too_large_still_have_a_mean():
    data = curve_of([1e308] * 5000).as_data()
    assert set(decoded(data["m"])) == {1e308} and "gaps" not in data


def test_steps_that_go_back_are_put_in_order():
    data = curve_of([1.0, 2.0, 3.0], steps=[5, 1, 3]).as_data()
    assert points_of(data) == [(1, 2.0), (3, 3.0), (5, 1.0)]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 5, 2**32 - 1], "u"),
        ([-1, 5], "f"),
        ([2**32], "d"),
        ([0.5, 1.5], "f"),
        ([1e300, 1.0], "d"),
        ([1_770_000_000.125, 1_770_000_000.25], "d"),
        ([], "u"),
    ],
)
def test_numbers_are_written_as_precisely_as_they_need(values, kind):
    text = encode(values)
    assert text[0] == kind and decoded(text) == pytest.approx(values, rel=1e-6)
    if kind == "d":
        assert decoded(text) == values


def test_a_file_that_grows_gives_the_curves_of_the_whole_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    grown = MetricsCurves()
    for part in range(5):
        rows = [scalar(part * 1000 + step, "loss", step * 0.5) for step in range(1000)]
        rows.append({"step": part, "time": 1, "kind": "text", "tag": "note", "value": f"part {part}"})
        if part == 3:
            rows.append({"kind": "resume", "step": 2500, "time": 1.0})
        write_rows(file, rows)
        grown = read_added(grown, file)
    whole = read_added(MetricsCurves(), file)
    assert grown.curves["loss"].as_data() == whole.curves["loss"].as_data() and grown.texts == {"note": "part 4"}
    assert whole.curves["loss"].count == 2500 + 1000 and grown.knots[0] == (0, 1.5)


def test_of_histograms_and_times_evenly_spaced_ones_are_kept():
    thinned = DownsampledSequence(10)
    for first in range(0, 1000, 7):
        thinned.extend(list(range(first, min(first + 7, 1000))))
    kept = thinned.entries
    assert (
        len(kept) <= 22
        and kept[0] == 0
        and kept[-1] == 999
        and len({b - a for a, b in itertools.pairwise(kept[:-1])}) == 1
    )


@pytest.mark.parametrize(
    "value",
    [
        {"low": 0, "high": 1, "counts": []},
        {"low": "nan", "high": 1, "counts": [1]},
        {"low": 1, "high": 0, "counts": [1]},
    ]
    + [{"low": 0, "high": 1, "counts": [-1]}, {"low": 0, "high": 1, "counts": ["<b>"]}, [1], "text", None],
)
def test_what_is_not_a_histogram_is_left_out(tmp_path, value):
    file = tmp_path / "metrics.jsonl"
    good = {"low": 0, "high": 1, "counts": [1, 2]}
    rows = [{"step": s, "time": 1, "kind": "histogram", "tag": "w", "value": v} for s, v in enumerate([good, value])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_added(MetricsCurves(), file).histograms["w"].entries == [{"step": 0} | good]


def test_a_long_file_needs_no_more_memory_than_a_short_one(tmp_path):
    peaks = []
    for rows in (5_000, 20_000):
        file = tmp_path / f"{rows}.jsonl"
        with open(file, "w") as stream:
            for row in range(rows):
                stream.write(
                    f'{{"step": {row}, "time": 1.000, "kind": "scalar", "tag": "loss", "value": {row * 0.5}}}\n'
                )
        tracemalloc.start()
        read_added(MetricsCurves(), file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
