"""The guide's snippet runs, and its table knows every verb."""

import re
from pathlib import Path

from drivetrain.experiment.cli.verbs import VERBS
from drivetrain.runtime.seeds import capture_rng, restore_rng

PAGE = Path(__file__).parents[3] / "docs" / "command_line.md"


def test_the_guide_runs_from_top_to_bottom():
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    before = capture_rng()
    try:
        exec(compile(snippet, "docs/command_line.md", "exec"), {"__name__": "guide"})
    finally:
        restore_rng(before)


def test_the_guide_names_every_verb():
    text = PAGE.read_text()
    assert all(f"| `{verb}" in text for verb in VERBS)
