"""The page is complete."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"


def test_the_page_names_every_module_of_the_package():
    import drivetrain.compat

    modules = {path.stem for path in Path(drivetrain.compat.__file__).parent.glob("*.py")} - {"__init__"}
    text = PAGE.read_text()
    assert not [name for name in modules if f"`{name}`" not in text and not name.startswith("composer_")]
