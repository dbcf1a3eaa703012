"""The guide's table has every verb."""

from pathlib import Path

from drivetrain.experiment.cli.verbs import VERBS

PAGE = Path(__file__).parents[3] / "docs" / "command_line.md"


def test_the_guide_names_every_verb():
    text = PAGE.read_text()
    assert all(f"| `{verb}" in text for verb in VERBS)
