"""Tests of lengths of training time."""

from datetime import timedelta

import pytest

from drivetrain.core.errors import ConfigError, ConfigTypeError
from drivetrain.core.time import Time, TimeUnit, ensure_time


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ep", 10, "ep"),
        ("3e4tok", 30000, "tok"),
        ("30_000tok", 30000, "tok"),
        ("1_0.2_5sec", 10.25, "sec"),
        ("0.5dur", 0.5, "dur"),
        ("30sec", 30, "sec"),
        ("1.5sec", 1.5, "sec"),
        ("1h20m40s", 4840, "sec"),
        ("90m", 5400, "sec"),
        ("36h", 129600, "sec"),
        ("1.5h", 5400, "sec"),
        ("10EP", 10, "ep"),
        (" 7 ba ", 7, "ba"),
        ("5st", 5, "st"),
        ("2iter", 2, "iter"),
        ("100sp", 100, "sp"),
        ("0.5e1ep", 5, "ep"),
        ("-3ba", -3, "ba"),
        ("123456789012345678tok", 123456789012345678, "tok"),
    ],
)
def test_time_strings_are_read_exactly(text, value, unit):
    time = Time.from_timestring(text)
    assert (time.value, time.unit.value, type(time.value)) == (value, unit, type(value))
    assert Time.from_timestring(str(time)) == time


@pytest.mark.parametrize(
    "text",
    ["", "ep", "10", "10 20ep", "1h2", "nanep", "infsec", "1e999999999tok", "10e p", "m", "1__0ba", "_10ba", "10_ba"],
)
def test_what_is_no_time_string_is_a_value_error_that_lists_the_units(text):
    with pytest.raises(ValueError, match=r"iter|larger than") as error:
        Time.from_timestring(text)
    assert isinstance(error.value, ConfigError)


def test_an_unknown_unit_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown time unit 'epp'. Did you mean '10ep'"):
        Time.from_timestring("10epp")
    with pytest.raises(ConfigError, match="unknown time unit 'bach'"):
        Time(1, "bach")


def test_counts_must_be_whole():
    with pytest.raises(TypeError, match=r"'1.5ep' is not whole.*'1ep' or '2ep'"):
        Time.from_timestring("1.5ep")
    with pytest.raises(ConfigTypeError):
        Time(0.5, TimeUnit.BATCH)
    assert Time(2.0, "ep").value == 2


@pytest.mark.parametrize("value", ["3", None, True, float("nan"), float("inf")])
def test_a_time_needs_a_finite_number(value):
    with pytest.raises(TypeError, match="needs a"):
        Time(value, "sec")


def test_str_and_repr():
    assert str(Time(10, "ep")) == Time(10, "ep").to_timestring() == "10ep"
    assert repr(Time(10, "ep")) == "Time(10, TimeUnit.EPOCH)"
    assert repr(Time.from_duration(0.5)) == "Time(0.5, TimeUnit.DURATION)"


def test_constructors_by_unit():
    made = [
        Time.from_iteration(1),
        Time.from_epoch(1),
        Time.from_batch(1),
        Time.from_step(1),
        Time.from_sample(1),
        Time.from_token(1),
        Time.from_duration(1),
        Time.from_timedelta(timedelta(seconds=1)),
    ]
    assert [time.unit for time in made] == list(TimeUnit)
    assert Time.from_timedelta("90m") == Time(5400, "sec")
    with pytest.raises(ConfigError, match="not a wall-clock time"):
        Time.from_timedelta("3ep")


def test_times_of_different_units_do_not_compare_or_add():
    one, other = Time(1, "ep"), Time(1, "ba")
    for action in (
        lambda: one == other,
        lambda: one != other,
        lambda: one < other,
        lambda: one >= other,
        lambda: one + other,
        lambda: one - other,
        lambda: one / other,
        lambda: one * other,
        lambda: one % other,
    ):
        with pytest.raises(RuntimeError, match="1ep"):
            action()


def test_comparisons_accept_times_strings_and_numbers():
    assert Time(3, "ep") == "3ep" and Time(3, "ep") == 3 and Time(3, "ep") < "4ep" and Time(3, "ep") >= Time(3, "ep")
    assert Time(3, "ep") != "4ep" and 2 < Time(3, "ep") <= 3
    assert Time(3, "ep") != None  # noqa: E711
    with pytest.raises(TypeError):
        _ = Time(3, "ep") < None


def test_arithmetic_keeps_the_unit_and_truncates_counts():
    assert Time(3, "ep") + Time(4, "ep") == Time(7, "ep") and 1 + Time(3, "ep") == "4ep"
    assert Time(3, "ep") - "1ep" == "2ep" and 5 - Time(3, "ep") == "2ep" and -Time(3, "ep") == "-3ep"
    assert Time(7, "ba") * 0.5 == "3ba" and 2 * Time(7, "ba") == "14ba" and Time(7, "ba") / 2 == "3ba"
    assert Time(-7, "ba") * 0.5 == "-3ba"
    assert Time(7, "ba") % "4ba" == "3ba"
    assert Time(1, "sec") / 4 == "0.25sec"
    assert Time(10**17 + 1, "tok") * 1 == Time(10**17 + 1, "tok")


def test_a_ratio_of_times_is_a_duration_and_scales_back():
    assert Time(5, "ba") / Time(20, "ba") == Time(0.25, "dur")
    assert Time(20, "ba") * Time(0.25, "dur") == Time(0.25, "dur") * Time(20, "ba") == Time(5, "ba")
    assert Time(0.5, "dur") * Time(0.5, "dur") == Time(0.25, "dur")


def test_a_fraction_of_100_batches_is_never_one_short():
    for percent in range(101):
        assert Time(100, "ba") * Time.from_timestring(f"{percent / 100}dur") == Time(percent, "ba")


def test_times_are_immutable_and_hashable():
    time = Time(3, "ep")
    with pytest.raises(AttributeError):
        time.value = 4
    assert {time: 1}[Time(3, "ep")] == 1
    assert (int(time), float(time), bool(time), bool(Time(0, "ep"))) == (3, 3.0, True, False)


def test_input_becomes_a_time_in_one_place():
    assert (
        ensure_time(5, "ep") == "5ep"
        and ensure_time("5ba", "ep") == "5ba"
        and ensure_time(Time(1, "st"), "ep") == "1st"
    )
    assert ensure_time(timedelta(minutes=1), TimeUnit.EPOCH) == "60sec"
    with pytest.raises(TypeError, match="has no unit"):
        Time.from_input(5)
    with pytest.raises(TypeError, match="not whole"):
        ensure_time(0.5, "ep")
