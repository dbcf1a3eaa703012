"""Examples in docstrings and guides run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["callbacks", "finetuning", "schedulers"])
def test_snippets_of_the_guides_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": page}
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, f"{page}.md", "exec"), names)
