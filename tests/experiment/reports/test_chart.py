"""Scales, ticks, thinning and smoothing."""

import math

import pytest

from drivetrain.experiment.reports.chart import log_ticks, round_ticks, scale_for, short, smooth, thin


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (1e-9, 2e-9), (1e6, 5e7), (0.97, 0.99)])
def test_ticks_are_few_round_and_inside(low, high):
    ticks = round_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 7 and all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in ticks)


def test_log_ticks_are_powers_of_ten_where_the_range_holds_some():
    assert log_ticks(0.5, 2000, 5) == [1.0, 10.0, 100.0, 1000.0]
    assert log_ticks(2.0, 8.0, 5) == [2.0, 4.0, 6.0, 8.0]


def test_a_scale_maps_ends_to_ends_and_survives_one_value():
    scale = scale_for([2.0, 4.0, math.nan, math.inf], 100, 0)
    assert scale.place(2.0) == 100 and scale.place(4.0) == 0 and scale.place(3.0) == 50
    for values in ([5.0], [0.0, 0.0], [], [math.nan]):
        assert math.isfinite(scale_for(values, 0, 10).place(1.0))
        assert math.isfinite(scale_for(values, 0, 10, is_log=True).place(1.0))


def test_thinning_keeps_every_peak():
    points = [(step, 0.0) for step in range(100_000)]
    points[54_321] = (54_321, 9.0)
    points[777] = (777, -9.0)
    thinned = thin(points, 600)
    assert len(thinned) <= 600 and points[54_321] in thinned and points[777] in thinned
    assert thinned == sorted(thinned)


def test_the_moving_mean_of_a_constant_is_the_constant():
    assert smooth([3.0] * 50, 10) == pytest.approx([3.0] * 50)
    assert smooth([0.0, 1.0], 3) == pytest.approx([0.0, 2 / 3])


def test_short_numbers():
    assert [short(value) for value in (0, 0.123456, 1234.0, 1e-8, 5e9, math.nan)] == [
        "0",
        "0.1235",
        "1234",
        "1e-08",
        "5G",
        "nan",
    ]
