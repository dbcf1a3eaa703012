"""Examples in docstrings and guides run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FILES = ["finetuning", "metrics", "readback", "run_config", "tracking", "utils", "schedulers.wsd_scheduler"]


@pytest.mark.parametrize("name", FILES)
def test_examples_in_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(f"drivetrain.train.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", ["callbacks", "finetuning", "schedulers"])
def test_snippets_of_the_guides_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": page}
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, f"{page}.md", "exec"), names)
