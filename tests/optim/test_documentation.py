"""The guide is complete, and the benchmark runs."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "optim.md"


def test_every_schedule_is_in_the_guides_table():
    from drivetrain.optim.config import SCHEDULES

    text = PAGE.read_text()
    for file, classes in SCHEDULES.items():
        for name in classes:
            assert f"`{file}.{name}`" in text


def test_the_benchmark_runs():
    from benchmarks.optim_overhead import main

    numbers = main(blocks=4, steps=5, write=False)
    assert set(numbers) >= {"plain_us", "clipped_us", "two_units_ratio"}
