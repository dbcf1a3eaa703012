"""The API reference has an entry for every public name, and the names that people meet first are documented in full."""

import inspect
import re
from pathlib import Path

import pytest

import drivetrain
from tools.api_pages import MARKER, on_page_markdown, public_names

PAGES = sorted((Path(__file__).parents[1] / "docs" / "api").glob("*.md"))
FIRST = """
Trainer Trainer.train Trainer.evaluate Trainer.predict callbacks.EarlyStoppingCallback callbacks.SaveBestModelCallback
callbacks.ModelEmaCallback schedulers.CosineLrScheduler finetuning.ModelFreezer SmartDataLoader Recorder Context save_checkpoint
load_checkpoint Checkpointer OptimSet auto_accelerate Strategy sweep verify_resume
""".split()
WITHOUT_EXAMPLE = {"Trainer.train", "Trainer.evaluate", "Trainer.predict", "sweep"}
"""Their examples are those of the class and of the guides."""


def find(path):
    value = drivetrain
    for part in path.split("."):
        value = getattr(value, part)
    return value


def listed():
    """Return the definitions that the pages have entries for."""
    found = set()
    for page in PAGES:
        for marker in MARKER.finditer(page.read_text()):
            only = re.split(r",\s*", marker["names"]) if marker["names"] else ()
            found |= {home for _, home in public_names(marker["module"], only)}
    return found


def test_every_public_name_of_the_package_has_an_entry():
    entries = listed()
    wanted = dict(public_names("drivetrain"))
    for module in "callbacks schedulers experiment data record context checkpoint optim auto algorithms module core runtime".split():
        wanted |= dict(public_names(f"drivetrain.{module}"))
    assert not sorted(name for name, home in wanted.items() if home not in entries)


def test_every_public_name_has_a_docstring():
    for page in PAGES:
        for marker in MARKER.finditer(page.read_text()):
            only = re.split(r",\s*", marker["names"]) if marker["names"] else ()
            for name, _ in public_names(marker["module"], only):
                assert inspect.getdoc(find(f"{marker['module']}.{name}".removeprefix("drivetrain."))), name


def test_a_marker_becomes_one_directive_for_each_name():
    text = on_page_markdown("# A\n\n<!-- names of drivetrain: Trainer, verify_resume with inherited members -->\n")
    assert (
        text.count("::: drivetrain.") == text.count("inherited_members: true") == 2
        and "heading: drivetrain.Trainer" in text
    )


@pytest.mark.parametrize("path", FIRST)
def test_the_names_people_meet_first_document_every_argument(path):
    value = find(path)
    parameters = [name for name in inspect.signature(value).parameters if name not in ("self", "unknown")]
    text = inspect.getdoc(value)
    assert "Args:" in text
    section = text.split("Args:")[1]
    assert not [name for name in parameters if not re.search(rf"^ +\*{{0,2}}{name}: \S", section, re.MULTILINE)]
    assert ">>> " in text or path in WITHOUT_EXAMPLE
