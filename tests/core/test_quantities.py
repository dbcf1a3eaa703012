"""Sizes, durations and curves as text."""

import math

import pytest

from drivetrain.core.quantities import parse_size, shown_bytes, shown_seconds, sparkline


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (-3 * 2**20, "-3.0 MiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_sizes_are_shown_in_the_unit_that_suits_them(size, text):
    assert shown_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 2**34),
        ("1.5 GB", 1_500_000_000),
        (".5 kib", 512),
        ("7", 7),
        ("7 XB", None),
        ("", None),
        ("-1GB", None),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-6, "2.5 µs"),
        (0.0125, "12.5 ms"),
        (59.5, "59.5 s"),
        (60, "1 min 0 s"),
        (7260, "2 h 1 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_are_shown_in_one_or_two_units(seconds, text):
    assert shown_seconds(seconds) == text


def test_a_sparkline_shows_the_shape_of_the_finite_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁" and sparkline([]) == "" and len(sparkline(range(1000))) == 40
    assert sparkline([0.0, math.nan, 1.0, math.inf]) == "▁█"
