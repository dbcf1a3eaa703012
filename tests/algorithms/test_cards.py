"""Every card is complete."""

import re

import pytest

from drivetrain.algorithms import registry
from drivetrain.algorithms.registry import find, names
from drivetrain.core.event import Event
from tests.algorithms.tasks import CARDS

PAGES = sorted(CARDS.glob("*.md"))
INDEX = (CARDS / "index.md").read_text()
KNOWN = {*registry.ALGORITHMS, *map(str.lower, names())}
"""A card has the name of a module or, where a module has several algorithms, of one of them."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "index"], ids=lambda page: page.stem)
def test_a_card_says_what_a_reader_needs(page):
    text = page.read_text()
    assert page.stem in KNOWN or page.stem.replace("_", "") in KNOWN, f"{page.name} belongs to no algorithm"
    assert re.search(r"arXiv|DAWNBench|MosaicML|Paper|Source", text) and "**Cost" in text
    assert "Measured effect" in text and re.search(r"\bnot\b", text, flags=re.IGNORECASE)
    assert f"({page.name})" in INDEX, f"the table of index.md has no line for {page.name}"


def test_the_table_shows_the_events_of_each_class():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \|[^|]*\| ([^|]*) \|", INDEX, flags=re.MULTILINE)
    assert len(rows) >= 15
    for name, module, events in rows:
        assert name in names() and (CARDS / f"{module}.md").is_file()
        declared = find(name).events
        if declared:  # others choose their events when they are built
            assert {Event[word] for word in re.findall(r"[A-Z]+_?[A-Z_]*", events)} >= declared
