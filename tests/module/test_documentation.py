import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "module.md"


def test_snippets_of_the_guide_run():
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert names["encoder"].keys() >= {"0.weight", "1.bias"}
