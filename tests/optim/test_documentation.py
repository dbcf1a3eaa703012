"""The guide's snippets, the examples in docstrings and the benchmark run as printed."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "optim.md"
FILES = ["config", "losses", "lr_lambda", "optim_set", "plotting", "scheduler", "selection", "window"]


@pytest.mark.parametrize("name", [*(f"optim.{file}" for file in FILES), "core.yaml", "core.yaml_tags"])
def test_examples_in_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(f"drivetrain.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_snippets_of_the_guide_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert (tmp_path / "rates.png").exists() and names["unit"].every == 500


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
