import doctest
import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "module.md"
FILES = ["average", "blocks", "clean_state", "params", "surgery", "wrappers"]


@pytest.mark.parametrize("name", FILES)
def test_examples_in_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(f"drivetrain.module.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_snippets_of_the_guide_run():
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert names["encoder"].keys() >= {"0.weight", "1.bias"}
