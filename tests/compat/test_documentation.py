"""The examples of the page run."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"


def test_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, PAGE.name, "exec"), {"__name__": "compat"})


def test_the_page_names_every_module_of_the_package():
    import drivetrain.compat

    modules = {path.stem for path in Path(drivetrain.compat.__file__).parent.glob("*.py")} - {"__init__"}
    text = PAGE.read_text()
    assert not [name for name in modules if f"`{name}`" not in text and not name.startswith("composer_")]
