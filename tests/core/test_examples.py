"""The examples in docstrings and in the guide run as they are printed."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "core.md"


def test_the_guide_runs_from_top_to_bottom(capsys):
    namespace = {}
    snippets = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(snippets) >= 6
    for snippet in snippets:
        exec(compile(snippet, str(GUIDE), "exec"), namespace)
    assert "loss 8.0" in capsys.readouterr().out
